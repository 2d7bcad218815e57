"""
Selects the objects that must be checked again after other objects have changed.

Selecting too many objects is harmless: each is queued once, and nothing is announced twice. If an
object is missed, its announcement is missing or wrong.

Does not depend on queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from drakit_explain.broken import node_of_claim
from drakit_explain.devices import DeviceFacts
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
    SliceFacts,
    TaintRuleFacts,
    TemplateFacts,
)
from drakit_explain.poolchecks import node_of_slice
from drakit_explain.reports import MAINTENANCE as TAINT
from drakit_explain.world import AnyFact, Change, Fact, Name, World

POD, CLAIM, TEMPLATE, CLASS, NODE, SLICE = "pod", "claim", "template", "class", "node", "slice"
POLICY, REPORT, MAINTENANCE, DRIVER = "policy", "report", "maintenance", "driver"
"""The concerns: the kinds of objects to check, named as in the queue and in metrics."""


class Key(NamedTuple):
    """Identifies an object of a concern."""

    concern: str
    name: Name


ALL_DRIVERS = Key(DRIVER, Name("", ""))
"""All drivers are reconciled together."""


def affected(changes: Iterable[Change], world: World) -> Iterable[Key]:
    """Return the objects that must be checked again, without duplicates."""
    found = _Affected(world)
    for change in changes:
        _FOLLOW[type(change.new or change.old)](found, change)
    found.sweep()
    return found.keys


class _Affected:
    """
    The objects that a batch of changes affects.

    Changes that affect many objects are evaluated once per batch. Otherwise, thousands of slices
    times thousands of pods would block the main loop.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.keys: dict[Key, None] = {}
        self._all_that_wait = False
        self._places: set[str] = set()
        """Namespaces in which pods may now be able to get their claims."""

        self._nodes: set[str] = set()
        """Nodes that were added or deleted. They affect the claims that have devices on these
        nodes."""

        self._tainted: set[tuple[str, str]] = set()
        """The drivers and pools to which changed taint rules apply. An empty name matches any
        driver or pool."""

        self._devices: set[DeviceID] = set()
        """Devices that changed, or that other claims hold now. They affect the maintenances that
        include them."""

        self._pools: set[PoolID] = set()
        """Pools of which a slice or the node was added or deleted. Other nodes may have pools with
        the same name."""

    def _add(self, concern: str, names: Iterable[Name]) -> None:
        self.keys.update((Key(concern, name), None) for name in names)

    def _add_drivers(self) -> None:
        self.keys[ALL_DRIVERS] = None

    def sweep(self) -> None:
        """Add the objects that the batch as a whole affects."""
        world = self.world
        if self._all_that_wait:
            self._add(POD, world.waiting_pods())
        elif self._places:
            waiting = (each for each in world.waiting_pods() if each.namespace in self._places)
            self._add(POD, (each for each in waiting if _lacks_claim(world.pod(*each))))
        if self._nodes or self._tainted:
            self._add(
                CLAIM,
                (
                    name
                    for name, claim in world.of(ClaimFacts).items()
                    if claim.allocated
                    and (node_of_claim(claim) in self._nodes or self._is_tainted(claim))
                ),
            )
        if self._devices:
            maintenances = world.of(MaintenanceFacts).items()
            concerned = (
                of for of, one in maintenances if not self._devices.isdisjoint(one.devices)
            )
            self._add(MAINTENANCE, concerned)
        for each in (each for pool in self._pools for each in world.slices_of_pool(pool)):
            self._add_node(each)

    def _is_tainted(self, claim: ClaimFacts) -> bool:
        """Return whether a claim may have devices that a rule taints."""
        return bool(self._tainted) and any(
            (driver, pool) in self._tainted
            for device in (each.device for each in claim.results)
            for driver in (device.driver, "")
            for pool in (device.pool, "")
        )

    # ------------------------------------------------------------ pods and their claims

    def pod(self, change: Change) -> None:
        self._add(POD, [change.name])
        old, new = _both(change, PodFacts)
        if any(each is not None and each.node for each in (old, new)):
            self._add_drivers()
        if old is not None and new is None:
            for each in old.claims:  # another pod may now represent the claim
                if each.claim is not None:
                    self._add(POD, self.world.pods_of_claim(Name(old.namespace, each.claim)))
            # Check the claims that were created for the pod, because the pod's Events also reported
            # their problems.
            made = (*(each.generated for each in old.claims), old.extended_claim)
            self._add(CLAIM, (Name(old.namespace, each) for each in made if each))

    def claim(self, change: Change) -> None:
        self._add(CLAIM, [change.name])
        self._add_drivers()
        old, new = _both(change, ClaimFacts)
        if _held(old) != _held(new):  # devices were freed, allocated, or given to other claims
            self._all_that_wait = True
            for each in filter(None, (old, new)):
                self._devices.update(each.devices, (share.device for share in each.shares))
        else:
            self._add(POD, self.world.pods_of_claim(change.name))

    def template(self, change: Change) -> None:
        self._add(TEMPLATE, [change.name])
        self._add(POD, self.world.pods_of_template(change.name))

    def place(self, change: Change) -> None:
        self._places.add(change.name.namespace or change.name.name)

    # ------------------------------------------------------------ devices

    def device_class(self, change: Change) -> None:
        name = change.name.name
        self._all_that_wait = True
        self._add(CLASS, [change.name])
        self._add(CLAIM, self.world.claims_of_class(name))
        self._add(TEMPLATE, self.world.templates_of_class(name))
        policies = self.world.of(PolicyFacts)
        self._add(POLICY, (of for of, each in policies.items() if each.class_name == name))
        self._add(POLICY, self._with_resource_of(change))

    def slice(self, change: Change) -> None:
        self._all_that_wait = True
        self._add_drivers()
        old, new = _both(change, SliceFacts)
        if old is None and new is not None:
            self._add(SLICE, [change.name])
        for each in filter(None, (old, new)):
            self._add_node(each)
            if _comes_or_goes(change):
                self._pools.add(each.of_pool)
                if on := node_of_slice(each):
                    self._add(REPORT, [Name("", f"{on}.{each.driver}")])
        if (of := new or old) is not None:
            before, after = (_devices(old), _devices(new))
            for name in before.keys() | after.keys():
                if before.get(name) != after.get(name):
                    self._devices.add(device := DeviceID(of.driver, of.pool, name))
                    self._add_holders(device)

    def node(self, change: Change) -> None:
        self._all_that_wait = True
        if _comes_or_goes(change):
            self._nodes.add(change.name.name)
            self._add(NODE, [change.name])
            for each in self.world.slices_of_node(change.name.name):
                self._pools.add(each.of_pool)
                self._add(SLICE, [Name("", each.name)])
        old, new = _both(change, NodeFacts)
        if _of_policies(old) != _of_policies(new):
            self._add(POLICY, self.world.of(PolicyFacts))  # each policy has a node selector
            self._add_drivers()

    def rule(self, change: Change) -> None:
        self._all_that_wait = True
        self._add_drivers()
        for each in _both(change, TaintRuleFacts):
            if each is not None and each.adds_taints:
                self._tainted.add((each.driver, each.pool))
            if each is not None and each.taint.key == TAINT:
                self._add(MAINTENANCE, [Name("", each.taint.value)])

    def _add_node(self, of: SliceFacts) -> None:
        if node := node_of_slice(of):
            self._add(NODE, [Name("", node)])

    def _add_holders(self, device: DeviceID) -> None:
        holder = self.world.holder(device)
        holders = [holder] if holder is not None else self.world.sharers(device)
        self._add(CLAIM, (Name(each.namespace, each.name) for each in holders))

    # ------------------------------------------------------------ reports and policies

    def report(self, change: Change) -> None:
        self._add(REPORT, [change.name])
        old, new = _both(change, ReportFacts)
        if _without_time(old) != _without_time(new):
            self._add_drivers()
        if _quoted(old) != _quoted(new):
            self._all_that_wait = True
        for one, other in ((old, new), (new, old)):
            known = other.unhealthy if other else ()
            for driver, each in ((one.driver, each) for each in one.unhealthy) if one else ():
                if each not in known:  # the driver's report about the device has changed
                    self._add_holders(DeviceID(driver, each.pool, each.device))
        before, after = (each.policies if each else () for each in (old, new))
        same = old and new and (old.refused, old.outdated) == (new.refused, new.outdated)
        outcomes = set(before) ^ set(after) if same else {*before, *after}
        known = self.world.of(PolicyFacts)
        self._add(POLICY, {Name("", each.name) for each in outcomes} & known.keys())

    def policy(self, change: Change) -> None:
        """Add the other policies that have the same extended resource. The Kopf handlers reconcile
        the policy itself."""
        old, new = _both(change, PolicyFacts)
        if _spec_of(old) != _spec_of(new):  # the operator itself writes the status
            self._add(POLICY, self._with_resource_of(change) - {change.name})

    def maintenance(self, change: Change) -> None:
        """Add a maintenance that is being deleted: while a finalizer keeps it, Kopf does not call
        its handlers. For all other changes, Kopf does."""
        _, new = _both(change, MaintenanceFacts)
        if new is None or new.deleting:
            self._add(MAINTENANCE, [change.name])

    def driver(self, _: Change) -> None:
        self._add_drivers()

    def _with_resource_of(self, change: Change) -> set[Name]:
        """Return the policies that have the extended resource of a changed policy or class, from
        before or after the change."""
        both = (*_both(change, PolicyFacts), *_both(change, ClassFacts))
        resources = {each.extended_resource for each in both if each is not None}
        policies = self.world.of(PolicyFacts).items()
        return {name for name, each in policies if each.extended_resource in resources - {""}}


