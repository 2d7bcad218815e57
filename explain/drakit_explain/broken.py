"""
Explains the problems of allocated claims whose pods have a node but do not start, or are running.

The allocation is compared with the node, the pools and devices, their taints, the binding
conditions, and the consumers of the claim. Only certain problems are returned. For example, nothing
is certain about a pool that is being updated, or about a kind that may not be listed.

:mod:`.pending` finds the reason why a pod has no node yet. Does not depend on clients, clocks, or
Events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from drakit_explain.allocation import tolerates
from drakit_explain.bugs import bug_behind
from drakit_explain.codes import Code, Finding, Reason, cause_at_node
from drakit_explain.devices import DeviceFacts
from drakit_explain.evidence import (
    NO_EVENTS,
    Events,
    failed,
    failed_step,
    not_running,
    renumbered,
)
from drakit_explain.model import (
    ClaimFacts,
    Consumer,
    DeviceID,
    NodeFacts,
    ObjectReference,
    PodClaim,
    PodFacts,
    Result,
)
from drakit_explain.pending_claims import of_other_pod
from drakit_explain.pools import NodeView, is_complete, newest, place_includes
from drakit_explain.reports import (
    GONE,
    HOSTDEV,
    STOPPED,
    UNHEALTHY,
    not_registered,
    report_of,
    share_not_offered,
    words_of,
)
from drakit_explain.world import EVERYWHERE, World

MAX_CONSUMERS = 256
"""The API's limit for entries in a claim's ``status.reservedFor``."""

_EVICTED = "DeletionByDeviceTaintManager"
_NODE_GONE = "the node no longer exists"

WORDS_SECONDS = 15.0
"""Maximum time between a change to a node's slices and the report that reflects it."""

REPUBLISHED_SECONDS = 15.0
"""Maximum time between a starting driver's first slices and the publication of all its devices."""

_MUST_LAST = frozenset(
    [Code.RESOURCE_CLAIM_MISSING, Code.CLAIM_NOT_ALLOCATED, Code.CLAIM_NOT_RESERVED]
)
"""Problems that must last before they are reported, because they are also found while the watch for
claims lags behind the watch for pods. By the time the pod's owner reads the advice, the pod may be
running."""


def is_placed(pod: PodFacts) -> bool:
    """Return whether a pod has a node where its claims are, or should be, in use."""
    return pod.node is not None and not pod.deleting and pod.phase not in ("Succeeded", "Failed")


def broken_pod(
    pod: PodFacts, world: World, *, settled: bool, events: Events = NO_EVENTS
) -> tuple[Reason, ...]:
    """
    Return the reasons why a pod that has a node does not start, or the problems of a running pod.

    :param settled: whether the pod has had its node for some time. If so, a state that is normal
        for a short time is a problem.
    :param events: the Events about the pod and its claims, if they are known.
    """
    if pod.node is None or not is_placed(pod):
        return ()
    claims = claims_of_pod(pod, world)
    found = list(_of_pod(pod, pod.node, world, settled=settled))
    if pod.sandbox is not False:  # without a sandbox, the statuses are those of earlier containers
        found += not_running(pod, pod.node)
    found += renumbered(pod, claims, events)
    if pod.is_starting:
        step = failed_step(pod, claims, events, pod.node)
        slow = list(_slow(pod.node, claims, world))
        if step is not None and (step.code is Code.NOT_PREPARED or not slow):
            found.append(step)
        elif not found and slow:  # a known failure of an earlier step takes precedence
            found += slow
        elif not found and settled and (pod.claims or pod.extended_claim):
            found.append(_not_prepared(pod.node, claims, events))
    starting = pod.phase == "Pending" or pod.is_starting
    start = f"pod {pod.namespace}/{pod.name} "
    start += f"cannot start on node {pod.node}: " if starting else f"runs on node {pod.node}, but "
    return tuple(
        replace(
            each,
            advice="; ".join(filter(None, (each.advice, bug_behind(pod, each.code, world)))),
            transient=each.code if each.code in _MUST_LAST else each.transient,
        ).about(pod.reference, start)
        for each in dict.fromkeys(found)
        if settled or each.code not in _MUST_LAST
    )


def failed_pod(pod: PodFacts) -> tuple[Reason, ...]:
    """Return the reasons why a pod has failed."""
    # Report it immediately, because the failure is permanent.
    found = replace(failed(pod), transient="", patience_seconds=None)
    where = f" on node {pod.node}" if pod.node else ""
    return (found.about(pod.reference, f"pod {pod.namespace}/{pod.name}{where} "),)


