"""
Provides the allocator's verdicts about claims on nodes, which are either cached or planned as
queries.

If an explanation lacks a verdict, it plans the query, continues without the verdict, and ends with
:class:`QueriesPendingError`. The caller runs the planned queries, and repeats the explanation. The
cache key of a verdict is the input of the allocator: the claims, the classes, and the profile of
the node (:mod:`.profiles`). Therefore, a change on one node costs one query for each request.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import orjson

from drakit_explain.allocation import AskedClaim
from drakit_explain.budget import Budget
from drakit_explain.devices import (
    Amount,
    CapacityFacts,
    CounterSetFacts,
    DeviceFacts,
    Place,
    TaintFacts,
    bits,
)
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    Constraint,
    DeviceID,
    Request,
    SliceFacts,
    exact_of,
)
from drakit_explain.pools import NodePool
from drakit_explain.profiles import Profiles
from drakit_explain.recent import keep
from drakit_explain.selectors import attribute_body
from drakit_explain.verdicts import Verdict, VerdictOutcome
from drakit_explain.world import World
from drakit_formats.resource.nodes import Requirement
from drakit_formats.resource.objects import Object, children

MAX_KEPT = 1 << 17
"""Maximum number of verdicts to cache. Each takes about 100 bytes. In a cluster where all nodes
differ, a pod needs one for each node. If a verdict is dropped before the explanation ends, the
query is repeated."""

MAX_PROFILES = 64
MAX_NODES = 1 << 16
"""Maximum number of lists of claims to cache profiles for, and of node profiles in all of them.
They take 15 MiB."""

MAX_PLANNED = 64
MAX_BYTES = 1 << 20
"""Maximum number of queries to plan before an explanation ends, and their maximum size in bytes."""

STEPS_PER_PART = 4
"""How many steps each request and device in a query costs."""

MAX_UNDECIDED = 2
"""Maximum number of queries about the same claims to run without a result, because each can take
seconds."""


_UNAVAILABLE = Verdict(outcome=VerdictOutcome.UNAVAILABLE)
"""The most frequent verdict. It is one shared object to save memory."""


class QueriesPendingError(Exception):
    """The planned queries must be run before the explanation is repeated."""


class Released(NamedTuple):
    """Specifies which claims to treat as if they had released their devices."""

    claim: str | None = None
    """The UID of the only such claim. None means all claims."""

    kept: frozenset[str] = frozenset()
    """The UIDs of claims that still have their devices."""

    def holds(self, claim: ClaimFacts) -> bool:
        """Return whether a claim still has its devices."""
        return claim.uid in self.kept or self.claim not in (None, claim.uid)


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """The facts to replace in a query, apart from those of its claims."""

    released: Released | None = None
    all_free: bool = False
    """Whether to treat all claims as unallocated, and all devices as untainted."""

    without_errors: bool = False
    """Whether to omit devices for which a selector fails."""


NO_CHANGES = Changes()
ALL_FREE = Changes(all_free=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A query about one node."""

    key: int
    claims: int
    """A number that is the same for queries with equal claims."""

    body: bytes
    """JSON in the format of ``operator/cel/verdict.go``, without the feature gates."""

    minor: int | None
    """The minor version of Kubernetes (1.x) whose allocator is used. None if unknown."""


class _Asked(NamedTuple):
    """The input of a query."""

    claims: Sequence[AskedClaim]
    key: int
    """A number that is the same for equal claims and classes."""

    node: str
    changes: Changes
    budget: Budget

    @property
    def exact(self) -> list[Request]:
        """Return the requests of all claims, or their alternatives."""
        return exact_of(each for claim in self.claims for each in claim.requests)


