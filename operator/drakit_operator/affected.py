"""
Selects the objects that must be checked again after changes of others.

Too many are harmless (each is queued once, and nothing is announced twice); too few are not.

It must not know queues, or what a check finds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from drakit_explain.broken import node_of_claim
from drakit_explain.devices import DeviceFacts
from drakit_explain.kinds import (
    CLAIMS,
    CLASSES,
    NAMESPACES,
    NODES,
    PODS,
    QUOTAS,
    REPORTS,
    RULES,
    SLICES,
    TEMPLATES,
)
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    DeviceID,
    NodeFacts,
    PodFacts,
    PolicyFacts,
    PoolID,
    ReportFacts,
    SliceFacts,
    TaintRuleFacts,
)
from drakit_explain.poolchecks import node_of_slice
from drakit_explain.world import Name
from drakit_operator.store import Change, Store

# ---------------------------------------------------------------- pods and claims


def pods_affected(changes: Iterable[Change], store: Store) -> set[Name]:
    """Return the pods whose reason to be pending may have changed."""
    found: set[Name] = set()
    all_that_wait = False
    places: set[str] = set()
    for change in changes:
        if _affects_all_that_wait(change):
            all_that_wait = True
        elif change.kind is PODS:
            found.add(change.name)
            if change.new is None:  # another pod represents its claims now
                found.update(_pods_with_claims_of(change.old, store))
        elif change.kind is TEMPLATES:
            found |= store.world.pods_of_template(change.name)
        elif change.kind is CLAIMS:
            found |= store.world.pods_of_claim(change.name)
        elif change.kind is REPORTS and _quoted(change.old) != _quoted(change.new):
            all_that_wait = True
        elif change.kind in (NAMESPACES, QUOTAS):
            places.add(change.name.namespace or change.name.name)
    if all_that_wait or places:
        # Once: thousands of slices times thousands of pods would keep the probes waiting.
        found.update(
            name
            for name in store.world.waiting_pods()
            if all_that_wait or (name.namespace in places and _lacks_claim(name, store))
        )
    return found


def _lacks_claim(name: Name, store: Store) -> bool:
    """Return whether a claim of a pod must still be created."""
    pod = store.world.pod(*name)
    return pod is not None and any(each.template and not each.generated for each in pod.claims)


def _quoted(report: object) -> object:
    """Return what explanations of waiting pods follow from in a report. The driver's message about
    an unhealthy device is left out, because it can change every few seconds."""
    if not isinstance(report, ReportFacts):
        return "", frozenset[object](), (), False
    unhealthy = frozenset[object]((each.pool, each.device) for each in report.unhealthy)
    return report.registration, unhealthy, report.dropped, bool(report.rejected)


def claims_affected(changes: Iterable[Change], store: Store) -> set[Name]:
    """Return the claims with a problem that may have appeared or ended."""
    found: set[Name] = set()
    nodes: set[str] = set()
    tainted: set[tuple[str, str]] = set()
    for change in changes:
        if change.kind is RULES:
            rules = (each for each in (change.old, change.new) if isinstance(each, TaintRuleFacts))
            tainted.update((each.driver, each.pool) for each in rules if each.adds_taints)
        elif change.kind is CLAIMS:
            found.add(change.name)
        elif change.kind is PODS and change.new is None:
            found |= _claims_made_for(change.old)  # its Events had their problems
        elif change.kind is CLASSES:
            found |= store.world.claims_of_class(change.name.name)
        elif change.kind is SLICES:
            found.update(_holders_of_changed(change, store))
        elif change.kind is REPORTS:
            found.update(_holders_of_unhealthy(change, store))
        elif change.kind is NODES and (change.old is None or change.new is None):
            nodes.add(change.name.name)
    if nodes or tainted:
        found.update(
            name
            for name, claim in store.world.of(ClaimFacts).items()
            if claim.allocated and (node_of_claim(claim) in nodes or _has_any(claim, tainted))
        )
    return found


def _has_any(claim: ClaimFacts, pools: Collection[tuple[str, str]]) -> bool:
    """Return whether a claim has devices of pools, each a driver and a name; an empty one is any
    driver or name."""
    return bool(pools) and any(
        (driver, pool) in pools
        for device in (each.device for each in claim.results)
        for driver in (device.driver, "")
        for pool in (device.pool, "")
    )


def _holders_of_changed(change: Change, store: Store) -> Iterator[Name]:
    """Yield the claims that hold devices which a slice changed, added or removed."""
    old, new = ({each.name: each for each in _devices(of)} for of in (change.old, change.new))
    of = change.new or change.old
    if isinstance(of, SliceFacts):
        for name in old.keys() | new.keys():
            if old.get(name) != new.get(name):
                yield from _holders(DeviceID(of.driver, of.pool, name), store)


def _holders_of_unhealthy(change: Change, store: Store) -> Iterator[Name]:
    """Yield the claims that hold devices of which a driver says something else."""
    for one, other in ((change.old, change.new), (change.new, change.old)):
        if isinstance(one, ReportFacts):
            known = other.unhealthy if isinstance(other, ReportFacts) else ()
            for each in one.unhealthy:
                if each not in known:
                    yield from _holders(DeviceID(one.driver, each.pool, each.device), store)


def _holders(device: DeviceID, store: Store) -> set[Name]:
    holder = store.world.holder(device)
    holders = [holder] if holder is not None else store.world.sharers(device)
    return {Name(each.namespace, each.name) for each in holders}


def _devices(of: object) -> Sequence[DeviceFacts]:
    return of.devices if isinstance(of, SliceFacts) else ()


def _pods_with_claims_of(pod: object, store: Store) -> Iterator[Name]:
    if isinstance(pod, PodFacts):
        for each in pod.claims:
            if each.claim is not None:  # only a claim by name has several pods
                yield from store.world.pods_of_claim(Name(pod.namespace, each.claim))


def _claims_made_for(pod: object) -> set[Name]:
    if not isinstance(pod, PodFacts):
        return set()
    names = (*(each.generated for each in pod.claims), pod.extended_claim)
    return {Name(pod.namespace, name) for name in names if name}


def _affects_all_that_wait(change: Change) -> bool:
    if change.kind is CLAIMS:  # devices became free or taken, or changed hands
        return _held(change.old) != _held(change.new)
    return change.kind in (CLASSES, SLICES, NODES, RULES)


def _held(claim: object) -> object:
    """Return the devices that a claim holds, and its pods: the sentences name both."""
    if not isinstance(claim, ClaimFacts) or not (claim.devices or claim.shares):
        return None
    return (claim.devices, claim.shares, claim.reserved_for)


# ---------------------------------------------------------------- templates and classes


def templates_affected(changes: Iterable[Change], store: Store) -> Iterator[Name]:
    """Yield the templates that changed, or whose classes did."""
    for change in changes:
        if change.kind is TEMPLATES:
            yield change.name
        elif change.kind is CLASSES:
            yield from store.world.templates_of_class(change.name.name)


def classes_affected(changes: Iterable[Change], store: Store) -> set[Name]:
    """Return the classes that changed."""
    return {change.name for change in changes if change.kind is CLASSES}


# ---------------------------------------------------------------- pools: nodes and slices


def nodes_affected(changes: Iterable[Change], store: Store) -> set[Name]:
    """Return the nodes whose pools changed, and those with pools of the same names."""
    found: set[Name] = set()
    pools: set[PoolID] = set()
    for change in changes:
        if change.kind is NODES and _comes_or_goes(change):
            found.add(change.name)
            pools.update(each.of_pool for each in store.world.slices_of_node(change.name.name))
        elif change.kind is SLICES:
            for each in (change.old, change.new):
                if isinstance(each, SliceFacts) and (node := node_of_slice(each)):
                    found.add(Name("", node))
                    if _comes_or_goes(change):
                        pools.add(each.of_pool)
    # Once for each pool: a thousand nodes may have pools of one name.
    found.update(
        Name("", node)
        for pool in pools
        for each in store.world.slices_of_pool(pool)
        if (node := node_of_slice(each))
    )
    return found


def slices_affected(changes: Iterable[Change], store: Store) -> Iterator[Name]:
    """Yield the slices that are new, and those of nodes that came or went."""
    for change in changes:
        if change.kind is SLICES and change.old is None and change.new is not None:
            yield change.name
        elif change.kind is NODES and _comes_or_goes(change):
            for each in store.world.slices_of_node(change.name.name):
                yield Name("", each.name)


def _comes_or_goes(change: Change) -> bool:
    return change.old is None or change.new is None


# ---------------------------------------------------------------- reports and policies


def reports_affected(changes: Iterable[Change]) -> Iterator[Name]:
    """Yield the reports that changed, and those of drivers whose slices came or went."""
    for change in changes:
        of = change.new or change.old
        if change.kind is REPORTS:
            yield change.name
        elif isinstance(of, SliceFacts) and _comes_or_goes(change) and (on := node_of_slice(of)):
            yield Name("", f"{on}.{of.driver}")


def policies_affected(changes: Iterable[Change], store: Store) -> Iterator[Name]:
    """Yield the policies whose DeviceClass or status may have to change because of others; Kopf
    calls its handlers for changes of a policy itself."""
    policies = store.world.of(PolicyFacts)
    for change in changes:
        old, new = change.old, change.new
        if isinstance(old, ReportFacts) or isinstance(new, ReportFacts):
            yield from _policies_of_report(old, new) & policies.keys()
        elif isinstance(old, NodeFacts) or isinstance(new, NodeFacts):
            if _of_policies(old) != _of_policies(new):
                yield from policies  # each has a selector
        elif change.kind is CLASSES:
            for name, each in policies.items():
                if each.class_name == change.name.name:
                    yield name
            yield from _with_resource_of(change, policies)
        elif _spec_of(old) != _spec_of(new):  # its status is what the operator wrote
            yield from _with_resource_of(change, policies) - {change.name}


def _with_resource_of(change: Change, policies: Mapping[Name, PolicyFacts]) -> set[Name]:
    """Return the policies with the extended resource that a policy or class has, or had."""
    resources = {
        each.extended_resource
        for each in (change.old, change.new)
        if isinstance(each, PolicyFacts | ClassFacts)
    }
    return {name for name, each in policies.items() if each.extended_resource in resources - {""}}


def _policies_of_report(old: object, new: object) -> set[Name]:
    """Return the policies of which a node reports something else."""
    before, after = (of.policies if isinstance(of, ReportFacts) else () for of in (old, new))
    one, other = (
        (of.refused, of.outdated) if isinstance(of, ReportFacts) else None for of in (old, new)
    )
    outcomes = set(before) ^ set(after) if one == other else {*before, *after}
    return {Name("", each.name) for each in outcomes}


def _spec_of(policy: object) -> object:
    return (policy.uid, policy.generation) if isinstance(policy, PolicyFacts) else None


def _of_policies(node: object) -> object:
    return (node.ready, node.labels) if isinstance(node, NodeFacts) else None