def claims_of_pod(pod: PodFacts, world: World) -> list[ClaimFacts]:
    """Return the claims of a pod that exist."""
    names = [*(each.claim or each.generated for each in pod.claims), pod.extended_claim]
    claims = [world.claim(pod.namespace, name) for name in names if name]
    return [claim for claim in claims if claim is not None]


def gone_devices(pod: PodFacts, world: World) -> Iterator[DeviceID]:
    """Yield a pod's devices that are gone, but whose attributes are still published."""
    for claim in claims_of_pod(pod, world):
        for result in claim.results:
            device = published_device(result.device, world)
            if device is not None and any(
                each.key == GONE for each in world.taints(result.device, device)
            ):
                yield result.device


def broken_claim(claim: ClaimFacts, world: World, *, node: str | None = None) -> tuple[Reason, ...]:
    """
    Return the problems of an allocated claim, whether or not a pod uses it.

    :param node: the node on which a pod uses the claim. By default, the allocation's only node.
    """
    start = f"ResourceClaim {claim.namespace}/{claim.name} is allocated, but "
    found = _of_allocation(claim, node or node_of_claim(claim), world)
    return tuple(each.about(claim.reference, start) for each in found)


def gone_under(claim: ClaimFacts, consumer: Consumer, world: World) -> tuple[Reason, ...]:
    """Return the missing devices of a claim, as reasons for a pod that is running with the
    claim."""
    found = _of_allocation(claim, node_of_claim(claim), world)
    pod = ObjectReference("Pod", consumer.name, consumer.uid, claim.namespace, api_version="v1")
    start = f"pod {claim.namespace}/{consumer.name} is running, but "
    return tuple(each.about(pod, start) for each in found if each.code is Code.DEVICE_GONE)


def _of_allocation(claim: ClaimFacts, node: str | None, world: World) -> Mapping[Finding, None]:
    if not claim.allocated:
        return {}
    problem = _node_problem(node, world) if node is not None else None
    found = [problem] if problem is not None else []
    for result in claim.results if problem is None else ():
        found += _of_result(result, claim, node, world)
    return dict.fromkeys((*found, *_binding(claim)))


def has_others(claim: ClaimFacts, pod: PodFacts) -> bool:
    """Return whether a claim is also reserved for other objects. If not, the scheduler may
    deallocate it."""
    return any(each.uid != pod.uid for each in claim.consumers)


def not_bindable(pod: PodFacts, claims: Iterable[ClaimFacts], world: World) -> Iterator[Finding]:
    """Return the reasons why the scheduler cannot bind a pod whose claims are allocated."""
    for claim in claims:
        node = node_of_claim(claim)
        gone = node is not None and node_problem(node, world) is Code.NODE_GONE
        if gone and has_others(claim, pod):
            yield Finding(
                code=Code.NODE_GONE,
                what=f"its claim {claim.name} is allocated on node {node}, which no longer exists, "
                f"and other pods use the claim; delete these pods, so that the claim is allocated "
                f"again, or use another claim",
                cause=cause_at_node(node, _NODE_GONE, world),
            )
            continue
        yield from _binding(claim)
        if len(claim.consumers) >= MAX_CONSUMERS:
            yield from _not_reserved(claim, pod)


def node_of_claim(claim: ClaimFacts) -> str | None:
    """Return the name of an allocation's only node, or None if the allocation is for several
    nodes."""
    if claim.nodes is None or isinstance(claim.nodes, str):
        return claim.nodes
    fields = claim.nodes[0].fields if len(claim.nodes) == 1 else ()
    return next((each.values[0] for each in fields if each.is_one_value), None)


# ---- the pod


def _of_pod(pod: PodFacts, node: str, world: World, *, settled: bool) -> Iterator[Finding]:
    if problem := _node_problem(node, world):
        yield problem
        return
    if pod.disruption == _EVICTED:
        yield Finding(
            code=Code.EVICTION_BY_TAINT,
            what="Kubernetes evicts it because of a taint of one of its devices; if a controller "
            "owns the pod, it creates a new one",
        )
    for each in pod.claims:
        # Otherwise, the claim may be about to be created.
        if settled or each.claim or each.generated:
            yield from _of_pod_claim(each, pod, node, world)
    if (name := pod.extended_claim) is not None:
        yield from _of_claim(name, world.claim(pod.namespace, name), pod, node, world)


