"""Situations: nodes, constraints, requests that compete, partitions, alternatives and pools."""

from __future__ import annotations

from collections.abc import Iterator

from drakit_explain.codes import Code
from drakit_explain.pending import Verdict
from tests.situations.scene import HOSTNAME, WAITS, Scene, consumes, counters, device, devices
from tests.situations.table import MODEL_X, MODEL_Z, fits, situation

# ------------------------------------------------------------ nodes


def only_on(node: str, key: str = HOSTNAME) -> dict:
    """A required affinity, or a node selector of slices, for one node."""
    expression = {"key": key, "operator": "In", "values": [node]}
    if key == "metadata.name":
        return {"nodeSelectorTerms": [{"matchFields": [expression]}]}
    return {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}


def affinity(node: str, key: str = HOSTNAME) -> dict:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    return {"nodeAffinity": {required: only_on(node, key)}}


@situation(
    Code.DEVICES_ON_OTHER_NODES, words=("node selector", "node selector and affinity allowed")
)
def node_selector_excludes(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.pod(s.request(), nodeSelector={HOSTNAME: s.other})
    yield
    s.pod(s.request(), nodeSelector={HOSTNAME: s.node})


@situation(Code.DEVICES_ON_OTHER_NODES, words=("affinity",))
def affinity_excludes(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.pod(s.request(), affinity=affinity(s.other))
    yield
    s.publish(device("a"), nodeName=s.other)


@situation(Code.DEVICES_ON_OTHER_NODES, words=("affinity",))
def affinity_by_name_excludes(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.pod(s.request(), affinity=affinity(s.other, "metadata.name"))
    yield
    s.pod(s.request(), affinity=affinity(s.node, "metadata.name"))


@situation(
    Code.DEVICES_ON_OTHER_NODES,
    words=(
        "is on nodes that the pod cannot use (it does not tolerate their taint example.com/mainten",
        "if the pod tolerated the node's taint example.com/maintenance",
    ),
    alone=True,
)
def node_tainted(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.change_node(taints=[{"key": "example.com/maintenance", "effect": "NoSchedule"}])
    s.pod(s.request())
    yield
    s.change_node(taints=None)


@situation(
    Code.DEVICES_ON_OTHER_NODES,
    words=(
        "is on nodes that the pod cannot use (they are cordoned)",
        "if that node were not cordoned",
    ),
    alone=True,
)
def node_cordoned(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.change_node(unschedulable=True)
    s.pod(s.request())
    yield
    s.change_node(unschedulable=None)


@situation(
    Code.DEVICES_ON_OTHER_NODES,
    words=("they have too little cpu left", "if that node had enough resources left (cpu)"),
    scheduler=("Insufficient cpu",),
)
def too_little_cpu(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.pod(s.request(), cpu="10000")
    yield
    s.pod(s.request())


@situation(verdict=Verdict.NOT_PENDING, words=("scheduling gates example.com/later",))
def scheduling_gate(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.pod(s.request(), schedulingGates=[{"name": "example.com/later"}])
    yield
    s.api.patch("pods", WAITS, {"spec": {"schedulingGates": None}}, namespace=s.namespace)


@situation(Code.DEVICES_ON_OTHER_NODES, words=("disk",))
def claim_allocated_on_another_node(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"model": "disk"}), nodeName=s.other)
    s.publish(device("a", {"model": "x"}))
    s.claim("disk", s.request("disk", 'device.attributes["DRIVER"].model == "disk"'))
    s.holder(claims=["disk"])
    s.pod(s.request("gpu", MODEL_X), claims=["disk"])
    yield
    disk, gpu = device("a", {"model": "disk"}), device("b", {"model": "x"})
    s.publish(disk, gpu, nodeName=s.other, generation=2)


@situation(
    Code.REQUESTS_COMPETE, words=("no node has that many free devices: node", "has the most (1)")
)
def devices_split_over_nodes(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.publish(device("a"), nodeName=s.other)
    s.pod(s.request(count=2))
    yield
    s.publish(devices("a", "b"), generation=2)


# ------------------------------------------------------------ slices for more than one node


@fits()
def slice_for_all_nodes(s: Scene) -> Iterator[None]:
    s.publish(device("a"), allNodes=True)
    s.pod(s.request(), nodeSelector={HOSTNAME: s.other})
    yield


@situation(Code.DEVICES_ON_OTHER_NODES)
def devices_with_nodes_of_their_own(s: Scene) -> Iterator[None]:
    each = [device("a", nodeName=s.node), device("b", nodeName=s.node)]
    s.publish(each, perDeviceNodeSelection=True)
    s.pod(s.request(), nodeSelector={HOSTNAME: s.other})
    yield
    each[1]["nodeName"] = s.other
    s.publish(each, perDeviceNodeSelection=True)


# ------------------------------------------------------------ constraints


@situation(
    Code.CONSTRAINT_NOT_MET,
    words=(
        "no node has enough free devices with the same value of attribute-does-not-match.test/numa",
        "did not have the constraint matchAttribute",
        'numa, or if request "gpu" asked for 1 instead of 2',
    ),
)
def attribute_does_not_match(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"numa": 0}), device("b", {"numa": 1}))
    same = [{"matchAttribute": f"{s.driver}/numa"}]
    s.pod(s.request(count=2), constraints=same)
    yield
    s.pod(s.request(count=2))


# In Kubernetes 1.34, the scheduler compares addresses instead of values, so all are distinct.
@situation(Code.CONSTRAINT_NOT_MET, words=("numa", "distinctAttribute"), oldest="1.35")
def attribute_is_not_distinct(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"numa": 0}), device("b", {"numa": 0}))
    different = [{"distinctAttribute": f"{s.driver}/numa"}]
    s.pod(s.request(count=2), constraints=different)
    yield
    s.publish(device("a", {"numa": 0}), device("b", {"numa": 1}), generation=2)


@situation(
    Code.CONSTRAINT_NOT_MET,
    words=(
        "satisfy all constraints of the pod's claims together",
        "if there were no constraints",
    ),
    oldest="1.35",
)
def constraints_contradict_each_other(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"numa": 0, "root": "x"}), device("b", {"numa": 0, "root": "y"}))
    name = f"{s.driver}/numa"
    third = {"matchAttribute": f"{s.driver}/root"}
    s.pod(s.request(count=2), constraints=[{"distinctAttribute": name}, third])
    yield
    s.pod(s.request(count=2))


