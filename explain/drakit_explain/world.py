"""
The facts of a cluster, indexed for explanations: for example, the holders of devices, and the
slices of a node.

A world receives facts and deletions one by one or as complete lists. The operator keeps a world up
to date from watches, and ``kubectl drakit`` fills one from lists.

Does not depend on clients, threads, or Events.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, get_args

from drakit_explain.allocation import Consumed, NotEvaluatedError, Selected, consumed_of
from drakit_explain.devices import DeviceFacts, TaintFacts, bits
from drakit_explain.loads import Loads
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    DeviceID,
    DriverFacts,
    MaintenanceFacts,
    NamespaceFacts,
    NodeFacts,
    PodFacts,
    PolicyFacts,
    PoolID,
    QuotaFacts,
    ReportFacts,
    Request,
    SliceFacts,
    TaintRuleFacts,
    TemplateFacts,
    exact_of,
)
from drakit_explain.pools import NodePool, NodeView, PoolState, pools_of_node, rules_of
from drakit_explain.selectors import THE_REQUEST, Evaluated, SelectorIndex, only_driver, selector_of

Fact = (
    PodFacts
    | ClaimFacts
    | TemplateFacts
    | ClassFacts
    | SliceFacts
    | NodeFacts
    | TaintRuleFacts
    | NamespaceFacts
    | QuotaFacts
    | PolicyFacts
    | ReportFacts
    | DriverFacts
    | MaintenanceFacts
)
AnyFact = TypeVar("AnyFact", bound=Fact)

_UNREADABLE = PoolID("", "")

EVERYWHERE = ""
"""The key of slices that do not set ``nodeName``, or that contain counters."""


MAX_MASKS = 64
"""Maximum number of device sets per slice to cache the holders of. Each distinct selector can
result in a different set."""


class Name(NamedTuple):
    """The namespace and name of an object. For cluster-scoped objects, the namespace is empty."""

    namespace: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An object before and after a change. `old` is None for a new object, and `new` for a removed
    one."""

    name: Name
    old: Fact | None
    new: Fact | None


class _Use(NamedTuple):
    """An object that others refer to, and the kind of the referring objects."""

    by: type[Fact]
    kind: type[Fact]
    name: Name


class Reachable(NamedTuple):
    """A slice of a pool that is ready, and the nodes that can use it."""

    slice: SliceFacts
    pool: NodePool
    nodes: list[str]
    plain: bool
    """Whether no device of the slice has taints, counters, shares or a separate node selection."""

    def is_same(self, other: Reachable) -> bool:
        return self.slice is other.slice and self.pool is other.pool and self.nodes == other.nodes


def name_of_fact(fact: Fact) -> Name:
    return Name(fact.in_namespace, fact.name)


