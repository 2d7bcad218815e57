"""
Situations: claims that cannot be used, pods that have a node and do not start, and objects that are
stuck in their deletion.

Most nodes are made up: no kubelet acts on their pods.
"""

from __future__ import annotations

from collections.abc import Iterator

from drakit_explain.broken import MAX_CONSUMERS
from drakit_explain.codes import Code
from drakit_explain.pending import Verdict
from e2e.kit import wait_for
from tests.situations.api import Body
from tests.situations.devices import TAINT
from tests.situations.scene import WAITS, Scene, device
from tests.situations.table import situation

BROKEN, DELETING = Verdict.BROKEN, Verdict.DELETING
FINALIZER = "example.com/hold"
UNTIL_EVICTED = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 3600}


def placed(s: Scene, **exact: object) -> str:
    """Give the pod a device on a made-up node, and return the node."""
    node = s.make_node("a")
    s.publish(device("a"), nodeName=node)
    s.pod(s.request(**exact), terminationGracePeriodSeconds=30)
    s.wait_scheduled()
    return node


def tainted(s: Scene, node: str, key: str, effect: str = "NoSchedule") -> None:
    s.publish(device("a", taints=[{"key": key, "effect": effect}]), nodeName=node, generation=2)


def healthy(s: Scene, node: str) -> None:
    s.publish(device("a"), nodeName=node, generation=3)


# ------------------------------------------------------------ claims that cannot be used


