"""
The typed store: the operator's facts of the cluster, with the indexes that its queries need.

It takes facts and deletions, returns the changes, and answers as
:class:`drakit.explain.ClusterFacts`. It lives in the main loop and is never touched from another
thread. The concerns decide which objects a change affects (their ``handlers``).

It must not know Kopf, sessions, queues, or Events.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from drakit.explain import (
    Availability,
    ClaimFacts,
    ClassFacts,
    DeviceID,
    Matches,
    PodFacts,
    PoolCounters,
    PoolID,
    Published,
    Request,
    SliceFacts,
    TemplateFacts,
    availability,
    current_counters,
    current_devices,
    match_devices,
)
from drakit_operator.kinds import CLAIMS, CLASSES, PODS, SLICES, TEMPLATES, Fact, Kind, Name

__all__ = ("Change", "Store")

Value = TypeVar("Value", bound=Sized | None)

CACHED_DEVICES = 5_000_000
"""Devices in all cached selections, 8 bytes each: 40 selections of all devices of a cluster with
128,000 devices. A selection belongs to a class and a set of selectors, and is cached until a slice
changes."""

_ENTRY = 16
"""The weight of an empty answer, which limits the number of questions as well."""

CACHED_HOLDERS = 100_000
"""Claims and namespaces in all cached answers about available devices. These are cached until a
slice changes, or a claim allocates or releases a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One object as it was and as it is; None where there is none."""

    kind: Kind
    name: Name
    old: Fact | None
    new: Fact | None


def classes_of(requests: Iterable[Request]) -> Iterator[str]:
    """Return the classes that requests name, including those of alternatives."""
    for request in requests:
        if request.alternatives:
            yield from classes_of(request.alternatives)
        else:
            yield request.device_class


class _Cache(Generic[Value]):
    """Answers by question, limited by their total weight: the oldest are dropped first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._answers: dict[Hashable, tuple[Value, int]] = {}
        """With the size of each."""
        self._size = 0

    def __contains__(self, question: Hashable) -> bool:
        return question in self._answers

    def __getitem__(self, question: Hashable) -> Value:
        return self._answers[question][0]

    def put(self, question: Hashable, answer: Value, *, expressions: Iterable[str]) -> Value:
        """Keep an answer; `expressions` is the users' text in the query."""
        size = _ENTRY + (len(answer) if answer is not None else 0) + _size_of(expressions)
        self._answers[question] = answer, size
        self._size += size
        while self._size > self._capacity:
            _, size = self._answers.pop(next(iter(self._answers)))
            self._size -= size
        return answer

    def clear(self) -> None:
        self._answers.clear()
        self._size = 0


def _size_of(expressions: Iterable[str]) -> int:
    """Return the size of texts in references to devices, of 8 bytes each."""
    return sum(map(len, expressions)) // 8


@dataclass(slots=True)
class _Index:
    """From a key to the objects that refer to it."""

    entries: dict[Name, set[Name]] = field(default_factory=dict[Name, set[Name]])

    def add(self, keys: Iterable[Name], name: Name) -> None:
        for key in keys:
            self.entries.setdefault(key, set()).add(name)

    def discard(self, keys: Iterable[Name], name: Name) -> None:
        for key in keys:
            names = self.entries.get(key)
            if names is not None:
                names.discard(name)
                if not names:
                    del self.entries[key]

    def find(self, key: Name) -> frozenset[Name]:
        return frozenset(self.entries.get(key, ()))


def _fact_name(fact: Fact) -> Name:
    if isinstance(fact, (ClassFacts, SliceFacts)):
        return Name("", fact.name)
    return Name(fact.namespace, fact.name)


