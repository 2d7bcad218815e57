"""Requests of pods are added up as the scheduler does it."""

from dataclasses import replace

import pytest

from drakit_explain.cel.library import Library
from drakit_explain.devices import Amount
from drakit_explain.loads import Load, Loads, load_of_pod, requests_of_pod
from drakit_explain.model import ClaimFacts, ClassFacts, PodClaim, PodFacts, Request, SliceFacts
from drakit_explain.pending import Explainer, Verdict
from tests.fakes.world import ask_allocator, device, evaluate_for, explain, node, on, world_of

BILLION = 10**9


def container(cpu="", *, sidecar=False, **amounts):
    requests = {**({"cpu": cpu} if cpu else {}), **amounts}
    restart = {"restartPolicy": "Always"} if sidecar else {}
    return {"name": "c", "resources": {"requests": requests}, **restart}


@pytest.mark.parametrize(
    ("spec", "cpu"),
    [
        pytest.param({}, 0, id="no-containers"),
        pytest.param({"containers": [container("1"), container("500m")]}, 1.5, id="containers"),
        pytest.param(
            {"containers": [container("1")], "initContainers": [container("3"), container("2")]},
            3,
            id="the-largest-init-container",
        ),
        pytest.param(
            {"containers": [container("1")], "initContainers": [container("1", sidecar=True)]},
            2,
            id="a-sidecar-runs-beside-the-containers",
        ),
        pytest.param(
            {
                "containers": [container("1")],
                "initContainers": [container("1", sidecar=True), container("3")],
            },
            4,
            id="an-init-container-runs-beside-an-earlier-sidecar",
        ),
        pytest.param(
            {
                "containers": [container("1")],
                "initContainers": [container("3"), container("1", sidecar=True)],
            },
            3,
            id="an-init-container-ends-before-a-later-sidecar",
        ),
        pytest.param(
            {"containers": [container("1")], "overhead": {"cpu": "250m"}}, 1.25, id="overhead"
        ),
        pytest.param(
            {"containers": [container("1")], "resources": {"requests": {"cpu": "4"}}},
            4,
            id="an-amount-of-the-whole-pod",
        ),
    ],
)
def test_the_cpu_of_a_pod(spec, cpu):
    assert dict(requests_of_pod(spec)).get("cpu", 0) == cpu * BILLION
    assert dict(requests_of_pod(spec))["pods"] == BILLION


def test_extended_resources_do_not_count():
    spec = {"containers": [container("1", **{"example.com/gpu": "1"})]}
    assert [name for name, _ in requests_of_pod(spec)] == ["pods", "cpu"]


def load(uid, cpu, *, priority=0, where="n1"):
    return Load(uid, where, priority, (("pods", BILLION), ("cpu", cpu * BILLION)))


def free_cpu(loads, *, priority=0):
    allocatable = (Amount("cpu", "8"), Amount("pods", "110"))
    return loads.free(node("n1", allocatable=allocatable), priority=priority)["cpu"] / BILLION


def test_loads_follow_the_pods():
    loads = Loads()
    loads.apply(load("a", 2))
    loads.apply(load("b", 1))
    loads.apply(load("b", 3))  # a resize
    loads.apply(load("elsewhere", 7, where="n2"))
    assert free_cpu(loads) == 3
    loads.remove("a")
    loads.remove("never-seen")
    assert free_cpu(loads) == 5
    before = loads.revision
    replacing = loads.replace([load("c", 1), load("d", 4)])
    next(replacing)
    assert (free_cpu(loads), loads.revision) == (5, before), "the old sums until the end"
    list(replacing)
    assert free_cpu(loads) == 3
    assert loads.revision > before
    loads.remove("d")
    loads.remove("c")
    assert free_cpu(loads) == 8