class World:
    """Facts, keyed by kind and name. Not thread-safe."""

    def __init__(self) -> None:
        self._facts: dict[type[Fact], dict[Name, Fact]] = {kind: {} for kind in get_args(Fact)}
        self._users: dict[_Use, set[Name]] = {}
        self._slices_by_place: dict[str, dict[str, SliceFacts]] = {}
        self._slices_by_pool: dict[PoolID, dict[str, SliceFacts]] = {}
        self._holders: dict[DeviceID, Name] = {}
        self._sharers: dict[DeviceID, set[Name]] = {}
        self._not_allocated: set[Name] = set()
        self._pools: dict[str, list[NodePool]] = {}
        self._views: dict[str, NodeView] | None = None
        self._reachable: tuple[Reachable, ...] | None = None
        self._uncounted: list[SliceFacts] | None = None
        self._devices: int | None = None
        self._rules: dict[tuple[str, str], dict[Name, TaintRuleFacts]] = {}
        self._not_ready: list[tuple[str, NodePool]] | None = None
        self._allocated_in: dict[str, int] = {}
        self._holders_in: dict[str, dict[int, Mapping[str, ClaimFacts]]] = {}
        self._found_in: dict[str, dict[object, Any]] = {}
        self._stamps: dict[PoolID, int] = {}
        self._known_reachable: dict[str, Reachable] = {}
        self.selectors: SelectorIndex = SelectorIndex()
        self.loads: Loads | None = None
        """The requests of the pods on each node. None if they are unknown."""

        self.minor: int | None = None
        """The minor version of Kubernetes (1.x). None if it is unknown."""

        self.hidden: frozenset[type[Fact]] = frozenset()
        """The kinds that may not be listed. Objects of these kinds may exist even though they are
        missing here."""

        self.revision: int = 0
        """A number that increases with each change to devices and their holders."""

        self.slices_revision: int = 0
        """The revision of the last change to a slice or node."""

        self.rules_revision: int = 0
        """The revision of the last change to a DeviceClass or DeviceTaintRule."""

        self.registrations_revision: int = 0
        """A number that increases when a driver is registered or unregistered with the kubelet."""

    # ---- updates

    def use_release(self, minor: int | None) -> bool:
        """Set the minor version of Kubernetes (1.x) unless it is None. Return whether it has
        changed."""
        if minor is None or minor == self.minor:
            return False
        self.minor = minor
        self._pools.clear()
        self._reachability_changed()
        return True

    def apply(self, fact: Fact) -> Change | None:
        """Store an object. Return the change, or None if there is none."""
        name = name_of_fact(fact)
        old = self._facts[type(fact)].get(name)
        if old == fact:
            return None
        self._put(name, old, fact)
        return Change(name=name, old=old, new=fact)

    def confirm(self, old: Fact | None, new: Fact) -> None:
        """Store the object that a write returned, unless the world's object changed during the
        write. In that case, the watch reports a later state."""
        if self._facts[type(new)].get(name_of_fact(new)) is old:
            self.apply(new)

    def remove(self, kind: type[Fact], name: Name, *, uid: str | None = None) -> Change | None:
        """Remove an object, unless an object with a different UID has taken its name."""
        old = self._facts[kind].get(name)
        if old is None or (uid is not None and old.uid != uid):
            return None
        self._put(name, old, None)
        return Change(name=name, old=old, new=None)

    def replace(self, kind: type[Fact], facts: Collection[Fact]) -> Iterator[Change | None]:
        """
        Process a complete list: objects that are missing from it are gone.

        Yield after each object, with its change if there is one, because the list may be long.
        """
        listed: set[Name] = set()
        for fact in facts:
            listed.add(name_of_fact(fact))
            yield None
        for name in [name for name in self._facts[kind] if name not in listed]:
            yield self.remove(kind, name)
        for fact in facts:
            yield self.apply(fact)

    # ---- objects

    def of(self, kind: type[AnyFact]) -> Mapping[Name, AnyFact]:
        """Return all objects of a kind. The result is a view, not a copy."""
        return self._facts[kind]  # pyright: ignore[reportReturnType] - by construction

    def pod(self, namespace: str, name: str) -> PodFacts | None:
        return self.of(PodFacts).get(Name(namespace, name))

    def claim(self, namespace: str, name: str) -> ClaimFacts | None:
        return self.of(ClaimFacts).get(Name(namespace, name))

    def template(self, namespace: str, name: str) -> TemplateFacts | None:
        return self.of(TemplateFacts).get(Name(namespace, name))

    def device_class(self, name: str) -> ClassFacts | None:
        return self.of(ClassFacts).get(Name("", name))

    def node(self, name: str) -> NodeFacts | None:
        return self.of(NodeFacts).get(Name("", name))

    def pods_of_claim(self, name: Name) -> frozenset[Name]:
        return self._users_of(_Use(PodFacts, ClaimFacts, name))

    def pods_of_template(self, name: Name) -> frozenset[Name]:
        return self._users_of(_Use(PodFacts, TemplateFacts, name))

    def templates_of_class(self, name: str) -> frozenset[Name]:
        return self._users_of(_Use(TemplateFacts, ClassFacts, Name("", name)))

    def claims_of_class(self, name: str) -> frozenset[Name]:
        return self._users_of(_Use(ClaimFacts, ClassFacts, Name("", name)))

    def _users_of(self, use: _Use) -> frozenset[Name]:
        return frozenset(self._users.get(use, ()))

    def waiting_claims(self) -> Iterator[ClaimFacts]:
        """Return the claims that are not allocated."""
        return (self.of(ClaimFacts)[name] for name in self._not_allocated)

    def waiting_pods(self) -> Iterator[Name]:
        """Return the names of the pods that do not have a node yet, or have not started on it."""
        return (
            name
            for name, pod in self.of(PodFacts).items()
            if pod.node is None or pod.phase == "Pending"
        )

    # ---- devices

    def slices(self) -> Collection[SliceFacts]:
        return self.of(SliceFacts).values()

    def slices_of_pool(self, pool: PoolID) -> Collection[SliceFacts]:
        return self._slices_by_pool.get(pool, {}).values()

    def slices_of_node(self, node: str) -> Collection[SliceFacts]:
        """Return the slices that name a node, except for those that contain counters."""
        return self._slices_by_place.get(node, {}).values()

    def nodes_with_slices(self) -> Iterable[str]:
        """Return the names of the nodes that slices name."""
        return (place for place in self._slices_by_place if place != EVERYWHERE)

    def pools_of_node(self, node: NodeView) -> Sequence[NodePool]:
        """Return the pools of a node, in the scheduler's order. Cached until a slice, the node or
        the version of Kubernetes changes."""
        if node.name not in self._pools:
            near = self._slices_by_place.get(node.name, {})
            shared = self._slices_by_place.get(EVERYWHERE, {})
            pools = {each.of_pool for each in (*near.values(), *shared.values())}
            self._pools[node.name] = pools_of_node(
                (each for pool in pools for each in self.slices_of_pool(pool)),
                node,
                rules=rules_of(self.minor),
            )
        return self._pools[node.name]

    def views(self) -> Mapping[str, NodeView]:
        """
        Return all nodes. If nodes may not be listed, return the nodes that slices name, without
        labels.

        The result is cached until a node or a slice changes, because each query about a node needs
        it.
        """
        if self._views is None:
            nodes = self.of(NodeFacts)
            self._views = {
                name.name: NodeView(name.name, node.labels) for name, node in nodes.items()
            } or {name: NodeView(name, {}) for name in self.nodes_with_slices()}
        return self._views

    def reachable(self) -> Sequence[Reachable]:
        """
        Return the slices from which nodes allocate devices. Cached until a slice or node changes.

        The entry of an unchanged slice is the same object as before.
        """
        if self._reachable is None:
            found: dict[str, Reachable] = {}
            for name, view in self.views().items():
                for pool in self.pools_of_node(view):
                    for each in pool.slices:
                        entry = found.get(each.name)
                        if entry is None:
                            entry = found[each.name] = Reachable(each, pool, [], _is_plain(each))
                        entry.nodes.append(name)
            known = self._known_reachable
            self._known_reachable = {
                name: old if (old := known.get(name)) and old.is_same(new) else new
                for name, new in found.items()
            }
            self._reachable = tuple(self._known_reachable.values())
        return self._reachable

    def uncounted(self) -> Sequence[SliceFacts]:
        """Return the slices that contain devices, but from which no node allocates. Cached until a
        slice or node changes."""
        if self._uncounted is None:
            counted = {each.slice.name for each in self.reachable()}
            every = self.slices() if len(counted) < len(self.slices()) else ()
            self._uncounted = [each for each in every if each.devices and each.name not in counted]
        return self._uncounted

    def counted_one_by_one(self) -> int:
        """Return the number of reachable devices that must be counted one by one, because they have
        taints, counters, shares or a separate node selection. In a pool with DeviceTaintRules,
        these are all devices."""
        if self._devices is None:
            self._devices = sum(
                len(each.slice.devices)
                for each in self.reachable()
                if not each.plain or self.rules_of_pool(each.slice.of_pool)
            )
        return self._devices

    def not_ready(self) -> Sequence[tuple[str, NodePool]]:
        """Return the pools from which the scheduler does not allocate devices, each with the name
        of its node."""
        if self._not_ready is None:
            self._not_ready = [
                (name, pool)
                for name, view in self.views().items()
                for pool in self.pools_of_node(view)
                if pool.state is not PoolState.READY
            ]
        return self._not_ready

    def stamp(self, pool: NodePool) -> int:
        """Return the revision of the last change to an allocation in a pool."""
        return self._stamps.get(pool.identity, 0)

    def pools_changed_since(self, revision: int) -> Iterator[PoolID]:
        """Yield the pools in which an allocation has changed since a revision, the latest change
        first."""
        for pool, changed in reversed(self._stamps.items()):
            if changed <= revision:
                return
            yield pool

    def unreadable(self) -> list[str]:
        """Return the names of the slices that exist but could not be read. They may contain any
        devices."""
        return [name for name, pool in self._slices_by_pool.get(_UNREADABLE, {}).items() if pool]

    def allocated_in(self, of: SliceFacts) -> int:
        """Return a bitmask of a slice's devices that claims hold exclusively."""
        if of.name not in self._allocated_in:
            mask = 0
            for index, name in enumerate(of.devices.names):
                if (of.driver, of.pool, name) in self._holders:
                    mask |= 1 << index
            self._allocated_in[of.name] = mask
        return self._allocated_in[of.name]

    def holders_in(self, of: SliceFacts, devices: int) -> Mapping[str, ClaimFacts]:
        """Return the claims that exclusively hold any of the given devices of a slice, keyed by
        UID. `devices` is a bitmask."""
        known = self._holders_in.setdefault(of.name, {})
        if devices not in known:
            if len(known) >= MAX_MASKS:
                known.clear()
            names = [of.devices.names[index] for index in bits(devices)]
            claims = [self.holder(DeviceID(of.driver, of.pool, name)) for name in names]
            known[devices] = {claim.uid: claim for claim in claims if claim is not None}
        return known[devices]

    def found_in(self, of: SliceFacts) -> dict[object, Any]:
        """Return a cache for results about a slice, which is valid until the slice or its holders
        change."""
        found = self._found_in.setdefault(of.name, {})
        if len(found) >= MAX_MASKS:
            found.clear()
        return found

    def holder(self, device: DeviceID) -> ClaimFacts | None:
        """Return the claim that holds a device exclusively."""
        name = self._holders.get(device)
        return self.of(ClaimFacts).get(name) if name is not None else None

    def sharers(self, device: DeviceID) -> list[ClaimFacts]:
        """Return the claims that have shares of a device."""
        return [self.of(ClaimFacts)[name] for name in self._sharers.get(device, ())]

    def is_shared(self, device: DeviceID) -> bool:
        return device in self._sharers

    @property
    def has_shares(self) -> bool:
        """Whether any device is shared."""
        return bool(self._sharers)

    def consumed(self, device: DeviceID) -> Consumed | None:
        """Return how much of a device's capacity the shares consume, or None if they consume
        nothing."""
        shares = (share for claim in self.sharers(device) for share in claim.shares)
        return consumed_of(device, shares)

    def rules_of_pool(self, pool: PoolID) -> Sequence[TaintRuleFacts]:
        """Return the DeviceTaintRules that can taint devices in a pool. A cluster can have
        thousands of rules, but most of them apply to a single device."""
        if not self._rules:
            return ()
        keys = (pool, (pool.driver, ""), ("", pool.pool), ("", ""))
        return [rule for key in keys for rule in self._rules.get(key, {}).values()]

    def taints(self, device: DeviceID, facts: DeviceFacts) -> Sequence[TaintFacts]:
        """Return a device's taints, including those of DeviceTaintRules."""
        rules = self.rules_of_pool(device.of_pool) if self._rules else ()
        added = tuple(rule.taint for rule in rules if rule.selects(device))
        return (*facts.taints, *added) if added else facts.taints

    def taint_rules(self, device: DeviceID, taints: Collection[TaintFacts]) -> Iterator[str]:
        """Yield the names of the DeviceTaintRules that add one of these taints to a device."""
        rules = self.rules_of_pool(device.of_pool)
        return (each.name for each in rules if each.taint in taints and each.selects(device))

    # ---- selectors

    def forget_outcomes(self) -> None:
        """Drop the results of all selectors, because the evaluation rules have changed."""
        self.selectors.clear()
        self.revision += 1
        self.rules_revision = self.revision

    def expressions(self, request: Request) -> tuple[tuple[str, str], ...]:
        """Return the selectors of a request in the scheduler's order, each as a pair of its owner
        and expression."""
        device_class = self.device_class(request.device_class)
        of_class = device_class.selectors if device_class is not None else ()
        return (
            *((f"class {request.device_class}", each) for each in of_class),
            *((THE_REQUEST, each) for each in request.selectors),
        )

    def texts(self, requests: Iterable[Request]) -> list[str]:
        """Return the selectors that must be evaluated for requests, or their alternatives."""
        exact = exact_of(requests)
        return [text for each in exact for _, text in self.expressions(each) if text]

    def concerns(self, request: Request, driver: str) -> bool:
        """Return whether a request could select devices of a driver, whether or not the devices are
        known."""
        return all(
            only_driver(expression) in (None, driver) for _, expression in self.expressions(request)
        )

    def selected(self, request: Request, of: SliceFacts, *, without: str = "") -> Selected:
        """
        Return the results of all selectors of a request for a slice.

        :param without: an expression to treat as true.
        """
        alive = (1 << len(of.devices)) - 1
        errors: dict[int, str] = {}
        rejected: list[int] = []
        for owner, expression in self.expressions(request):
            if not alive:
                break
            if not expression:
                raise NotEvaluatedError(
                    f"a selector of {owner} is too large, so drakit does not evaluate it"
                )
            if expression == without:
                continue
            try:
                problem = self.selectors.problem(expression)
                found = None if problem else self.selectors.evaluated(expression, of)
            except KeyError:
                raise NotEvaluatedError(f"a selector of {owner} is not evaluated yet") from None
            # If the selector does not compile, each device that reaches it stops the allocation.
            if found is None:
                error = f"{selector_of(owner)} does not compile: {problem}"
                errors |= dict.fromkeys(bits(alive), error)
                alive = 0
                break
            if found.unknown:
                raise NotEvaluatedError(f"a selector of {owner}: {found.unknown}")
            failed = {index: text for index, text in found.errors.items() if alive >> index & 1}
            subject = selector_of(owner)
            errors |= {index: f"{subject} fails: {text}" for index, text in failed.items()}
            left = alive & found.matches
            rejected.append(alive.bit_count() - left.bit_count() - len(failed))
            alive = left
        return Selected(matches=alive, errors=errors, rejected=tuple(rejected))

    # ---- bookkeeping

    def _put(self, name: Name, old: Fact | None, new: Fact | None) -> None:
        if old is not None:
            del self._facts[type(old)][name]
            self._unlink(name, old)
            self._changed(old)
        if new is not None:
            self._facts[type(new)][name] = new
            self._link(name, new)
            self._changed(new)
        if _registration(old) != _registration(new):
            self.registrations_revision += 1

    def _link(self, name: Name, fact: Fact) -> None:
        for use in _uses(fact):
            self._users.setdefault(use, set()).add(name)
        if isinstance(fact, ClaimFacts):
            if not fact.allocated:
                self._not_allocated.add(name)
            self._holders.update(dict.fromkeys(fact.devices, name))
            for share in fact.shares:
                self._sharers.setdefault(share.device, set()).add(name)
        elif isinstance(fact, TaintRuleFacts) and fact.adds_taints:
            self._rules.setdefault((fact.driver, fact.pool), {})[name] = fact
        elif isinstance(fact, SliceFacts):
            self._slices_by_place.setdefault(_place_of(fact), {})[fact.name] = fact
            self._slices_by_pool.setdefault(fact.of_pool, {})[fact.name] = fact

    def _unlink(self, name: Name, fact: Fact) -> None:
        for use in set(_uses(fact)):
            _discard(self._users, use, name)
        if isinstance(fact, ClaimFacts):
            self._not_allocated.discard(name)
            for device in fact.devices:
                if self._holders.get(device) == name:
                    del self._holders[device]
            for device in {share.device for share in fact.shares}:
                _discard(self._sharers, device, name)
        elif isinstance(fact, TaintRuleFacts) and fact.adds_taints:
            _drop(self._rules, (fact.driver, fact.pool), name)
        elif isinstance(fact, SliceFacts):
            _drop(self._slices_by_place, _place_of(fact), fact.name)
            _drop(self._slices_by_pool, fact.of_pool, fact.name)
            if fact.of_pool not in self._slices_by_pool:
                self._stamps.pop(fact.of_pool, None)
            self.selectors.forget([fact.name])

    def _changed(self, fact: Fact) -> None:
        match fact:
            case ClaimFacts():
                self._claim_changed(fact)
            case SliceFacts():
                self._slice_changed(fact)
            case NodeFacts():
                self._pools.pop(fact.name, None)
                self._views = None
                self._reachability_changed()
            case ClassFacts() | TaintRuleFacts():
                self.revision += 1
                self.rules_revision = self.revision
                self._devices = None
            case _:
                pass

    def _reachability_changed(self) -> None:
        self.revision += 1
        self.slices_revision = self.revision
        self._reachable = None
        self._uncounted = None
        self._devices = None
        self._not_ready = None

    def _claim_changed(self, fact: ClaimFacts) -> None:
        pools = {device.of_pool for device in fact.devices}
        pools.update(share.device.of_pool for share in fact.shares)
        # Claims with only admin access are included, because they also determine on which nodes
        # pods can run.
        if fact.allocated:
            self.revision += 1
        for pool in pools & self._slices_by_pool.keys():
            self._stamps.pop(pool, None)  # reinsert the entry, so that the newest is last
            self._stamps[pool] = self.revision
            for of in self.slices_of_pool(pool):
                self._forget_holders(of)

    def _forget_holders(self, of: SliceFacts) -> None:
        self._allocated_in.pop(of.name, None)
        self._holders_in.pop(of.name, None)
        self._found_in.pop(of.name, None)

    def _slice_changed(self, fact: SliceFacts) -> None:
        self._reachability_changed()
        if not self.of(NodeFacts):
            self._views = None  # the views may be built from slices
        self._forget_holders(fact)
        place = _place_of(fact)
        nodes = {_place_of(each) for each in self.slices_of_pool(fact.of_pool)} | {place}
        if EVERYWHERE in nodes:
            self._pools.clear()
        for node in nodes:
            self._pools.pop(node, None)