@situation(
    Code.RESOURCE_CLAIM_NOT_CREATED,
    words=(
        'no ResourceClaim has been created from claim template "waits" for pod claim "claim-0"; ',
        "FailedResourceClaimCreation",
    ),
    unseen=True,
    settled=True,
)
def no_claim_may_be_created(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.deny("resourceclaims")
    s.pod(s.request())
    yield
    s.allow()


@situation(
    Code.CLAIM_OF_OTHER_POD,
    words=(
        'for pod claim "claim-0" was created for another pod with the name "owner"; delete that ',
        "claim and create the pod again",
    ),
    unseen=True,
)
def claim_of_another_pod(s: Scene) -> Iterator[None]:
    for name in ("owner", WAITS):
        s.pod(s.request(), name=name)
    (claim,) = wait_for("the claim of the other pod", lambda: s.claims_of("owner"), seconds=30)
    # Kubernetes writes the name into the status after it has created the claim.
    wait_for("the name of the pod's own claim", lambda: s.claim_names(WAITS), seconds=30)
    status = {"resourceClaimStatuses": [{"name": "claim-0", "resourceClaimName": claim}]}
    s.api.patch("pods", WAITS, {"status": status}, namespace=s.namespace, subresource="status")
    yield
    s.delete("pods", "owner")
    s.publish(device("a"))
    s.pod(s.request())


@situation(
    Code.CLAIM_BEING_DELETED,
    words=(
        "is being deleted, and finalizer example.com/hold blocks the deletion; when the deletion",
        "create the claim or the pod again",
    ),
    unseen=True,
)
def claim_being_deleted(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.claim("disk", s.request())
    s.hold("resourceclaims", "disk", FINALIZER)
    s.start_deletion("resourceclaims", "disk")
    s.pod(claims=["disk"])
    yield
    s.hold("resourceclaims", "disk")
    s.claim("disk", s.request())


@situation(
    Code.BINDING_FAILED,
    words=("device a", "failed its binding condition example.com/failed", "check the controller"),
    unseen=True,
)
def binding_condition_failed(s: Scene) -> Iterator[None]:
    binding = {
        "bindingConditions": ["example.com/attached"],
        "bindingFailureConditions": ["example.com/failed"],
    }
    s.publish(device("a", **binding))
    s.claim("disk", s.request())
    s.pod(claims=["disk"])
    allocation = s.allocated_claim()["status"]["allocation"]
    # Otherwise the scheduler deallocates the claim before anything can be said of it.
    s.pod(claims=["disk"], schedulerName="nobody")
    wait_for("the claim is deallocated", lambda: not s.status_of("disk").get("allocation"))
    s.write_claim("disk", allocation=allocation, devices=[_condition(allocation, "failed")])
    yield
    s.release()

    def again() -> Body | None:
        status = s.status_of("disk")
        return status.get("allocation") if not status.get("devices") else None

    allocation = wait_for("the claim is allocated again", again, seconds=60)
    status = s.status_of("disk")
    status["devices"] = [_condition(allocation, "attached")]
    s.write_claim("disk", **status)


def _condition(allocation: Body, name: str) -> Body:
    (result,) = allocation["devices"]["results"]
    condition = {
        "type": f"example.com/{name}",
        "status": "True",
        "reason": "Test",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    return {**{key: result[key] for key in ("driver", "pool", "device")}, "conditions": [condition]}


def reserved_to_the_limit(s: Scene) -> None:
    """Allocate claim `disk` to pod `holder`, and reserve it for all pods that the API allows."""
    s.publish(device("a"), nodeName=s.make_node("a"))
    s.claim("disk", s.request())
    s.holder(claims=["disk"])
    for number in range(1, MAX_CONSUMERS):
        s.pod(
            name=f"user-{number}", claims=["disk"], schedulingGates=[{"name": "example.com/later"}]
        )
    pods = s.api.list("pods", namespace=s.namespace)
    users = [{"resource": "pods", **_identity(each)} for each in pods]
    s.write_claim("disk", **{**s.status_of("disk"), "reservedFor": users})


def _identity(body: Body) -> Body:
    return {key: body["metadata"][key] for key in ("name", "uid")}


@situation(
    Code.CLAIM_NOT_RESERVED,
    words=("claim disk is reserved for 256 pods", "delete a pod that uses it"),
    slow=True,
)
def claim_reserved_to_the_limit(s: Scene) -> Iterator[None]:
    reserved_to_the_limit(s)
    s.pod(claims=["disk"])
    yield
    s.delete("pods", "user-1")


@situation(
    Code.CLAIM_NOT_RESERVED,
    words=("claim disk is reserved for 256 pods", "delete a pod that uses it"),
    verdict=BROKEN,
    settled=True,
    slow=True,
)
def placed_pod_without_a_reservation(s: Scene) -> Iterator[None]:
    reserved_to_the_limit(s)
    s.pod(claims=["disk"], nodeName=s.made_up[0])
    yield
    s.delete("pods", "user-1")


@situation(
    Code.CLAIM_NOT_ALLOCATED,
    words=(
        "is not allocated; the scheduler ignores a pod that sets nodeName, so it gets no",
        "a node selector instead of nodeName, and create the pod again",
    ),
    verdict=BROKEN,
    settled=True,
)
def pod_that_sets_its_node(s: Scene) -> Iterator[None]:
    node = s.make_node("a")
    s.publish(device("a"), nodeName=node)
    s.pod(s.request(), nodeName=node)
    wait_for("the name of the pod's claim", lambda: s.claim_names(WAITS), seconds=30)
    yield
    s.pod(s.request())
    s.wait_scheduled()


# ------------------------------------------------------------ nodes, drivers, pools and devices


@situation(
    Code.NODE_GONE,
    words=(
        "cannot start on node",
        "no longer exists; Kubernetes deletes its pods after some minutes, or use kubectl delete",
    ),
    verdict=BROKEN,
)
def node_of_a_pod_gone(s: Scene) -> Iterator[None]:
    s.delete("nodes", placed(s))
    yield
    s.delete("pods", WAITS)


@situation(
    Code.NODE_NOT_READY,
    words=(
        "cannot start on node",
        "is not ready; check its kubelet (kubectl describe node",
    ),
    verdict=BROKEN,
)
def node_of_a_pod_not_ready(s: Scene) -> Iterator[None]:
    node = placed(s)
    s.change_readiness(node, ready=False)
    yield
    s.change_readiness(node, ready=True)


@situation(
    Code.DRIVER_UNAVAILABLE,
    words=(
        "publishes no devices on node",
        "check that the driver is running on that node and is registered with the kubelet",
    ),
    verdict=BROKEN,
)
def driver_publishes_nothing(s: Scene) -> Iterator[None]:
    node = placed(s)
    s.withdraw(node)
    yield
    s.publish(device("a"), nodeName=node)


@situation(
    Code.DRIVER_UNAVAILABLE,
    words=(
        "device a",
        "cannot be used, because its driver has stopped on node",
        "check the driver's log",
    ),
    verdict=BROKEN,
)
def driver_stopped(s: Scene) -> Iterator[None]:
    node = placed(s)
    tainted(s, node, "drakit.dev/stopped")
    yield
    healthy(s, node)


@situation(
    Code.POOL_GONE,
    words=(
        "from which claim waits-claim-0",
        "is no longer published; check the driver, or delete the pod, so that",
    ),
    verdict=BROKEN,
)
def pool_gone(s: Scene) -> Iterator[None]:
    node = placed(s)
    s.publish(device("b"), nodeName=node, pool="new")
    s.withdraw(node)
    yield
    s.pod(s.request())
    s.wait_scheduled()


@situation(
    Code.DEVICE_GONE,
    words=(
        "device a",
        "is no longer published; connect the device again, or delete the pod, so",
    ),
    verdict=BROKEN,
)
def device_gone(s: Scene) -> Iterator[None]:
    node = placed(s)
    s.publish(device("b"), nodeName=node, generation=2)
    yield
    s.pod(s.request())
    s.wait_scheduled()


@situation(
    Code.DEVICE_GONE,
    words=(
        "device a",
        "is gone: its driver no longer lists it; connect the device again, or delete the pod, so",
    ),
    verdict=BROKEN,
    slow=True,
)
def device_disconnected(s: Scene) -> Iterator[None]:
    node = placed(s)
    tainted(s, node, "drakit.dev/gone")
    yield
    healthy(s, node)


@situation(
    Code.DEVICE_UNHEALTHY,
    words=(
        "device a",
        "is unhealthy; check the device, or delete the pod, so that another device",
    ),
    verdict=BROKEN,
)
def device_unhealthy(s: Scene) -> Iterator[None]:
    node = placed(s)
    tainted(s, node, "drakit.dev/unhealthy")
    yield
    healthy(s, node)


# The scheduler of Kubernetes 1.34 does not write tolerations into allocations, so the pods of the
# next two situations are evicted at once.
@situation(
    Code.EVICTION_BY_TAINT,
    words=(
        "has the taint example.com/broken with effect NoExecute, so Kubernetes evicts the pods",
        "that use it after the 3600 s that the request tolerates; resolve the cause of the",
    ),
    verdict=BROKEN,
    oldest="1.35",
)
def eviction_by_the_driver(s: Scene) -> Iterator[None]:
    node = placed(s, tolerations=[UNTIL_EVICTED])
    tainted(s, node, TAINT["key"], "NoExecute")
    yield
    healthy(s, node)


@situation(
    Code.EVICTION_BY_TAINT,
    words=("example.com/broken=yes", "-rule sets the taint: delete the rule"),
    verdict=BROKEN,
    oldest="1.35",
)
def eviction_by_a_rule(s: Scene) -> Iterator[None]:
    placed(s, tolerations=[UNTIL_EVICTED])
    rule = s.taint_rule(**{**TAINT, "effect": "NoExecute"})
    yield
    s.delete("devicetaintrules", rule)


# ------------------------------------------------------------ deletion


@situation(
    Code.CLAIM_IN_USE,
    words=(
        "is being deleted, but it is reserved for pod holder (",
        "); delete them, and Kubernetes deletes the claim",
    ),
    verdict=DELETING,
    target="claim/disk",
)
def claim_deleted_while_in_use(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.claim("disk", s.request())
    s.holder(claims=["disk"])
    s.start_deletion("resourceclaims", "disk")
    yield
    s.delete("pods", "holder")


@situation(
    Code.CLAIM_IN_USE,
    words=("pod holder still uses the claim", "has not finished terminating"),
    verdict=DELETING,
    target="claim/disk",
    slow=True,
)
def claim_of_a_pod_that_terminates(s: Scene) -> Iterator[None]:
    s.publish(device("a"), nodeName=s.make_node("a"))
    s.claim("disk", s.request())
    s.holder(claims=["disk"], terminationGracePeriodSeconds=30)
    for plural, name in (("pods", "holder"), ("resourceclaims", "disk")):
        s.start_deletion(plural, name)
    yield
    s.delete("pods", "holder")


@situation(
    Code.FINALIZER_HOLDS,
    words=(
        "is being deleted, but finalizer example.com/hold blocks the deletion; check the",
        "that sets this finalizer",
    ),
    verdict=DELETING,
    target="claim/disk",
)
def finalizer_of_a_claim(s: Scene) -> Iterator[None]:
    s.claim("disk", s.request())
    s.hold("resourceclaims", "disk", FINALIZER)
    s.start_deletion("resourceclaims", "disk")
    yield
    s.hold("resourceclaims", "disk")


@situation(
    Code.FINALIZER_HOLDS,
    words=(
        "is being deleted, but finalizer example.com/hold blocks the deletion; check the",
        "that sets this finalizer",
    ),
    verdict=DELETING,
    slow=True,
)
def finalizer_of_a_pod(s: Scene) -> Iterator[None]:
    placed(s)
    s.hold("pods", WAITS, FINALIZER)
    s.start_deletion("pods", WAITS)
    yield
    s.hold("pods", WAITS)
    s.delete("pods", WAITS)


@situation(
    Code.NODE_GONE,
    words=(
        "no longer exists, so no kubelet confirms that the pod has stopped; delete the pod with",
        "kubectl delete --force",
    ),
    verdict=DELETING,
)
def deleted_pod_on_a_node_that_is_gone(s: Scene) -> Iterator[None]:
    node = placed(s)
    s.start_deletion("pods", WAITS)
    s.delete("nodes", node)
    yield
    s.delete("pods", WAITS)


@situation(
    Code.NODE_NOT_READY,
    words=(
        "is not ready, so no kubelet confirms that the pod has stopped; repair the node, or delete",
        "its Node object if it will not come back",
    ),
    verdict=DELETING,
    slow=True,
)
def deleted_pod_on_a_node_that_is_not_ready(s: Scene) -> Iterator[None]:
    node = placed(s)
    s.start_deletion("pods", WAITS)
    s.change_readiness(node, ready=False)
    yield
    s.delete("nodes", node)  # Kubernetes deletes the pod after some time


@situation(
    Code.NOT_UNPREPARED,
    words=(
        "device a",
        "has not been unprepared; read the Events of the pod and its claims (kubectl describe),",
        "as UnprepareFailed, and the log of the driver on node",
    ),
    verdict=DELETING,
)
def device_not_unprepared(s: Scene) -> Iterator[None]:
    node = placed(s)
    s.start_deletion("pods", WAITS)
    tainted(s, node, "drakit.dev/unpreparing")
    yield
    s.delete("pods", WAITS)


@situation(
    Code.NOT_UNPREPARED,
    words=(
        "has not finished stopping its containers or unpreparing its claims",
        "UnprepareFailed",
    ),
    verdict=DELETING,
    settled=True,
    slow=True,
)
def kubelet_does_not_stop_a_pod(s: Scene) -> Iterator[None]:
    placed(s)
    s.start_deletion("pods", WAITS)
    yield
    s.delete("pods", WAITS)