class Store:
    """Facts by kind and name. Not for threads."""

    def __init__(self) -> None:
        self._pods: dict[Name, PodFacts] = {}
        self._claims: dict[Name, ClaimFacts] = {}
        self._templates: dict[Name, TemplateFacts] = {}
        self._classes: dict[Name, ClassFacts] = {}
        self._slices: dict[Name, SliceFacts] = {}
        self._pods_of_claim = _Index()
        self._pods_of_template = _Index()
        self._templates_of_class = _Index()
        self._claims_of_class = _Index()
        self._holders: dict[DeviceID, Name] = {}
        self._sharers: dict[DeviceID, set[Name]] = {}
        self._devices: list[Published] | None = None
        self._counters: dict[PoolID, PoolCounters] | None = None
        self._selections = _Cache[Matches](CACHED_DEVICES)
        self._available = _Cache[Availability | None](CACHED_HOLDERS)

    # ---- what goes in

    def apply(self, kind: Kind, fact: Fact) -> Change | None:
        """Store an object as it is now; None if nothing changed."""
        name = _fact_name(fact)
        if isinstance(fact, PodFacts) and not fact.claims:
            return self.remove(kind, name, uid=None)  # most pods: not worth their memory
        old = self._objects(kind).get(name)
        if old == fact:
            return None
        self._put(name, old, fact)
        return Change(kind=kind, name=name, old=old, new=fact)

    def remove(self, kind: Kind, name: Name, *, uid: str | None) -> Change | None:
        """Store a deletion; one of a UID that was already replaced is ignored."""
        old = self._objects(kind).get(name)
        if old is None or (uid is not None and old.uid != uid):
            return None
        self._put(name, old, None)
        return Change(kind=kind, name=name, old=old, new=None)

    def replace(self, kind: Kind, facts: Iterable[Fact]) -> list[Change]:
        """Store a complete list: objects that are missing in it are gone."""
        listed = {_fact_name(fact): fact for fact in facts}
        gone = [name for name in self._objects(kind) if name not in listed]
        changes = [self.remove(kind, name, uid=None) for name in gone]
        changes += [self.apply(kind, fact) for fact in listed.values()]
        return [change for change in changes if change is not None]

    def clear(self) -> None:
        """Forget everything: another replica leads, and the facts become stale."""
        self.__init__()

    # ---- queries

    def uids(self, kind: Kind) -> dict[Name, str]:
        """Return the UIDs of the known objects of a kind, by name."""
        return {name: fact.uid for name, fact in self._objects(kind).items()}

    def find(self, kind: Kind, name: Name) -> Fact | None:
        return self._objects(kind).get(name)

    def size(self, kind: Kind) -> int:
        return len(self._objects(kind))

    def pod(self, namespace: str, name: str) -> PodFacts | None:
        return self._pods.get(Name(namespace, name))

    def claim(self, namespace: str, name: str) -> ClaimFacts | None:
        return self._claims.get(Name(namespace, name))

    def template(self, namespace: str, name: str) -> TemplateFacts | None:
        return self._templates.get(Name(namespace, name))

    def device_class(self, name: str) -> ClassFacts | None:
        return self._classes.get(Name("", name))

    def holder(self, device: DeviceID) -> ClaimFacts | None:
        name = self._holders.get(device)
        return self._claims.get(name) if name is not None else None

    def sharers(self, device: DeviceID) -> list[ClaimFacts]:
        """Return the claims that have shares of a device."""
        return [self._claims[name] for name in self._sharers.get(device, ())]

    def counters(self, pool: PoolID) -> PoolCounters | None:
        """Return the shared counters of a pool; read again when a slice has changed."""
        if self._counters is None:
            self._counters = current_counters(self._slices.values())
        return self._counters.get(pool)

    def matches(self, expressions: tuple[str, ...]) -> Matches:
        """Select published devices; the answer is kept until a slice changes."""
        if expressions in self._selections:
            return self._selections[expressions]
        if self._devices is None:
            self._devices = current_devices(self._slices.values())
        matches = match_devices(self._devices, expressions)
        return self._selections.put(expressions, matches, expressions=expressions)

    def available(self, request: Request, expressions: tuple[str, ...]) -> Availability | None:
        """Return which selected devices are available; equal requests of many pods share it."""
        key = (
            expressions,
            request.count,
            request.admin_access,
            request.tolerations,
            request.capacity,
        )
        if key in self._available:
            return self._available[key]
        answer = availability(self.matches(expressions), request, self)
        return self._available.put(key, answer, expressions=expressions)

    def waiting_pods(self) -> Iterator[Name]:
        """Return the pending pods that have claims and no node yet."""
        return (name for name, pod in self._pods.items() if pod.node is None)

    def pods_of_claim(self, name: Name) -> frozenset[Name]:
        return self._pods_of_claim.find(name)

    def pods_of_template(self, name: Name) -> frozenset[Name]:
        return self._pods_of_template.find(name)

    def templates_of_class(self, name: str) -> frozenset[Name]:
        return self._templates_of_class.find(Name("", name))

    def claims_of_class(self, name: str) -> frozenset[Name]:
        return self._claims_of_class.find(Name("", name))

    # ---- bookkeeping

    def _objects(self, kind: Kind) -> Mapping[Name, Fact]:
        tables: dict[str, Mapping[Name, Fact]] = {
            PODS.plural: self._pods,
            CLAIMS.plural: self._claims,
            TEMPLATES.plural: self._templates,
            CLASSES.plural: self._classes,
            SLICES.plural: self._slices,
        }
        return tables[kind.plural]

    def _put(self, name: Name, old: Fact | None, new: Fact | None) -> None:
        if old is not None:
            self._unlink(name, old)
        if new is not None:
            self._link(name, new)

    def _link(self, name: Name, fact: Fact) -> None:
        match fact:
            case PodFacts():
                self._pods[name] = fact
                self._pods_of_claim.add(_claim_names(fact), name)
                self._pods_of_template.add(_template_names(fact), name)
            case ClaimFacts():
                self._claims[name] = fact
                self._claims_of_class.add(_class_names(fact.requests), name)
                if fact.devices or fact.shares:
                    self._available.clear()
                self._holders.update(dict.fromkeys(fact.devices, name))
                for share in fact.shares:
                    self._sharers.setdefault(share.device, set()).add(name)
            case TemplateFacts():
                self._templates[name] = fact
                self._templates_of_class.add(_class_names(fact.requests), name)
            case ClassFacts():
                self._classes[name] = fact
            case SliceFacts():
                self._slices[name] = fact
                self._slices_changed()

    def _unlink(self, name: Name, fact: Fact) -> None:
        match fact:
            case PodFacts():
                del self._pods[name]
                self._pods_of_claim.discard(_claim_names(fact), name)
                self._pods_of_template.discard(_template_names(fact), name)
            case ClaimFacts():
                del self._claims[name]
                self._claims_of_class.discard(_class_names(fact.requests), name)
                if fact.devices or fact.shares:
                    self._available.clear()
                for device in fact.devices:
                    if self._holders.get(device) == name:
                        del self._holders[device]
                for device in {share.device for share in fact.shares}:
                    self._sharers[device].discard(name)
                    if not self._sharers[device]:
                        del self._sharers[device]
            case TemplateFacts():
                del self._templates[name]
                self._templates_of_class.discard(_class_names(fact.requests), name)
            case ClassFacts():
                del self._classes[name]
            case SliceFacts():
                del self._slices[name]
                self._slices_changed()

    def _slices_changed(self) -> None:
        self._devices = None
        self._counters = None
        self._selections.clear()
        self._available.clear()


def _claim_names(pod: PodFacts) -> list[Name]:
    names = [each.claim or each.generated for each in pod.claims]
    return [Name(pod.namespace, name) for name in names if name is not None]


def _template_names(pod: PodFacts) -> list[Name]:
    return [Name(pod.namespace, each.template) for each in pod.claims if each.template is not None]


def _class_names(requests: Iterable[Request]) -> list[Name]:
    return [Name("", name) for name in classes_of(requests)]
