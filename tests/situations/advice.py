"""Situations: advice that fits the cause, and what is named if devices are not the cause."""

from __future__ import annotations

from collections.abc import Iterator

from drakit_explain.codes import Code
from drakit_explain.pending import Verdict
from tests.situations.devices import FAST, TAINT
from tests.situations.scene import HOSTNAME, Scene, device, devices
from tests.situations.table import situation

# ------------------------------------------------------------ devices are not the cause


@situation(
    verdict=Verdict.FITS,
    words=("not checked: its host ports", "free ports"),
    scheduler=("free ports",),
)
def host_port_taken(s: Scene) -> Iterator[None]:
    s.publish(devices("a", "b"), nodeName=s.make_node("a"))
    s.holder(s.request(), host_port=8080)
    s.pod(s.request(), host_port=8080)
    yield
    s.delete("pods", "holder")


@situation(
    verdict=Verdict.FITS,
    words=("not checked: its affinity to other pods", "pod affinity"),
    scheduler=("pod affinity",),
    slow=True,
)
def affinity_to_no_pod(s: Scene) -> Iterator[None]:
    s.publish(device("a"), nodeName=s.make_node("a"))
    term = {"labelSelector": {"matchLabels": {"app": "absent"}}, "topologyKey": HOSTNAME}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    s.pod(s.request(), affinity={"podAffinity": required})
    yield
    s.pod(s.request())


@situation(
    verdict=Verdict.FITS,
    words=("not checked: extended resource rdma/hca", "1 Insufficient rdma/hca"),
    scheduler=("1 Insufficient rdma/hca",),
)
def extended_resource_of_a_device_plugin(s: Scene) -> Iterator[None]:
    s.publish(device("a"), nodeName=s.make_node("a"))
    s.pod(s.request(), extended="rdma/hca")
    yield
    s.pod(s.request())


@situation(
    Code.SELECTOR_FAILED,
    # Its host ports may exclude the node before, but the scheduler says that it was there.
    words=("the scheduler gives up on all nodes because of this error on node",),
    scheduler=("no such key: fast",),
)
def selector_fails_on_a_node_with_perhaps_no_port(s: Scene) -> Iterator[None]:
    s.publish(device("old"), nodeName=s.make_node("a"))
    s.publish(device("new", {"fast": True}), nodeName=s.make_node("b"))
    s.pod(s.request("gpu", FAST), host_port=8081)
    yield
    s.pod(host_port=8081, name="holder", nodeSelector={HOSTNAME: s.made_up[0]})


# ------------------------------------------------------------ nodes


@situation(
    Code.DEVICES_ON_OTHER_NODES,
    words=("if that node lost the taint node.kubernetes.io/not-ready",),
    never=("tolerat",),
)
def node_not_ready(s: Scene) -> Iterator[None]:
    node = s.make_node("a", ready=False)
    s.publish(device("a"), nodeName=node)
    s.pod(s.request())
    yield
    s.change_readiness(node, ready=True)


@situation(
    Code.NODE_GONE,
    words=(
        "its claim disk is allocated on node",
        "which no longer exists, and other pods use the claim; delete these pods, so that",
    ),
    never=("cannot run",),
)
def shared_claim_on_a_node_that_is_gone(s: Scene) -> Iterator[None]:
    gone = s.make_node("a")
    s.publish(device("a"), nodeName=gone)
    s.claim("disk", s.request())
    s.holder(claims=["disk"])
    s.hold("pods", "holder", "example.com/hold")  # else Kubernetes deletes it after some time
    s.publish(device("a"), nodeName=s.make_node("b"))
    s.delete("nodes", gone)
    s.pod(claims=["disk"])
    yield
    s.hold("pods", "holder")
    s.delete("pods", "holder")


# ------------------------------------------------------------ requests


@situation(
    Code.NO_DEVICE_PUBLISHED,
    words=("has capacity memroy", "the devices have memory", "check the spelling"),
    never=("lower capacity",),
)
def capacity_is_misspelled(s: Scene) -> Iterator[None]:
    s.publish(device("a", capacity={"memory": "8Gi"}))
    s.pod(s.request(capacity={"memroy": "4Gi"}))
    yield
    s.pod(s.request(capacity={"memory": "4Gi"}))


@situation(
    Code.CONSTRAINT_NOT_MET,
    words=("has attribute", "nmua", "which matchAttribute requires", "numa, so check the spelling"),
)
def constraint_on_an_attribute_that_no_device_has(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"numa": 0}), device("b", {"numa": 0}))
    s.pod(s.request(count=2), constraints=[{"matchAttribute": f"{s.driver}/nmua"}])
    yield
    s.pod(s.request(count=2), constraints=[{"matchAttribute": f"{s.driver}/numa"}])


@situation(
    Code.DEVICES_ALLOCATED,
    words=("Kubernetes preempts no pod for its devices", "pod holder"),
)
def priority_does_not_help(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.holder(s.request())
    s.pod(s.request(), priorityClassName="system-cluster-critical")
    yield
    s.delete("pods", "holder")


# ------------------------------------------------------------ taints


@situation(
    Code.DEVICES_TAINTED,
    words=("its toleration of example.com/broken has value no, not yes",),
)
def toleration_of_another_value(s: Scene) -> Iterator[None]:
    s.publish(device("a", taints=[TAINT]))
    s.pod(s.request(tolerations=[{"key": TAINT["key"], "operator": "Equal", "value": "no"}]))
    yield
    s.pod(s.request(tolerations=[{"key": TAINT["key"], "operator": "Equal", "value": "yes"}]))