class Verdicts:
    """Caches and plans verdicts about the claims of one world. Not thread-safe."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[int, Verdict] = {}
        """The verdicts, keyed by a 64-bit hash. The hash includes strings, whose hashes are
        randomized, so it is not predictable."""

        self._profiles: dict[int, Profiles] = {}
        self._last: tuple[Sequence[AskedClaim], int, int] = ((), 0, 0)
        """The last claims, with the revision of rules and the hash, which is slow to compute."""

        self._planned: dict[int, Query] = {}
        self._planned_bytes = 0
        self._undecided: dict[int, list[Verdict]] = {}
        """The verdicts of queries without a result, keyed by the number of their claims."""

        self._minor = world.minor
        self.revision: int = 0
        """A number that increases when verdicts are dropped."""

    # ---- for callers that run queries

    def take(self) -> list[Query]:
        """Return the planned queries, and start a new plan."""
        planned, self._planned, self._planned_bytes = self._planned, {}, 0
        return list(planned.values())

    def keep(self, query: Query, verdict: Verdict) -> None:
        """Store the result of a query."""
        if verdict.outcome is VerdictOutcome.UNDECIDED:
            self._undecided.setdefault(query.claims, []).append(verdict)
        same = _UNAVAILABLE if verdict == _UNAVAILABLE else verdict
        keep(self._known, query.key, same, limit=MAX_KEPT)

    def forget_undecided(self) -> None:
        """Drop verdicts without a result, so that the queries can be repeated."""
        self.revision += 1
        self._undecided.clear()
        undecided = VerdictOutcome.UNDECIDED
        self._known = {k: each for k, each in self._known.items() if each.outcome is not undecided}

    def clear(self) -> None:
        """Drop all verdicts, because a different allocator is used from now on."""
        self.revision += 1
        self._known.clear()
        self._undecided.clear()
        self._planned.clear()

    # ---- for explanations

    @property
    def planned(self) -> int:
        """The number of planned queries."""
        return len(self._planned)

    def check(self) -> None:
        """Raise :class:`QueriesPendingError` if queries are planned."""
        if self._planned:
            raise QueriesPendingError

    def find(
        self,
        claims: Sequence[AskedClaim],
        node: str,
        budget: Budget,
        changes: Changes = NO_CHANGES,
    ) -> Verdict | None:
        """
        Return the verdict about claims on a node, or None if the query for it is planned.

        Raises :class:`QueriesPendingError` if enough queries are planned,
        :class:`BudgetSpentError`, and :class:`NotEvaluatedError` if a selector has no result.
        """
        if self._minor != self._world.minor:
            self._minor = self._world.minor
            self.clear()
        asked = self._ask(claims, node, budget, changes)
        key = hash((asked.key, changes, *self._state(asked)))
        found = self._known.get(key)
        if found is None and key not in self._planned:
            if len(undecided := self._undecided.get(asked.key, [])) >= MAX_UNDECIDED:
                return undecided[-1]
            self._planned[key] = planned = self._query(asked, key)
            self._planned_bytes += len(planned.body)
            if len(self._planned) >= MAX_PLANNED or self._planned_bytes >= MAX_BYTES:
                raise QueriesPendingError
        return found

    def query(self, claims: Sequence[AskedClaim], node: str, budget: Budget) -> Query:
        """Return the query about claims on a node, even if its verdict is cached, because the
        verdict can name the devices of another node with an equal profile."""
        return self._query(self._ask(claims, node, budget, NO_CHANGES), 0)

    def profile(
        self,
        claims: Sequence[AskedClaim],
        node: str,
        budget: Budget,
        changes: Changes = NO_CHANGES,
    ) -> int:
        """Return the number of a node's profile. On all nodes with the same number, the claims get
        the same result."""
        return self._profile(self._ask(claims, node, budget, changes))

    def _ask(
        self, claims: Sequence[AskedClaim], node: str, budget: Budget, changes: Changes
    ) -> _Asked:
        revision = self._world.rules_revision
        if self._last[0] is not claims or self._last[1] != revision:
            exact = exact_of(each for claim in claims for each in claim.requests)
            budget.spend(len(exact))
            named = dict.fromkeys(each.device_class for each in exact)
            classes = map(self._world.device_class, named)
            key = hash((tuple(claims), tuple([each and each.selectors for each in classes])))
            self._last = claims, revision, key
        return _Asked(claims, self._last[2], node, changes, budget)

    def _state(self, asked: _Asked) -> Iterator[object]:
        """Return the facts that determine a verdict, apart from claims and changes."""
        yield self._declared(asked.node)
        if asked.changes.released is None:
            yield self._profile(asked)
            return
        # Include the node, because its profile does not show which claim has which device.
        world = self._world
        yield asked.node
        yield world.slices_revision, world.rules_revision
        yield tuple([world.stamp(each) for each in self._pools(asked.node)])

    def _profile(self, asked: _Asked) -> int:
        world, all_free = self._world, asked.changes.all_free
        number = hash((asked.key, all_free))
        entry = self._profiles.get(number)
        if entry is None or entry.revision < world.rules_revision:
            asked.budget.spend(STEPS_PER_PART * len(asked.exact))
            while sum(len(each.known) for each in self._profiles.values()) > MAX_NODES:
                del self._profiles[next(iter(self._profiles))]
            entry = Profiles(world, asked.claims, all_free=all_free)
        keep(self._profiles, number, entry, limit=MAX_PROFILES)
        return entry.number(asked.node, self._pools(asked.node), asked.budget)

    def _pools(self, node: str) -> Sequence[NodePool]:
        return self._world.pools_of_node(self._world.views()[node])

    def _declared(self, node: str) -> tuple[str, ...]:
        found = self._world.node(node)
        return found.declared if found is not None else ()

    # ---- the query

    def _query(self, asked: _Asked, key: int) -> Query:
        world = self._world
        pools = dict.fromkeys(each.identity for each in self._pools(asked.node))
        slices = [of for pool in pools for of in world.slices_of_pool(pool)]
        exact = asked.exact
        parts = len(exact) + sum(len(of.devices) for of in slices)
        asked.budget.spend(STEPS_PER_PART * parts)
        body = orjson.dumps(self._body(asked, exact, slices))
        return Query(key=key, claims=asked.key, body=body, minor=world.minor)

    def _body(
        self, asked: _Asked, exact: Sequence[Request], slices: Sequence[SliceFacts]
    ) -> Object:
        world, changes = self._world, asked.changes
        metadata = {"name": asked.node, "labels": dict(world.views()[asked.node].labels)}
        declared = self._declared(asked.node)  # versions before 1.35 do not have this field
        status = {"status": {"declaredFeatures": declared}} if declared else {}
        classes = map(world.device_class, dict.fromkeys(each.device_class for each in exact))
        taints = _no_taints if changes.all_free else world.taints
        return {
            "nodes": [{"metadata": metadata, **status}],
            "claims": [claim_body(each, number) for number, each in enumerate(asked.claims)],
            "classes": [class_body(each) for each in classes if each is not None],
            "slices": [
                slice_body(
                    of, taints, without=self._failing(exact, of) if changes.without_errors else ()
                )
                for of in slices
            ],
            "inUse": [] if changes.all_free else list(self._in_use(slices, changes.released)),
        }

    def _failing(self, exact: Sequence[Request], of: SliceFacts) -> set[int]:
        """Return the devices that are not allocated to a claim and for which a selector fails."""
        failing = {index for each in exact for index in self._world.selected(each, of).errors}
        return failing - set(bits(self._world.allocated_in(of)))

    def _in_use(self, slices: Sequence[SliceFacts], released: Released | None) -> Iterator[Object]:
        world = self._world
        for device in (
            DeviceID(of.driver, of.pool, name) for of in slices for name in of.devices.names
        ):
            holder = world.holder(device)
            if holder is not None and (released is None or released.holds(holder)):
                yield _result(device)
            for claim in world.sharers(device):
                for number, share in enumerate(claim.shares):
                    if share.device == device and (released is None or released.holds(claim)):
                        consumed = {each.name: each.quantity for each in share.consumed}
                        # The allocator of 1.36 treats an empty map differently from an absent one.
                        some = {"consumedCapacity": consumed} if consumed else {}
                        yield {**_result(device), "shareID": f"{claim.uid}-{number}", **some}


def _no_taints(device: DeviceID, facts: DeviceFacts) -> Sequence[TaintFacts]:
    return ()


def _result(device: DeviceID) -> dict[str, object]:
    return {"request": "r", "driver": device.driver, "pool": device.pool, "device": device.device}


Found = TypeVar("Found")


def answered(
    verdicts: Verdicts, find: Callable[[], Found], answer: Callable[[Query], Verdict]
) -> Found:
    """Call `find` until it has a result, and use `answer` to run the queries that it plans. This
    may take seconds."""
    while True:
        try:
            return find()
        except QueriesPendingError:
            for query in verdicts.take():
                verdicts.keep(query, answer(query))


Taints = Callable[[DeviceID, DeviceFacts], Sequence[TaintFacts]]


# ---------------------------------------------------------------- facts as JSON of the API
#
# Fields that do not change a verdict are omitted, such as parameters of drivers and names of
# binding conditions. A slice with fields that this version does not know is written unchanged.


def claim_body(claim: AskedClaim, number: int) -> Object:
    """Return the JSON of a claim to allocate."""
    name = claim_name(number)
    devices = {
        "requests": [_request(each) for each in claim.requests],
        "constraints": [_constraint(each) for each in claim.constraints],
    }
    return {
        "metadata": {"namespace": "", "name": name, "uid": name},
        "spec": {"devices": devices},
    }


def claim_name(number: int) -> str:
    """Return the name of a claim in a query, so that equal pods have equal queries."""
    return f"claim-{number}"


def _request(request: Request) -> Object:
    if request.alternatives:
        return {
            "name": request.name,
            "firstAvailable": [_exact(each) for each in request.alternatives],
        }
    exact = _exact(request)
    return {"name": exact.pop("name"), "exactly": exact}


def _exact(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = {
        "name": request.name,
        "deviceClassName": request.device_class,
        "allocationMode": "All" if request.every else "ExactCount",
        **({} if request.every else {"count": request.count}),
        "selectors": _selectors(request.selectors),
        **orjson.loads(request.extra or b"{}"),
    }
    if request.admin_access:
        body["adminAccess"] = True
    if request.tolerations:
        body["tolerations"] = [
            {"key": each.key, "operator": each.operator, "value": each.value, "effect": each.effect}
            for each in request.tolerations
        ]
    if request.capacity:
        body["capacity"] = {"requests": _amounts(request.capacity)}
    return body


def _constraint(constraint: Constraint) -> Object:
    compared = {constraint.kind: constraint.attribute} if constraint.attribute else {}
    extra = orjson.loads(constraint.extra or b"{}")
    return {"requests": list(constraint.requests), **compared, **extra}


def _selectors(expressions: Sequence[str]) -> list[Object]:
    return [{"cel": {"expression": each}} for each in expressions]


def _amounts(amounts: Sequence[Amount]) -> Object:
    return {each.name: each.quantity for each in amounts}


def class_body(of: ClassFacts) -> Object:
    """Return the JSON of a DeviceClass."""
    return {"metadata": {"name": of.name}, "spec": {"selectors": _selectors(of.selectors)}}


def slice_body(of: SliceFacts, taints: Taints, *, without: Container[int] = ()) -> Object:
    """
    Return the JSON of a slice.

    :param taints: returns the taints of a device, including those of DeviceTaintRules.
    :param without: the indexes of devices to omit.
    """
    spec = orjson.loads(zlib.decompress(of.raw)) if of.raw else _spec(of)
    devices: list[Object] = []
    for index, (facts, body) in enumerate(zip(of.devices, children(spec, "devices"), strict=True)):
        if index not in without:
            found = taints(DeviceID(of.driver, of.pool, facts.name), facts)
            devices.append({**body, "taints": [_taint(each) for each in found]})
    return {"metadata": {"name": of.name}, "spec": {**spec, "devices": devices}}


def _spec(of: SliceFacts) -> dict[str, Any]:
    spec = {
        "driver": of.driver,
        "pool": {
            "name": of.pool,
            "generation": of.generation,
            "resourceSliceCount": of.pool_slices,
        },
        **_place(of.place),
        "devices": [_device(each) for each in of.devices],
    }
    if of.by_device:
        spec["perDeviceNodeSelection"] = True
    if of.counter_sets:
        spec["sharedCounters"] = [
            {"name": each.name, "counters": _counters(each)} for each in of.counter_sets
        ]
    return spec


def _place(place: Place | None) -> Object:
    if place is None:
        return {}
    if place.node:
        return {"nodeName": place.node}
    if place.every or place.selector is None:
        return {"allNodes": place.every}
    terms = [
        {"matchFields": _requirements(fields), "matchExpressions": _requirements(expressions)}
        for fields, expressions in place.selector
    ]
    return {"nodeSelector": {"nodeSelectorTerms": terms}}


def _requirements(found: Sequence[Requirement]) -> list[Object]:
    return [{"key": each.key, "operator": each.operator, "values": each.values} for each in found]


def _device(device: DeviceFacts) -> Object:
    kind = device.kind
    body: dict[str, Any] = {
        "name": device.name,
        "attributes": {
            name: attribute_body(value)
            for name, value in zip(kind.attributes, device.values, strict=True)
        },
        "capacity": {each.name: _capacity(each) for each in kind.capacity},
        **_place(device.place),
    }
    if kind.shareable:
        body["allowMultipleAllocations"] = True
    if kind.binding:
        body["bindingConditions"] = body["bindingFailureConditions"] = ["drakit.dev/any"]
    if device.consumes:
        body["consumesCounters"] = [
            {"counterSet": each.name, "counters": _counters(each)} for each in device.consumes
        ]
    return body


def _capacity(capacity: CapacityFacts) -> Object:
    policy = capacity.policy
    if policy is None:
        return {"value": capacity.value}
    span = {"min": policy.min, "max": policy.max, "step": policy.step}
    span = {name: value for name, value in span.items() if value is not None}
    found = {"default": policy.default, "validValues": policy.valid_values, "validRange": span}
    rules = {name: value for name, value in found.items() if value}
    return {"value": capacity.value, "requestPolicy": rules}


def _counters(of: CounterSetFacts) -> Object:
    return {each.name: {"value": each.quantity} for each in of.counters}


def _taint(taint: TaintFacts) -> Object:
    return {"key": taint.key, "value": taint.value, "effect": taint.effect}