Key = TypeVar("Key")
Of = TypeVar("Of")


def _drop(table: dict[Key, dict[Of, Any]], key: Key, name: Of) -> None:
    table[key].pop(name, None)
    if not table[key]:
        del table[key]


def _discard(table: dict[Key, set[Name]], key: Key, name: Name) -> None:
    table[key].discard(name)
    if not table[key]:
        del table[key]


def _registration(fact: Fact | None) -> str:
    return fact.registration if isinstance(fact, ReportFacts) else ""


def _place_of(fact: SliceFacts) -> str:
    """Return the node that a slice names. Return EVERYWHERE for a slice that contains counters,
    because it may affect every node."""
    if fact.place is None or fact.counter_sets:
        return EVERYWHERE
    return fact.place.node


def _is_plain(of: SliceFacts) -> bool:
    devices = of.devices
    return not (
        of.by_device
        or devices.taints
        or devices.consumes
        or any(group.kind.shareable for group in devices.groups)
    )


def _uses(fact: Fact) -> Iterator[_Use]:
    """Yield the objects to which an object refers."""
    if isinstance(fact, PodFacts):
        names = [each.claim or each.generated for each in fact.claims]
        for name in filter(None, (*names, fact.extended_claim)):
            yield _Use(PodFacts, ClaimFacts, Name(fact.namespace, name))
        for name in filter(None, (each.template for each in fact.claims)):
            yield _Use(PodFacts, TemplateFacts, Name(fact.namespace, name))
    elif isinstance(fact, (ClaimFacts, TemplateFacts)):
        for each in exact_of(fact.requests):
            yield _Use(type(fact), ClassFacts, Name("", each.device_class))


class Selection:
    """The devices that one request selects. Valid until a DeviceClass changes."""

    def __init__(self, world: World, request: Request, *, without: str = "") -> None:
        """:param without: an expression to treat as true."""
        self._world = world
        self._request = request
        self._without = without
        self._expressions = [text for _, text in world.expressions(request) if text != without]
        self._known: dict[tuple[int, ...], tuple[list[Evaluated], Selected]] = {}
        """The results, keyed by the number of devices and the identity of the outcomes, which the
        value keeps alive."""

    def of(self, of: SliceFacts) -> Selected:
        """
        Return the devices of a slice that pass all selectors.

        Raises :class:`NotEvaluatedError` if a selector has no result.
        """
        index = self._world.selectors
        try:
            outcomes = [index.evaluated(each, of) for each in self._expressions]
        # Let `selected` report a selector that does not compile, or has not been evaluated.
        except KeyError:
            return self._world.selected(self._request, of, without=self._without)
        key = (len(of.devices), *map(id, outcomes))
        known = self._known.get(key)
        if known is None:
            found = self._world.selected(self._request, of, without=self._without)
            known = self._known[key] = (outcomes, found)
        return known[1]