def _of_pod_claim(each: PodClaim, pod: PodFacts, node: str, world: World) -> Iterator[Finding]:
    if each.needless:
        return
    name = each.claim or each.generated
    if name is None:
        yield Finding(
            code=Code.CLAIM_NOT_ALLOCATED,
            what=f'no ResourceClaim has been created from template "{each.template}" for pod claim '
            f'"{each.name}"; {_UNSCHEDULED}',
        )
        return
    claim = world.claim(pod.namespace, name)
    if claim is not None and (problem := of_other_pod(claim, each, pod)):
        yield problem
    else:
        yield from _of_claim(name, claim, pod, node, world, word=each.name)


_UNSCHEDULED = (
    "the scheduler ignores a pod that sets nodeName, so it gets no devices: use a node selector "
    "instead of nodeName, and create the pod again"
)


def _of_claim(
    name: str,
    claim: ClaimFacts | None,
    pod: PodFacts,
    node: str,
    world: World,
    *,
    word: str = "",
) -> Iterator[Finding]:
    """
    Return the problems of one of a pod's claims.

    :param word: the name of the claim's entry in the pod.
    """
    if claim is None:
        yield Finding(
            code=Code.RESOURCE_CLAIM_MISSING,
            what=f'its ResourceClaim "{name}" no longer exists in namespace "{pod.namespace}"; '
            f"delete the pod and create it again",
        )
    elif not claim.allocated:
        yield Finding(
            code=Code.CLAIM_NOT_ALLOCATED,
            what=f"its claim {claim.name} is not allocated; {_UNSCHEDULED}",
        )
    else:
        yield from _not_reserved(claim, pod)
        yield from _binding(claim)
        start = f"claim:{word}"
        health = {
            key.removeprefix(start).removeprefix("/"): message
            for key, message in pod.health
            if key == start or key.startswith(f"{start}/")
        }
        for result in claim.results:
            message = health.get(result.request, health.get("", ""))
            yield from _of_result(result, claim, node, world, message=message)
        for driver in drivers_of([claim]) if pod.phase == "Pending" else ():
            if state := not_registered(driver, node, world):
                problem = f"driver {driver} is not registered with the kubelet"
                yield Finding(
                    code=Code.DRIVER_UNAVAILABLE,
                    what=f"driver {driver} of its claim {claim.name} is not registered with the "
                    f"kubelet ({state}); check the log of the node plugin on node {node}",
                    cause=cause_at_node(node, problem, world),
                )


def _not_reserved(claim: ClaimFacts, pod: PodFacts) -> Iterator[Finding]:
    # A consumer that is not a pod, such as a PodGroup, may include this pod.
    if any(each.resource != "pods" or each.uid == pod.uid for each in claim.consumers):
        return
    if len(claim.consumers) >= MAX_CONSUMERS:
        what = (
            f"is reserved for {MAX_CONSUMERS} pods, the maximum; delete a pod "
            f"that uses it, or use a second claim"
        )
    elif any(each.name == pod.name for each in claim.consumers):
        what = (
            "is reserved for an earlier pod of the same name; when that pod has stopped, its entry "
            "in status.reservedFor is removed"
        )
    else:
        what = (
            "is not reserved for this pod (status.reservedFor), so the kubelet does not prepare "
            "the claim; delete the pod and create it again"
        )
    yield Finding(code=Code.CLAIM_NOT_RESERVED, what=f"its claim {claim.name} {what}")


def drivers_of(claims: Iterable[ClaimFacts]) -> list[str]:
    """Return the names of the drivers of the claims' devices."""
    return [*dict.fromkeys(result.device.driver for each in claims for result in each.results)]


def _slow(node: str, claims: Iterable[ClaimFacts], world: World) -> Iterator[Finding]:
    """Return findings about the claims' drivers that have not completed a call for a long time."""
    for driver in drivers_of(claims):
        report = report_of(driver, node, world)
        if report is not None and report.progress:
            what = f"its claims are not prepared; driver {driver}: {report.progress}"
            yield Finding(code=Code.NOT_PREPARED, what=what)


def _not_prepared(node: str, claims: Iterable[ClaimFacts], events: Events) -> Finding:
    """Return a finding that the kubelet is waiting for claims to be prepared, for the case that no
    failure was reported."""
    named = " and ".join(drivers_of(claims)) or "its drivers"
    waits = (
        f"it waits for {named} to prepare the claims, or for volumes or the network; read the log "
        f"of {named} on node {node}"
    )
    what = "the kubelet has not started it"
    if not events.hidden:
        what = f"its devices have no known problem, but {what} and reports no failure"
    return Finding(code=Code.NOT_PREPARED, what=f"{what}; {events.instead_of(waits, None)}")


