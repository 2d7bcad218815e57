"""
Explains why a claim or a pod that is being deleted still exists.

Each finding names the cause, such as a finalizer. Every deletion takes some time, so the caller
decides when to request an explanation.

Does not depend on clients, clocks, or Events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drakit_explain.broken import (
    claims_of_pod,
    device_of_result,
    drivers_of,
    node_problem,
    published_device,
    publishes,
)
from drakit_explain.bugs import bug_behind
from drakit_explain.codes import Code, Finding, Reason
from drakit_explain.evidence import NO_EVENTS, UNPREPARE_FAILED, Events
from drakit_explain.model import DELETE_PROTECTION, ClaimFacts, PodFacts
from drakit_explain.wording import cut
from drakit_explain.world import World

_UNPREPARING = "drakit.dev/unpreparing"

_MAX_NAMED = 3

_CONTROLLER = "the ResourceClaim controller (kube-controller-manager)"


def claim_stays(claim: ClaimFacts, world: World, *, all_pods: bool = False) -> tuple[Reason, ...]:
    """
    Return the reasons why the deletion of a claim does not complete. Empty if none are known.

    :param all_pods: whether the world contains every pod of the claim's namespace. If so, a
        consumer that is missing from the world does not exist.
    """
    if not claim.deleting:
        return ()
    found: list[Finding] = []
    if DELETE_PROTECTION in claim.finalizers:
        found += _protected(claim, world, all_pods=all_pods)
    found += _finalizers(claim.held_by)
    start = f"ResourceClaim {claim.namespace}/{claim.name} is being deleted, but "
    return tuple(each.about(claim.reference, start) for each in dict.fromkeys(found))


def pod_stays(
    pod: PodFacts, world: World, *, settled: bool, events: Events = NO_EVENTS
) -> tuple[Reason, ...]:
    """
    Return the reasons why the deletion of a pod does not complete. Empty if none are known.

    :param settled: whether the pod's grace period ended some time ago.
    :param events: the Events about the pod and its claims, if they are known.
    """
    if not pod.deleting:
        return ()
    found = list(_finalizers(pod.finalizers))
    if pod.node is not None:
        of_node = _of_node(pod.node, world)
        if of_node is not None:
            found.append(of_node)
        else:
            claims = claims_of_pod(pod, world)
            event = events.latest([pod.uid, *(each.uid for each in claims)], (UNPREPARE_FAILED,))
            unprepared = list(_not_unprepared(claims, pod.node, world, str(event or "")))
            if not unprepared and not found and (settled or event is not None):
                said = events.instead_of(_where_to_read(pod.node), event)
                unprepared = [_not_stopped(pod, pod.node, said, world)]
            found += unprepared
    start = f"pod {pod.namespace}/{pod.name} is being deleted, but "
    return tuple(each.about(pod.reference, start) for each in dict.fromkeys(found))


def _finalizers(names: Iterable[str]) -> Iterator[Finding]:
    for name in names:
        yield Finding(
            code=Code.FINALIZER_HOLDS,
            what=f"finalizer {name} blocks the deletion; check the controller that sets this "
            f"finalizer",
        )


# ---- the claim


def _protected(claim: ClaimFacts, world: World, *, all_pods: bool) -> Iterator[Finding]:
    users: list[str] = []
    for consumer in claim.consumers:
        pod = world.pod(claim.namespace, consumer.name) if consumer.resource == "pods" else None
        if pod is not None and pod.uid == consumer.uid:
            if pod.deleting:
                problem = _of_node(pod.node, world) if pod.node is not None else None
                because = f": {problem.what}" if problem is not None else ""
                yield Finding(
                    code=problem.code if problem is not None else Code.CLAIM_IN_USE,
                    what=f"pod {pod.name} still uses the claim and has not finished "
                    f"terminating{because}",
                )
            else:
                users.append(f"pod {pod.name} ({pod.phase})" if pod.phase else f"pod {pod.name}")
        elif consumer.resource == "pods" and all_pods:
            yield Finding(
                code=Code.CLAIM_IN_USE,
                what=f"it is reserved for pod {consumer.name}, which no longer exists; "
                f"{_CONTROLLER} removes this entry of status.reservedFor, so check that this "
                f"controller is running",
            )
        else:
            users.append(f"{consumer.resource.removesuffix('s')} {consumer.name}")
    if users:
        yield Finding(
            code=Code.CLAIM_IN_USE,
            what=f"it is reserved for {cut(users, _MAX_NAMED)}; delete them, and Kubernetes "
            "deletes the claim",
        )
    if not claim.consumers:
        state = "is still allocated" if claim.allocated else "still has its finalizer"
        yield Finding(
            code=Code.CLAIM_IN_USE,
            what=f"it {state}, though no pod uses it; {_CONTROLLER} corrects this, so check that "
            f"this controller is running",
        )


# ---- the pod


def _of_node(name: str, world: World) -> Finding | None:
    problem = node_problem(name, world)
    if problem is Code.NODE_GONE:
        return Finding(
            code=problem,
            what=f"node {name} no longer exists, so no kubelet confirms that the pod has stopped; "
            f"delete the pod with kubectl delete --force",
        )
    if problem is Code.NODE_NOT_READY:
        return Finding(
            code=problem,
            what=f"node {name} is not ready, so no kubelet confirms that the pod has stopped; "
            f"repair the node, or delete its Node object if it will not come back",
        )
    return None


def _not_unprepared(
    claims: Iterable[ClaimFacts], node: str, world: World, event: str
) -> Iterator[Finding]:
    for claim in claims:
        for driver in drivers_of([claim]):
            if not world.unreadable() and not publishes(driver, node, world):
                yield Finding(
                    code=Code.DRIVER_UNAVAILABLE,
                    what=f"driver {driver} of its claim {claim.name} does not run on node {node}, "
                    f"so the kubelet cannot unprepare the claim; start or install the driver there "
                    f"again: the kubelet retries, and the deletion ends by itself",
                )
        for result in claim.results:
            device = published_device(result.device, world)
            if device is not None and any(
                each.key == _UNPREPARING for each in world.taints(result.device, device)
            ):
                yield Finding(
                    code=Code.NOT_UNPREPARED,
                    what=f"{device_of_result(result, claim)} has not been unprepared; "
                    + (event or _where_to_read(node)),
                )


def _where_to_read(node: str) -> str:
    return (
        f"read the Events of the pod and its claims (kubectl describe), such as UnprepareFailed, "
        f"and the log of the driver on node {node}"
    )


def _not_stopped(pod: PodFacts, node: str, said: str, world: World) -> Finding:
    claims = " or unpreparing its claims" if pod.claims or pod.extended_claim else ""
    what = f"the kubelet on node {node} has not finished stopping its containers{claims}"
    bug = bug_behind(pod, Code.NOT_UNPREPARED, world)
    return Finding(code=Code.NOT_UNPREPARED, what="; ".join(filter(None, (what, said, bug))))
