"""How many equal pods fit, one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drakit_cli.kubectl import replicas
from drakit_cli.kubectl.replicas import placed
from drakit_explain.devices import Amount, CapacityFacts, CounterSetFacts
from drakit_explain.loads import Loads
from drakit_explain.model import ClaimFacts, PodClaim, PodFacts, TemplateFacts
from tests.fakes.world import ANY, device, holding, node, request, slice_on, world_of

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


def number(of, limit=10):
    with placed(POD, limit, of) as done:
        assert not done.stopped
        return done.number


def gpus(amount):
    return [device(f"g{each}") for each in range(amount)]


def test_each_pod_takes_devices_of_one_node():
    found = world(slice_on("n1", *gpus(5)), slice_on("n2", *gpus(5)), holding("other", "g0"))
    before = dict(found.of(ClaimFacts))
    assert number(found) == 4
    assert number(found, limit=3) == 3
    assert found.of(ClaimFacts) == before
    assert number(found) == 4


def test_each_pod_takes_room_on_its_node():
    cpus = tuple(
        replace(node(name), allocatable=(Amount("cpu", amount), Amount("pods", "9")))
        for name, amount in (("n1", "1500m"), ("n2", "2"))
    )
    found = world(slice_on("n1", *gpus(8)), slice_on("n2", *gpus(8)), *cpus)
    found.loads = Loads()
    assert number(found) == 3
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
    of = slice_on("n1", *parts)
    assert number(world(replace(of, counter_sets=(card,)), slice_on("n2", *gpus(2)))) == 3


def test_what_is_unknown_or_takes_too_long_ends_the_count(monkeypatch):
    with placed(POD, 3, world(slice_on("n1", *gpus(9)), unsupported="a new field")) as done:
        assert (done.number, done.stopped) == (0, True)
    monkeypatch.setattr(replicas, "MAX_SECONDS", -1)
    with placed(POD, 3, world(slice_on("n1", *gpus(9)))) as done:
        assert (done.number, done.stopped) == (0, True)


def test_the_world_is_as_before_after_an_error():
    found = world(slice_on("n1", *gpus(2)))

    def fail():
        with placed(POD, 1, found):
            assert found.of(ClaimFacts)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not found.of(ClaimFacts)