# ---- the claim


def _binding(claim: ClaimFacts) -> Iterator[Finding]:
    for result in claim.results:
        if result.failed:
            yield Finding(
                code=Code.BINDING_FAILED,
                what=f"{device_of_result(result, claim)} failed its binding condition "
                f"{', '.join(result.failed)}; the scheduler deallocates the claim and retries; "
                f"check the controller of driver {result.device.driver} that sets the condition",
            )
        elif result.outstanding:
            yield Finding(
                code=Code.BINDING_OUTSTANDING,
                transient=Code.BINDING_OUTSTANDING,  # the devices may be being attached
                what=f"{device_of_result(result, claim)} waits for its binding condition "
                f"{', '.join(result.outstanding)}; check the controller of "
                f"driver {result.device.driver}, which sets it in status.devices of the claim",
            )


def _of_result(
    result: Result, claim: ClaimFacts, node: str | None, world: World, *, message: str = ""
) -> Iterator[Finding]:
    """
    Return the problems of a claim's device.

    :param message: the driver's message about its health, from the pod's status.
    """
    cause = partial(cause_at_node, node, world=world)
    pool = result.device.of_pool
    slices = world.slices_of_pool(pool)
    if not slices:
        if world.unreadable():
            return  # the device may be in one of these pools
        if node is not None and not publishes(pool.driver, node, world):
            yield Finding(
                code=Code.DRIVER_UNAVAILABLE,
                what=f"driver {pool.driver} of its claim {claim.name} publishes no devices on node "
                f"{node}; check that the driver is running on that node and is registered with the "
                f"kubelet",
                cause=cause(f"driver {pool.driver} publishes no devices there"),
            )
        else:
            what = f"pool {pool.pool} of driver {pool.driver}"
            yield Finding(
                code=Code.POOL_GONE,
                what=f"{what}, from which claim {claim.name} is allocated, is no longer published; "
                f"check the driver, or delete {_released(claim)}, so that another device is "
                f"allocated",
                cause=cause(f"{what} is no longer published"),
            )
        return
    device = published_device(result.device, world)
    if device is not None:
        yield from _of_taints(result, device, claim, node, world, message=message)
    elif is_complete(slices) and not any(each.unread for each in slices):
        yield Finding(
            code=Code.DEVICE_GONE,
            what=f"{device_of_result(result, claim)} is no longer published; "
            f"{_back(result.device)}, or delete {_released(claim)}, so that another device is "
            f"allocated",
            patience_seconds=REPUBLISHED_SECONDS,
            cause=cause(f"devices of driver {pool.driver} are no longer published"),
        )


def _released(claim: ClaimFacts) -> str:
    """Return which objects to delete so that a claim is allocated again."""
    return "the pod" if claim.owner_uid else "the pod and the claim"


def _back(device: DeviceID) -> str:
    """Return advice on how to make a device available again."""
    # A policy may offer fewer shares of the device than before, or none.
    if device.driver == HOSTDEV:
        return "check that a HostDevicePolicy still offers it, and that it is connected"
    return "connect the device again"