_FOLLOW: Mapping[type[Fact | None], Callable[[_Affected, Change], None]] = {
    PodFacts: _Affected.pod,
    ClaimFacts: _Affected.claim,
    TemplateFacts: _Affected.template,
    ClassFacts: _Affected.device_class,
    SliceFacts: _Affected.slice,
    NodeFacts: _Affected.node,
    TaintRuleFacts: _Affected.rule,
    ReportFacts: _Affected.report,
    PolicyFacts: _Affected.policy,
    MaintenanceFacts: _Affected.maintenance,
    DriverFacts: _Affected.driver,
    NamespaceFacts: _Affected.place,
    QuotaFacts: _Affected.place,
}


def _comes_or_goes(change: Change) -> bool:
    return change.old is None or change.new is None


def _both(change: Change, of: type[AnyFact]) -> tuple[AnyFact | None, AnyFact | None]:
    """Return the object before and after a change. Each is None if it is not of the given type."""
    old, new = change.old, change.new
    return old if isinstance(old, of) else None, new if isinstance(new, of) else None


def _lacks_claim(pod: PodFacts | None) -> bool:
    """Return whether any of a pod's claims has not been created yet."""
    return pod is not None and any(each.template and not each.generated for each in pod.claims)


def _without_time(report: ReportFacts | None) -> ReportFacts | None:
    """Return a report without the time at which the node plugin wrote it."""
    return report and replace(report, updated=0.0)


def _held(claim: ClaimFacts | None) -> object:
    """Return the devices that a claim holds, and its pods, because messages name both."""
    if claim is None or not (claim.devices or claim.shares):
        return None
    return (claim.devices, claim.shares, claim.reserved_for)


def _quoted(report: ReportFacts | None) -> object:
    """Return the parts of a report that are used to explain waiting pods. The driver's message
    about an unhealthy device is left out, because it can change every few seconds."""
    if report is None:
        return "", frozenset[object](), (), False
    unhealthy = frozenset[object]((each.pool, each.device) for each in report.unhealthy)
    return report.registration, unhealthy, report.dropped, bool(report.rejected)


def _devices(of: SliceFacts | None) -> Mapping[str, DeviceFacts]:
    return {} if of is None else {each.name: each for each in of.devices}


def _spec_of(policy: PolicyFacts | None) -> object:
    return policy and (policy.uid, policy.generation)


def _of_policies(node: NodeFacts | None) -> object:
    return node and (node.ready, node.labels)