@situation(
    Code.DEVICES_ALLOCATED,
    Code.CONSTRAINT_NOT_MET,
    words=("pod holder", "has attribute", "nmua, which matchAttribute requires"),
)
def impossible_constraint_while_devices_are_busy(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"numa": 0}))
    s.holder(s.request())
    s.pod(s.request(), constraints=[{"matchAttribute": f"{s.driver}/nmua"}])
    yield
    s.delete("pods", "holder")
    s.pod(s.request(), constraints=[{"matchAttribute": f"{s.driver}/numa"}])


# ------------------------------------------------------------ requests that compete


@situation(Code.REQUESTS_COMPETE, words=("had no selector",))
def requests_need_the_same_device(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"model": "x"}), device("b", {"model": "y"}))
    s.pod(s.request("one", MODEL_X), s.request("two", MODEL_X))
    yield
    s.pod(s.request("one", MODEL_X), s.request("two"))


@situation(Code.REQUESTS_COMPETE)
def two_claims_need_two_nodes(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"model": "x"}))
    s.publish(device("a", {"model": "z"}), nodeName=s.other)
    s.template("other", s.request("gpu", MODEL_Z))
    s.pod(s.request("gpu", MODEL_X), templates=["other"])
    yield
    s.publish(device("a", {"model": "x"}), device("b", {"model": "z"}), generation=2)


# ------------------------------------------------------------ capacity, shares and partitions


@situation(
    Code.NO_DEVICE_PUBLISHED,
    words=(
        "has the requested capacity (a claim can have at most 4Gi of memory); lower "
        "capacity.requests or add devices",
    ),
)
def capacity_too_small(s: Scene) -> Iterator[None]:
    s.publish(device("a", capacity={"memory": "4Gi"}))
    s.pod(s.request(capacity={"memory": "8Gi"}))
    yield
    s.pod(s.request(capacity={"memory": "4Gi"}))


@situation(
    Code.DEVICES_ALLOCATED,
    words=(
        "has too little memory left (2Gi of 8Gi, and the request takes 4Gi), because shares are",
        "(pod holder); the pod would fit on node",
        "(pod holder) released its devices",
    ),
)
def shares_used_up(s: Scene) -> Iterator[None]:
    s.publish(device("a", capacity={"memory": "8Gi"}, allowMultipleAllocations=True))
    s.holder(s.request(capacity={"memory": "6Gi"}))
    s.pod(s.request(capacity={"memory": "4Gi"}))
    yield
    s.delete("pods", "holder")


