"""How many equal pods fit, one after the other."""

from __future__ import annotations

from dataclasses import replace

from drakit_cli.kubectl import replicas
from drakit_cli.kubectl.replicas import place
from drakit_explain.devices import Amount, CapacityFacts, CounterSetFacts
from drakit_explain.loads import Loads
from drakit_explain.model import PodClaim, PodFacts, TemplateFacts
from tests.fakes.world import ANY, ask_allocator, device, holding, node, request, slice_on, world_of

POD = PodFacts(
    namespace="lab",
    name="train",
    uid="p",
    claims=(PodClaim(name="c", template="t"), PodClaim(name="d", template="t")),
    requests=(("cpu", 10**9),),
)


def world(*facts, **changes):
    """Two nodes; each pod has two claims from the template."""
    template = TemplateFacts(namespace="lab", name="t", uid="t", requests=(request(**changes),))
    return world_of(node("n1"), node("n2"), ANY, template, *facts)


def number(of, limit=10, after=0):
    done = place(POD, limit, of, ask_allocator, after=after)
    assert not done.stopped
    return done.number


def gpus(amount):
    return [device(f"g{each}") for each in range(amount)]


def test_each_pod_takes_devices_of_one_node():
    found = world(slice_on("n1", *gpus(5)), slice_on("n2", *gpus(5)), holding("other", "g0"))
    assert number(found, limit=3) == 3
    assert number(found, after=3) == 1, "the others keep their devices"
    assert number(found, after=4) == 0


def test_each_pod_takes_room_on_its_node():
    cpus = tuple(
        replace(node(name), allocatable=(Amount("cpu", amount), Amount("pods", "9")))
        for name, amount in (("n1", "1500m"), ("n2", "2"))
    )
    found = world(slice_on("n1", *gpus(8)), slice_on("n2", *gpus(8)), *cpus)
    found.loads = Loads()
    assert number(found) == 3


def test_pods_share_a_device_until_it_is_used_up():
    memory = CapacityFacts(name="memory", value="40Gi")
    shared = device("s", shareable=True, capacity=(memory,))
    asked = (Amount("memory", "6Gi"),)
    assert number(world(slice_on("n1", shared), capacity=asked)) == 3
    found = world(slice_on("n1", shared), slice_on("n2", shared), capacity=asked)
    assert number(found) == 6


def test_admin_access_takes_no_device():
    assert number(world(slice_on("n1", *gpus(2)), admin_access=True), limit=7) == 7


def test_partitions_use_up_their_card():
    parts = [
        replace(each, consumes=(CounterSetFacts(name="card", counters=(Amount("slices", "1"),)),))
        for each in gpus(8)
    ]
    card = CounterSetFacts(name="card", counters=(Amount("slices", "5"),))
    of = replace(slice_on("n1", *parts), pool_slices=2)
    counters = replace(slice_on("n1"), name="c", pool_slices=2, counter_sets=(card,))
    assert number(world(of, counters, slice_on("n2", *gpus(2)))) == 3


def test_what_is_unknown_or_takes_too_long_ends_the_count(monkeypatch):
    done = place(POD, 3, world(slice_on("n1", *gpus(9)), unsupported="a new field"), ask_allocator)
    assert (done.number, done.stopped) == (0, True)
    monkeypatch.setattr(replicas, "MAX_SECONDS", -1)
    done = place(POD, 3, world(slice_on("n1", *gpus(9))), ask_allocator)
    assert (done.number, done.stopped) == (0, True)
