"""
Enforces the store's memory limits: one for the content of the pods, claims and templates in all
namespaces together, and one for each node's slices and reports.

Content is the part of an object that its author can make large: the requests of claims and
templates, and the scheduling rules of pods. Each object has its own limit
(:mod:`drakit_explain.projection`), but tenants can create thousands of objects. Objects of a
namespace with equal content share it in memory, and it is counted once, so a Deployment of any size
costs as much as one of its pods.

All namespaces share one limit. When it is reached, the namespaces with the most content lose some
of it, the newest first. An object that has lost its content stays in the store without it. Every
result about the object is undecided, until it changes or all objects of its kind are listed again.
:meth:`ContentBudgets.take_room` returns whether listing the kind again would help.

Does not depend on queues or Events.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from sys import getsizeof, intern
from typing import Any, TypeVar, cast

from drakit_explain.devices import NO_DEVICES
from drakit_explain.model import (
    ClaimFacts,
    Placement,
    PodFacts,
    ReportFacts,
    Request,
    SliceFacts,
    TemplateFacts,
)
from drakit_explain.world import Fact

logger = logging.getLogger(__name__)

STORE_BYTES = 64 * 2**20
"""Maximum memory for the distinct contents of all namespaces. It is enough for about 30,000 claims
that all differ."""

NODE_BYTES = 4 * 2**20
"""Maximum memory for the slices and reports of one node. It is enough for 2,000 completely
different devices, or 10,000 similar ones."""

ROOM = 16
"""The fraction of all content to drop at a time (a sixteenth), so that not every new object
requires a search. Lost content is listed again when there is room for twice as much."""

MAX_REPORTED = 1000
"""Maximum number of namespaces to name in the log."""

AnyFact = TypeVar("AnyFact", bound=Fact)
_WithContent = PodFacts | ClaimFacts | TemplateFacts

_FIELDS: Mapping[type[Fact], Sequence[str]] = {
    PodFacts: ("placement", "extended", "requests"),
    ClaimFacts: ("requests", "constraints"),
    TemplateFacts: ("requests", "constraints"),
}
"""The fields that contain the content, keyed by type."""


@dataclass(slots=True, eq=False)
class _Content:
    """The content that equal objects of a kind and namespace share."""

    namespace: str
    key: tuple[Any, ...]
    """The type of the objects, and the values of their fields with content. All of the objects have
    these values."""

    size_bytes: int
    users: int = 0
    lost: bool = False

    @property
    def kind(self) -> type[_WithContent]:
        return self.key[0]


@dataclass(slots=True, eq=False)
class _Namespace:
    contents: dict[Hashable, _Content] = field(default_factory=dict[Hashable, _Content])
    """The contents in the order in which they were added."""

    used_bytes: int = 0


class ContentBudgets:
    """Tracks the contents in use, grouped by namespace. Not thread-safe."""

    def __init__(self, *, limit_bytes: int = STORE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._namespaces: dict[str, _Namespace] = {}
        self._uses: dict[str, _Content] = {}
        """The contents, keyed by the UIDs of the objects that use them."""

        self._refused: set[type[Fact]] = set()
        """Kinds with objects that have lost their content since the kind was last listed."""

        self._lost: dict[str, type[Fact]] = {}
        """The objects that lost their content after they were admitted, keyed by UID."""

        self._reported: set[str] = set()
        self.losses = 0
        """How many times an object has lost content that it had when it was admitted."""

    def admit(self, fact: AnyFact) -> AnyFact:
        """Return the object to store, with or without its content."""
        if not isinstance(fact, PodFacts | ClaimFacts | TemplateFacts):
            return fact
        fields = _FIELDS[type(fact)]
        key = (type(fact), *(getattr(fact, each) for each in fields))
        used = self._uses.get(fact.uid)
        if used is None or used.key != key:
            self.release(fact.uid)
            namespace = self._namespaces.setdefault(fact.namespace, _Namespace())
            used = namespace.contents.get(key)
            if used is None:
                used = _Content(fact.namespace, key, _memory_bytes(key))
                if not self._has_room(used, namespace.used_bytes):
                    self._refuse(used)
                    if not namespace.contents:
                        del self._namespaces[fact.namespace]
                    return self._stripped(fact)
                namespace.contents[key] = used
                namespace.used_bytes += used.size_bytes
                self._used_bytes += used.size_bytes
            used.users += 1
            self._uses[fact.uid] = used
        if all(map(operator.is_, used.key, key)):
            return fact
        return replace(fact, **dict(zip(fields, used.key[1:], strict=True)))

    def without_lost(self, fact: AnyFact) -> AnyFact:
        """Return the object to store for an admitted object, without its content if that has been
        lost."""
        return self._stripped(fact) if fact.uid in self._lost else fact

    def release(self, uid: str) -> None:
        """Free the content of an object that is gone, or that no longer has content."""
        self._lost.pop(uid, None)
        content = self._uses.pop(uid, None)
        if content is None:
            return
        content.users -= 1
        if not content.users:
            self._drop(content)

    def retain(self, kind: type[Fact], uids: Collection[str]) -> None:
        """Free the content of all objects of a kind, except for these."""
        kinds = {uid: content.kind for uid, content in self._uses.items()} | self._lost
        for uid, each in kinds.items():
            if each is kind and uid not in uids:
                self.release(uid)

    def take_room(self, kind: type[Fact]) -> bool:
        """Return whether there is room again for rejected content. Returns True only once."""
        room_bytes = self._limit_bytes - self._used_bytes
        if kind not in self._refused or room_bytes < 2 * self._limit_bytes // ROOM:
            return False
        self._refused.discard(kind)
        return True

    def _has_room(self, content: _Content, used_bytes: int) -> bool:
        """Make room for content by dropping some from namespaces that have more. Return whether the
        content fits."""
        if self._used_bytes + content.size_bytes <= self._limit_bytes:
            return True
        used_before = self._used_bytes
        goal_bytes = self._limit_bytes - self._limit_bytes // ROOM - content.size_bytes
        most = sorted(self._namespaces.values(), key=lambda each: each.used_bytes, reverse=True)
        for namespace in most:
            if namespace.used_bytes <= used_bytes + content.size_bytes:
                break
            keep_bytes = namespace.used_bytes // 2
            while namespace.used_bytes > keep_bytes and self._used_bytes > goal_bytes:
                newest = next(reversed(namespace.contents.values()))
                newest.lost = True
                self._drop(newest)
                self._refuse(newest)
        if self._used_bytes < used_before:
            lost = {uid: each.kind for uid, each in self._uses.items() if each.lost}
            for uid in lost:
                del self._uses[uid]
            self._lost |= lost
            self.losses += len(lost)
        return self._used_bytes + content.size_bytes <= self._limit_bytes

    def _drop(self, content: _Content) -> None:
        namespace = self._namespaces[content.namespace]
        del namespace.contents[content.key]
        namespace.used_bytes -= content.size_bytes
        self._used_bytes -= content.size_bytes
        if not namespace.contents:
            del self._namespaces[content.namespace]

    def _refuse(self, content: _Content) -> None:
        """Record that an object's content is not stored, and report its namespace once."""
        self._refused.add(content.kind)
        name = content.namespace
        if name not in self._reported and len(self._reported) < MAX_REPORTED:
            self._reported.add(name)
            logger.warning(
                "a namespace has too much content; some of its objects are not evaluated",
                extra={"namespace": name, "limit_bytes": self._limit_bytes},
            )

    def _stripped(self, fact: AnyFact) -> AnyFact:
        limit = f"{self._limit_bytes >> 20} MiB"
        match fact:
            case PodFacts():
                why = (
                    f"the pods and claims of all namespaces have more than {limit} of requests and "
                    f"rules for nodes, and namespace {fact.namespace} has too many of them, so "
                    f"drakit does not evaluate those of this pod"
                )
                unread = Placement(unread=intern(why))
                return replace(fact, placement=unread, extended=(), requests=())
            case ClaimFacts() | TemplateFacts():
                why = (
                    f"the size (the pods and claims of all namespaces have more than {limit}, and "
                    f"namespace {fact.namespace} has too many of them)"
                )
                unread = Request(name="", device_class="", unsupported=intern(why))
                return replace(fact, requests=(unread,), constraints=())
            case _:
                return fact


