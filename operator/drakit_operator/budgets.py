"""
The budgets of each namespace: how many bytes of content its pods, claims and templates may have,
and how many seconds their evaluation may take.

Content is what their authors can make large: the requests of claims and templates, and the rules of
pods for nodes. Each object has a limit of its own (:mod:`drakit_explain.projection`), but a tenant
can create thousands. Equal contents count once and are one object in memory, so a Deployment of any
size costs what one of its pods costs.

Beyond the budget, an object is known without its content, and every answer about it is undecided,
until it changes or all objects of its kind are listed again; :meth:`ContentBudgets.take_room` tells
when that helps. Beyond the budget of time, the objects of a namespace wait while others have work.
Other namespaces are not affected.

It must not know queues, Events, or how content is evaluated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from drakit_explain.model import ClaimFacts, Placement, PodFacts, TemplateFacts, without_content
from drakit_explain.world import Fact

logger = logging.getLogger(__name__)

NAMESPACE_BYTES = 2 * 2**20
"""Bytes of JSON of different contents in one namespace: 8,000 claims that differ from each other. A
tenant can make each byte take 25 bytes of memory."""

MAX_NAMESPACES = 1000
"""Namespaces with a record of their time, before those with a whole budget are dropped."""

AnyFact = TypeVar("AnyFact", bound=Fact)


@dataclass(slots=True)
class _Content:
    facts: PodFacts | ClaimFacts | TemplateFacts
    """An object that has it."""

    key: Hashable
    """One object for all that use it: a key can be as large as its content."""

    size_bytes: int
    users: int = 0
    uses: dict[type[Fact], _Use] = field(default_factory=dict[type[Fact], "_Use"])
    """One object for all users of a kind."""


@dataclass(slots=True)
class _Namespace:
    contents: dict[Hashable, _Content] = field(default_factory=dict[Hashable, _Content])
    used_bytes: int = 0
    refused: set[type[Fact]] = field(default_factory=set[type[Fact]])
    """Kinds of which objects have no content since the last time that others returned theirs."""

    reported: bool = False


@dataclass(frozen=True, slots=True)
class _Use:
    kind: type[Fact]
    namespace: str
    key: Hashable


class ContentBudgets:
    """The contents in use, by namespace. Not for threads."""

    def __init__(self, *, limit_bytes: int = NAMESPACE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._namespaces: dict[str, _Namespace] = {}
        self._uses: dict[str, _Use] = {}
        self._with_room: set[type[Fact]] = set()

    def admit(self, fact: AnyFact) -> AnyFact:
        """Return an object as it is to be kept: with its content, or without it."""
        if not isinstance(fact, PodFacts | ClaimFacts | TemplateFacts):
            return fact
        key, size_bytes = _content(fact)
        use = _Use(type(fact), fact.namespace, key)
        if self._uses.get(fact.uid) != use:
            self.release(fact.uid)
            if not size_bytes:
                return fact
            namespace = self._namespaces.setdefault(fact.namespace, _Namespace())
            if key not in namespace.contents:
                if namespace.used_bytes + size_bytes > self._limit_bytes:
                    self._report(fact.namespace, namespace)
                    namespace.refused.add(type(fact))
                    return _stripped(fact, self._limit_bytes)
                namespace.contents[key] = _Content(fact, key, size_bytes)
                namespace.used_bytes += size_bytes
            content = namespace.contents[key]
            content.users += 1
            same = replace(use, key=content.key)
            self._uses[fact.uid] = content.uses.setdefault(type(fact), same)
        return _shared(fact, self._namespaces[fact.namespace].contents[key].facts)

    def release(self, uid: str) -> None:
        """Return what an object uses: it is gone, or has no content."""
        use = self._uses.pop(uid, None)
        if use is None:
            return
        namespace = self._namespaces[use.namespace]
        content = namespace.contents[use.key]
        content.users -= 1
        if not content.users:
            del namespace.contents[use.key]
            namespace.used_bytes -= content.size_bytes
            self._with_room |= namespace.refused
            namespace.refused.clear()
            if not namespace.contents:
                del self._namespaces[use.namespace]

    def retain(self, kind: type[Fact], uids: Collection[str]) -> None:
        """Return what the objects of a kind use, except for these."""
        gone = [uid for uid, use in self._uses.items() if use.kind is kind and uid not in uids]
        for uid in gone:
            self.release(uid)

    def take_room(self, kind: type[Fact]) -> bool:
        """Return whether there may be room again for contents that were refused; True only once."""
        if kind not in self._with_room:
            return False
        self._with_room.discard(kind)
        return True

    def _report(self, name: str, namespace: _Namespace) -> None:
        if not namespace.reported:
            namespace.reported = True
            logger.warning(
                "a namespace has too much content; further objects are not evaluated",
                extra={"namespace": name, "limit_bytes": self._limit_bytes},
            )


def _content(fact: PodFacts | ClaimFacts | TemplateFacts) -> tuple[Hashable, int]:
    """Return a key that is equal for equal contents, and how large the content is."""
    if isinstance(fact, PodFacts):
        key = (fact.placement.key, fact.extended, fact.requests)
        return key, fact.placement.size_bytes
    return (fact.requests, fact.constraints), fact.size_bytes


def _shared(fact: AnyFact, first: Fact) -> AnyFact:
    """Return an object with the content of an equal one."""
    match fact, first:
        case PodFacts(), PodFacts():
            if fact.placement is first.placement:
                return fact
            return replace(
                fact, placement=first.placement, extended=first.extended, requests=first.requests
            )
        case ((ClaimFacts() | TemplateFacts()), (ClaimFacts() | TemplateFacts())):
            if fact.requests is first.requests:
                return fact
            return replace(fact, requests=first.requests, constraints=first.constraints)
        case _:
            return fact


def _stripped(fact: AnyFact, limit_bytes: int) -> AnyFact:
    limit = f"more than {limit_bytes >> 10} KiB"
    match fact:
        case PodFacts():
            why = (
                f"the pods and claims of namespace {fact.namespace} have {limit} of requests and "
                f"rules for nodes, so drakit does not evaluate those of this pod"
            )
            return replace(fact, placement=Placement(unread=why), extended=(), requests=())
        case ClaimFacts() | TemplateFacts():
            why = f"the size (the pods and claims of namespace {fact.namespace} have {limit})"
            return replace(fact, requests=without_content(fact.requests, why), constraints=())
        case _:
            return fact


# ---------------------------------------------------------------- time


class TimeBudgets:
    """
    Seconds of work for each namespace, which come back as time passes.

    Work is measured afterwards: what is allowed to start may take longer than what is left, and the
    rest is paid back before the next work of the namespace. Cluster-wide objects (the empty
    namespace) are written by admins, and have no limit.
    """

    def __init__(self, *, seconds: float, share: float) -> None:
        """
        :param seconds: work of a namespace that had none for a while.
        :param share: seconds of work that come back each second.
        """
        self._seconds = seconds
        self._share = share
        self._full_at: dict[str, float] = {}
        """When each namespace has its whole budget again (loop clock)."""

    def wait_seconds(self, namespace: str) -> float:
        """Return in how many seconds the namespace may work; 0 if it may now."""
        full_at = self._full_at.get(namespace)
        if full_at is None:
            return 0.0
        return max(0.0, full_at - asyncio.get_running_loop().time() - self._seconds / self._share)

    def used_seconds(self, namespace: str) -> float:
        """Return how much of its budget a namespace has used."""
        full_at = self._full_at.get(namespace)
        if full_at is None:
            return 0.0
        return max(0.0, full_at - asyncio.get_running_loop().time()) * self._share

    def charge(self, namespace: str, seconds: float) -> None:
        """Take the time of work from what is left to a namespace."""
        if not namespace or seconds <= 0:
            return
        now = asyncio.get_running_loop().time()
        if len(self._full_at) >= MAX_NAMESPACES:
            self._full_at = {name: at for name, at in self._full_at.items() if at > now}
        self._full_at[namespace] = max(self._full_at.get(namespace, now), now) + (
            seconds / self._share
        )


class Turns:
    """
    Turns of one after the other, where a namespace that has used less of its budget comes first.

    So namespaces that use all they may do not delay those that use little. Not for threads.
    """

    def __init__(self, budgets: TimeBudgets) -> None:
        self._budgets = budgets
        self._busy = False
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    def is_waiting(self, namespace: str) -> bool:
        """Return whether a namespace waits for a turn."""
        return any(each == namespace for each, _ in self._waiting)

    @asynccontextmanager
    async def turn(self, namespace: str) -> AsyncGenerator[None]:
        """Wait for a turn, and keep it until the end of the block."""
        if self._busy:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append((namespace, waiter))
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._hand_over()  # the turn came with the cancellation
                raise
            finally:
                self._waiting = [each for each in self._waiting if each[1] is not waiter]
        self._busy = True
        try:
            yield
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give the turn to the next one; it stays taken, so that no other comes in between."""
        waiting = [each for each in self._waiting if not each[1].done()]
        self._busy = bool(waiting)
        if waiting:
            _, waiter = min(waiting, key=lambda each: self._budgets.used_seconds(each[0]))
            waiter.set_result(None)
