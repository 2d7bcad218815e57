"""
Situations: an error of the search on one node, which stops the pod although another node fits.

Their nodes are made up, because a pool of another situation would be an error for a request for all
devices, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from drakit_explain.codes import Code
from tests.situations.devices import FAST, TAINT
from tests.situations.scene import HOSTNAME, WAITS, Scene, device, devices
from tests.situations.table import fits, situation

GIVES_UP = "gives up on all nodes"
EVERY = {"allocationMode": "All"}


def two_nodes(s: Scene) -> tuple[str, str]:
    """Make the node with the error, and the one that fits."""
    return s.make_node("a"), s.make_node("b")


def of_another_driver(s: Scene, *published: dict, node: str, **spec: object) -> None:
    """Publish a pool of another driver, or replace it."""
    s.publish(*published, pool=f"{node}-other", driver=f"other-{s.driver}", nodeName=node, **spec)


@situation(
    Code.SELECTOR_FAILED,
    words=("no such key: fast", "device old", GIVES_UP, "would fit on node", "test for it first"),
    scheduler=("no such key: fast",),
)
def selector_fails_on_one_node(s: Scene) -> Iterator[None]:
    failing, fitting = two_nodes(s)
    s.publish(device("old"), nodeName=failing)
    s.publish(device("new", {"fast": True}), nodeName=fitting)
    s.pod(s.request("gpu", FAST))
    # Of the pod's template, too: no pod with it can be scheduled.
    s.wait_event(WAITS, Code.SELECTOR_FAILED, "ResourceClaimTemplate", "no such key: fast")
    yield
    s.pod(s.request("gpu", f'has(device.attributes["DRIVER"].fast) && {FAST}'))


@situation(
    Code.POOL_INCOMPLETE,
    words=("all devices", "is incomplete", GIVES_UP, "would fit on node"),
    scheduler=("asks for all devices", "incomplete"),
)
def all_beside_an_incomplete_pool(s: Scene) -> Iterator[None]:
    failing, fitting = two_nodes(s)
    s.publish(device("a"), nodeName=failing)
    s.publish(device("a"), nodeName=fitting)
    of_another_driver(s, device("x"), node=failing, of=2)
    s.pod(s.request(**EVERY))
    yield
    of_another_driver(s, device("y"), node=failing, of=2, number=1)


@situation(
    Code.POOL_INVALID,
    words=("all devices", "is invalid", GIVES_UP, "would fit on node"),
    scheduler=("asks for all devices", "invalid"),
)
def all_beside_an_invalid_pool(s: Scene) -> Iterator[None]:
    failing, fitting = two_nodes(s)
    s.publish(device("a"), nodeName=failing)
    s.publish(device("a"), nodeName=fitting)
    for number in (0, 1):
        of_another_driver(s, device("x"), node=failing, of=2, number=number)
    s.pod(s.request(**EVERY))
    yield
    of_another_driver(s, device("y"), node=failing, of=2, number=1)


@situation(
    Code.CONSTRAINT_NOT_MET,
    words=("all devices", "a constraint of the claim excludes one", GIVES_UP, "would fit on node"),
)
def all_and_a_constraint(s: Scene) -> Iterator[None]:
    failing, fitting = two_nodes(s)
    s.publish(device("a", {"numa": 0}), device("b", {"numa": 1}), nodeName=failing)
    s.publish(device("a", {"numa": 0}), device("b", {"numa": 0}), nodeName=fitting)
    s.pod(s.request(**EVERY), constraints=[{"matchAttribute": f"{s.driver}/numa"}])
    yield
    s.pod(s.request(count=2), constraints=[{"matchAttribute": f"{s.driver}/numa"}])


@situation(
    Code.REQUESTS_COMPETE,
    words=("33 devices", "only 32", GIVES_UP, "would fit on node"),
    scheduler=("exceeds the claim limit",),
)
def more_than_32_devices_on_one_node(s: Scene) -> Iterator[None]:
    failing, fitting = two_nodes(s)
    s.publish(devices(*(f"a-{number}" for number in range(33))), nodeName=failing)
    s.publish(device("a"), nodeName=fitting)
    s.pod(s.request(**EVERY))
    yield
    s.pod(s.request())


@situation(
    Code.REQUESTS_COMPETE,
    words=("33 devices", "only 32"),
    scheduler=("exceeds the claim limit",),
)
def more_than_32_devices_with_the_smallest_alternative(s: Scene) -> Iterator[None]:
    node, _ = two_nodes(s)
    s.publish(devices(*(f"a-{number}" for number in range(40))), nodeName=node)
    few = s.alternatives(s.request("many", count=4), s.request("one"))
    s.pod(s.request("most", count=32), few)
    yield
    s.pod(s.request("most", count=31), few)


# ------------------------------------------------------------ errors that the search does not reach


@fits()
def the_failing_node_is_excluded_before(s: Scene) -> Iterator[None]:
    failing, fitting = two_nodes(s)
    s.publish(device("old"), nodeName=failing)
    s.publish(device("new", {"fast": True}), nodeName=fitting)
    s.pod(s.request("gpu", FAST), nodeSelector={HOSTNAME: fitting})
    yield


@fits()
def the_failing_node_is_full(s: Scene) -> Iterator[None]:
    failing, fitting = two_nodes(s)
    s.publish(device("old"), nodeName=failing)
    s.publish(device("new", {"fast": True}), nodeName=fitting)
    s.holder(name="busy", cpu="3", nodeSelector={HOSTNAME: failing})
    s.pod(s.request("gpu", FAST), cpu="2")
    yield


@fits()
def the_failing_device_is_allocated(s: Scene) -> Iterator[None]:
    failing, fitting = two_nodes(s)
    s.publish(device("old"), nodeName=failing)
    s.holder(s.request())
    s.publish(device("new", {"fast": True}), nodeName=fitting)
    s.pod(s.request("gpu", FAST))
    yield


@fits()
def a_device_that_fits_comes_before_the_failing_one(s: Scene) -> Iterator[None]:
    node, _ = two_nodes(s)
    s.publish(device("a", {"fast": True}), device("b"), nodeName=node)
    s.pod(s.request("gpu", FAST))
    yield


@situation(
    Code.SELECTOR_FAILED,
    words=("no such key: fast", GIVES_UP, "would fit on node"),
    scheduler=("no such key: fast",),
    slow=True,
)
def the_failing_device_is_tainted(s: Scene) -> Iterator[None]:
    failing, fitting = two_nodes(s)
    s.publish(device("old", taints=[TAINT]), nodeName=failing)
    s.publish(device("new", {"fast": True}), nodeName=fitting)
    s.pod(s.request("gpu", FAST))
    yield
    s.publish(device("old", {"fast": False}, taints=[TAINT]), nodeName=failing)


# ------------------------------------------------------------ more than 64 nodes

NODES = 70


@situation(
    Code.SELECTOR_FAILED,
    words=("no such key: fsat", f"and {NODES - 1} more", "check the spelling of fsat", "has fast"),
    scheduler=("no such key: fsat",),
)
def attribute_is_misspelled_on_70_nodes(s: Scene) -> Iterator[None]:
    nodes = s.make_nodes(NODES)
    for node in nodes:
        s.publish(device("a", {"fast": True}), nodeName=node)
    s.pod(s.request("gpu", FAST.replace("fast", "fsat")))
    yield
    s.pod(s.request("gpu", FAST))


# ------------------------------------------------------------ the scheduler's timeout


@situation(
    Code.SEARCH_FAILED,
    words=("reached its timeout", "gave up on all nodes", "simplify the constraints"),
    scheduler=("timed out trying to allocate devices",),
    alone=True,
    slow=True,
)
def the_search_reaches_the_timeout(s: Scene) -> Iterator[None]:
    """On one node, 31 devices have each value of an attribute, and the claim wants 32 with one."""
    failing, fitting = two_nodes(s)
    boards = [device(f"d-{number}", {"board": number % 2}) for number in range(62)]
    s.publish(boards, nodeName=failing)
    s.publish([device(f"d-{number}", {"board": 0}) for number in range(32)], nodeName=fitting)
    same = [{"matchAttribute": f"{s.driver}/board"}]
    s.pod(s.request(count=32), constraints=same)
    yield
    s.pod(s.request(count=31), constraints=same)