class NodeBudgets:
    """
    Tracks how much memory the slices and reports of each node use. Not thread-safe.

    Beyond the limit, a slice is stored without its devices, and results that could depend on them
    are uncertain. A report is stored with only its name. When these objects are deleted, others of
    the node may get their content back.
    """

    def __init__(self, *, limit_bytes: int = NODE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._used: Counter[str] = Counter()
        """Bytes, keyed by node."""

        self._uses: dict[str, tuple[str, type[Fact], int]] = {}
        """The node, kind and bytes of each object, keyed by UID."""

        self._refused: dict[str, set[type[Fact]]] = {}
        self._with_room: set[type[Fact]] = set()

    def admit(self, fact: Fact) -> Fact:
        """Return the object to store, with or without its content."""
        if not isinstance(fact, SliceFacts | ReportFacts):
            return fact
        node = fact.node if isinstance(fact, ReportFacts) else fact.place and fact.place.node
        size_bytes = _memory_bytes(fact) if node else 0
        of, _, used_bytes = self._uses.get(fact.uid, (node, None, 0))
        if of != node or size_bytes < used_bytes:
            self.release(fact.uid)
            used_bytes = 0
        if not node:
            return fact
        if self._used[node] - used_bytes + size_bytes > self._limit_bytes:
            return self._refuse(fact, node)
        self._used[node] += size_bytes - used_bytes
        self._uses[fact.uid] = node, type(fact), size_bytes
        return fact

    def _refuse(self, fact: SliceFacts | ReportFacts, node: str) -> Fact:
        """Return an object without its content, and report its node once."""
        self.release(fact.uid)
        if node not in self._refused:
            logger.warning(
                "a node publishes too much; some of its slices or reports are not evaluated",
                extra={"node": node, "limit_bytes": self._limit_bytes},
            )
        self._refused.setdefault(node, set()).add(type(fact))
        if isinstance(fact, SliceFacts):
            return replace(fact, devices=NO_DEVICES, counter_sets=(), unread=True)
        name, uid, driver = fact.name, fact.uid, fact.driver
        return ReportFacts(name=name, uid=uid, node=node, driver=driver, policies_omitted=True)

    def release(self, uid: str) -> None:
        """Free the bytes of an object that is gone or is about to change."""
        node, _, used_bytes = self._uses.pop(uid, ("", None, 0))
        if node:
            self._used[node] -= used_bytes
            self._with_room |= self._refused.get(node, set())
            if not self._used[node]:
                del self._used[node]

    def retain(self, kind: type[Fact], uids: Collection[str]) -> None:
        """Free the bytes of all objects of a kind, except for these."""
        for uid in [uid for uid, (_, each, _) in self._uses.items() if each is kind]:
            if uid not in uids:
                self.release(uid)

    def take_room(self, kind: type[Fact]) -> bool:
        """Return whether there may be room for rejected content. Returns True only once."""
        if kind not in self._with_room:
            return False
        self._with_room.discard(kind)
        for kinds in self._refused.values():
            kinds.discard(kind)
        self._refused = {node: kinds for node, kinds in self._refused.items() if kinds}
        return True


_PLAIN = frozenset((str, int, bool, type(None)))


def _memory_bytes(content: object) -> int:
    """Return how many bytes of memory plain data takes. An object that occurs twice is counted
    once."""
    found: dict[int, int] = {}
    left = [content]
    while left:
        each = left.pop()
        key = id(each)
        if key in found or isinstance(each, type):
            continue
        found[key] = getsizeof(each)
        if not isinstance(each, tuple):
            left += (getattr(each, name) for name in getattr(type(each), "__slots__", ()))
            continue
        values = cast("tuple[object, ...]", each)
        if _PLAIN.issuperset(map(type, values)):  # true for most data, and a loop is slower
            found[key] += sum(map(getsizeof, set(values)))
        else:
            left += values
    return sum(found.values())