def test_pods_that_the_scheduler_can_preempt_do_not_count():
    loads = Loads()
    loads.apply(load("low", 2, priority=-5))
    loads.apply(load("same", 1, priority=10))
    assert free_cpu(loads, priority=10) == 7
    assert free_cpu(loads, priority=-5) == 5
    assert free_cpu(loads, priority=11) == 8


def test_a_repeated_pod_is_no_change():
    loads = Loads()
    loads.apply(load("a", 2))
    before = loads.revision
    loads.apply(load("a", 2))
    assert loads.revision == before


def test_outdated_loads_are_unknown():
    current = [True]
    loads = Loads(lambda: current[0])
    world = small_world()
    world.loads = loads
    loads.apply(load("other", 1))
    assert explain(waiting(2), world).verdict is Verdict.BLOCKED
    current[0] = False
    assert loads.revision is None
    assert explain(waiting(2), world).verdict is Verdict.FITS


def test_a_pod_of_the_api_server():
    body = {
        "metadata": {"uid": "u"},
        "spec": {"nodeName": "n1", "priority": 7, "containers": [container("2", memory="1Gi")]},
    }
    sums = (("pods", BILLION), ("cpu", 2 * BILLION), ("memory", 2**30 * BILLION))
    assert load_of_pod(body) == Load("u", "n1", 7, sums)


def test_the_pods_of_other_nodes_are_unknown():
    world = small_world()
    world.loads = Loads(nodes=["n2"])
    world.loads.apply(load("other", 1))
    assert explain(waiting(2), world).verdict is Verdict.FITS
    world.loads = Loads(nodes=["n1"])
    world.loads.apply(load("other", 1))
    assert explain(waiting(2), world).verdict is Verdict.BLOCKED


def small_world():
    """Two free devices on a node with two CPUs, of which one is taken."""
    requests = (Request(name="gpu", device_class="gpu.example"),)
    world = world_of(
        ClassFacts(name="gpu.example", uid="c", selectors=('device.driver == "d"',)),
        SliceFacts(
            name="s",
            uid="s",
            driver="d",
            pool="n1",
            place=on("n1"),
            devices=(device("g0"), device("g1")),
        ),
        ClaimFacts(namespace="lab", name="wants", uid="w", requests=requests),
        node("n1", allocatable=(Amount("cpu", "2"), Amount("pods", "110"))),
    )
    world.loads = Loads()
    world.loads.apply(load("other", 1))
    return world


def waiting(cpu):
    return PodFacts(
        namespace="lab",
        name="train",
        uid="p",
        claims=(PodClaim(name="gpu", claim="wants"),),
        requests=(("pods", BILLION), ("cpu", cpu * BILLION)),
    )


def test_the_sentence_names_the_resource_and_the_remedy():
    (reason,) = explain(waiting(2), small_world()).reasons
    assert "on nodes that the pod cannot use (they have too little cpu left)" in reason.text
    assert "reduce the requests of the pod, or free resources on those nodes" in reason.text


def test_a_node_that_has_as_many_pods_as_it_may_have_is_named():
    world = small_world()
    assert world.loads is not None
    for number in range(110):
        world.loads.apply(Load(f"pod-{number}", "n1", 0, (("pods", BILLION),)))
    (reason,) = explain(waiting(1), world).reasons
    assert "they have too little room for pods left" in reason.text


def test_a_pod_without_requests_fits_on_a_node_that_has_nothing_left():
    world = small_world()
    assert world.loads is not None
    world.loads.apply(load("static", 9))
    pod = replace(waiting(0), requests=(("pods", BILLION), ("cpu", 0)))
    assert explain(pod, world).verdict is Verdict.FITS


def test_an_explainer_notices_that_room_is_free_again():
    world, pod = small_world(), waiting(2)
    explainer = Explainer(world)
    evaluate_for(explainer, world, pod, Library())
    assert explainer.explain_now(pod, ask_allocator).verdict is Verdict.BLOCKED
    assert world.loads is not None
    world.loads.remove("other")
    assert explainer.explain_now(pod, ask_allocator).verdict is Verdict.FITS