def _of_taints(
    result: Result,
    published: DeviceFacts,
    claim: ClaimFacts,
    node: str | None,
    world: World,
    *,
    message: str,
) -> Iterator[Finding]:
    cause = partial(cause_at_node, node, world=world)
    devices = f"devices of driver {result.device.driver}"
    taints = world.taints(result.device, published)
    keys = {taint.key for taint in taints}
    device = device_of_result(result, claim)
    if GONE in keys:
        policy = published.attribute("policy", result.device.driver)
        if less := share_not_offered(result.device, policy, world):
            back = f"{less}: raise sharing.users"
        else:
            back = _back(result.device)
        yield Finding(
            code=Code.DEVICE_GONE,
            what=f"{device} is gone: its driver no longer lists it; {back}, or delete "
            f"{_released(claim)}, so that another device is allocated; running containers keep "
            f"its device node, which does not work until the device returns with the same number",
            patience_seconds=0.0,
            cause=cause(f"{devices} are gone"),
        )
    said = words_of(result.device, world) if UNHEALTHY in keys else None
    words = f" ({said or message})" if said or message else ""
    if UNHEALTHY in keys:
        yield Finding(
            code=Code.DEVICE_UNHEALTHY,
            what=f"{device} is unhealthy{words}; check the device, or delete "
            f"{_released(claim)}, so that another device is allocated",
            transient=Code.DEVICE_UNHEALTHY if said is None and not message else "",
            patience_seconds=WORDS_SECONDS,
            cause=cause(f"{devices} are unhealthy"),
        )
    if STOPPED in keys:
        where = f"on node {node}" if node is not None else "on its node"
        yield Finding(
            code=Code.DRIVER_UNAVAILABLE,
            what=f"{device} cannot be used, because its driver has stopped {where}; check the "
            f"driver's log",
            cause=cause(f"driver {result.device.driver} has stopped"),
        )
    for taint in taints:
        if taint.effect != "NoExecute":
            continue
        # Unlike the scheduler, the controller that evicts pods ignores tolerations without an
        # effect.
        applying = [
            each
            for each in result.tolerations
            if each.effect == taint.effect and tolerates(each, taint)
        ]
        if any(each.seconds is None for each in applying):
            continue
        # Up to 1.37.1, the controller does not find the pod of a claim for extended resources.
        who = "Kubernetes 1.37.2 or later" if claim.for_extended else "Kubernetes"
        when = f"{who} evicts the pods that use it"
        if applying:
            longest = max(each.seconds or 0 for each in applying)
            when += f" after the {longest} s that the request tolerates"
        rules = sorted(world.taint_rules(result.device, [taint]))
        why = words if taint.key == UNHEALTHY else ""
        fix = "resolve the cause of the taint"
        if rules:
            fix = f"DeviceTaintRule {rules[0]} sets the taint: delete the rule"
        yield Finding(
            code=Code.EVICTION_BY_TAINT,
            what=f"{device} has the taint {taint.shown} with effect NoExecute{why}, so {when}; "
            f"{fix}, or tolerate the taint's key and effect NoExecute in the request",
            cause=cause(f"{devices} are tainted with {taint.shown} and effect NoExecute"),
        )


def taints_for_new_pods(claim: ClaimFacts, world: World) -> Iterator[str]:
    """Describe the taints of allocated devices that keep new pods from using the devices, but do
    not evict the current pods."""
    for result in claim.results:
        device = published_device(result.device, world)
        for taint in world.taints(result.device, device) if device is not None else ():
            if taint.effect != "NoSchedule" or taint.key in (UNHEALTHY, STOPPED, GONE):
                continue
            rules = sorted(world.taint_rules(result.device, [taint]))
            origin = f", which DeviceTaintRule {rules[0]} sets" if rules else ""
            driver, pool, name = result.device
            yield (
                f"device {name} (driver {driver}, pool {pool}) has the taint {taint.shown} with "
                f"effect NoSchedule{origin}: new pods do not get the device"
            )


def device_of_result(result: Result, claim: ClaimFacts) -> str:
    """Return a description of an allocated device, as the subject of a clause."""
    driver, pool, device = result.device
    return (
        f"device {device} (driver {driver}, pool {pool}), which is allocated to claim "
        f'{claim.name}, request "{result.request}",'
    )


def published_device(device: DeviceID, world: World) -> DeviceFacts | None:
    """Return a device from its pool's newest generation."""
    current = newest(world.slices_of_pool(device.of_pool))
    return next(filter(None, (each.devices.named(device.device) for each in current)), None)


# ---- the node


def node_problem(name: str, world: World) -> Code | None:
    """Return the problem of a node that is missing or not ready. None if the node is ready, or if
    nodes may not be listed."""
    if not world.of(NodeFacts):
        return None
    node = world.node(name)
    if node is None:
        return Code.NODE_GONE
    return None if node.ready else Code.NODE_NOT_READY


def _node_problem(name: str, world: World) -> Finding | None:
    problem = node_problem(name, world)
    if problem is Code.NODE_GONE:
        return Finding(
            code=problem,
            what=f"node {name} no longer exists; Kubernetes deletes its pods after some minutes, "
            f"or use kubectl delete --force",
            cause=cause_at_node(name, _NODE_GONE, world),
        )
    if problem is Code.NODE_NOT_READY:
        return Finding(
            code=problem,
            what=f"node {name} is not ready; check its kubelet (kubectl describe node {name})",
            cause=cause_at_node(name, "the node is not ready", world),
        )
    return None


def publishes(driver: str, node: str, world: World) -> bool:
    """Return whether a driver has slices with devices that a node can use."""
    facts = world.node(node)
    view = NodeView(node, facts.labels if facts is not None else {})
    return any(
        each.driver == driver
        and (each.by_device or bool(each.counter_sets) or place_includes(each.place, view))
        for place in (node, EVERYWHERE)
        for each in world.slices_of_node(place)
    )