def partitions(s: Scene, *parts: tuple[str, str], slots: str = "4", generation: int = 1) -> None:
    """Publish partitions of one board, each with its slots. Kubernetes 1.34 refuses counters and
    devices in separate slices."""
    board = counters("board", slots=slots)
    s.publish(sharedCounters=[board], of=2, number=0, generation=generation)
    each = [device(name, consumesCounters=consumes(slots=amount)) for name, amount in parts]
    s.publish(each, of=2, number=1, generation=generation)


@situation(
    Code.DEVICES_ALLOCATED,
    words=(
        "(pod holder); 1 shares hardware with devices that are allocated to claim",
        "(pod holder) released its devices",
    ),
    oldest="1.35",
)
def partitions_taken(s: Scene) -> Iterator[None]:
    partitions(s, ("half", "2"), ("whole", "4"))
    s.holder(s.request("gpu", 'device.driver == "DRIVER"'))
    s.pod(s.request())
    yield
    s.delete("pods", "holder")


@situation(Code.NO_DEVICE_PUBLISHED, words=("counter",), oldest="1.35")
def partition_larger_than_its_board(s: Scene) -> Iterator[None]:
    partitions(s, ("whole", "4"), slots="2")
    s.pod(s.request())
    yield
    partitions(s, ("whole", "2"), slots="2", generation=2)


# ------------------------------------------------------------ prioritized lists


@situation(Code.NO_DEVICE_PUBLISHED, Code.DEVICES_ALLOCATED, words=("gpu/best", "gpu/good"))
def all_alternatives_fail(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"model": "x"}))
    s.holder(s.request())
    s.pod(s.alternatives(s.request("best", MODEL_Z), s.request("good", MODEL_X)))
    yield
    s.delete("pods", "holder")


# ------------------------------------------------------------ pools


@situation(
    Code.NO_DEVICE_PUBLISHED,
    words=(
        "1 device that matches is in ResourceSlice",
        "of a pool with 1 of 2 slices; the scheduler uses the pool when the driver has published "
        "all of them",
    ),
    oldest="1.35",
)
def pool_incomplete(s: Scene) -> Iterator[None]:
    # The scheduler of Kubernetes 1.34 uses incomplete pools, except for requests for all devices.
    s.device_class(MODEL_X)
    s.publish(device("a", {"model": "x"}), of=2)
    s.pod(s.request())
    yield
    s.publish(device("b", {"model": "x"}), of=2, number=1)


@situation(
    Code.NO_DEVICE_PUBLISHED,
    words=("1 device that matches is in ResourceSlice", "of generation 1, but the scheduler only"),
)
def newest_generation_is_empty(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.publish(number=1, generation=2)
    s.pod(s.request())
    yield
    s.publish(device("a"), number=1, generation=2)


@situation(
    Code.NO_DEVICE_PUBLISHED,
    words=("1 device that matches is in ResourceSlice", "of node gone, which does not exist"),
)
def slice_of_a_node_that_is_gone(s: Scene) -> Iterator[None]:
    s.publish(device("a"), nodeName="gone")
    s.pod(s.request())
    yield
    s.publish(device("a"))


@situation(
    Code.NO_DEVICE_PUBLISHED,
    words=("1 device that matches is in ResourceSlice", "whose node selector matches no node"),
)
def slice_selects_no_node(s: Scene) -> Iterator[None]:
    s.publish(device("a"), nodeSelector=only_on("absent"))
    s.pod(s.request())
    yield
    s.publish(device("a"), nodeSelector=only_on(s.node))


# Before 1.35, an invalid pool ends the search for every pod.
@situation(Code.POOL_INVALID, words=("pool twins",), alone=True)
def device_published_twice(s: Scene) -> Iterator[None]:
    s.publish(device("a"), pool="twins", of=2, number=0)
    s.publish(device("a"), pool="twins", of=2, number=1)
    s.pod(s.request())
    yield
    s.publish(device("b"), pool="twins", of=2, number=1)


@fits()
def device_without_binding_conditions_first(s: Scene) -> Iterator[None]:
    later = {
        "bindingConditions": ["example.com/attached"],
        "bindingFailureConditions": ["example.com/failed"],
    }
    s.publish(device("a", **later), pool="a")
    s.publish(device("b"), pool="b")
    s.pod(s.request())
    yield
