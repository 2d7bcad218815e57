"""Rules of the search that differ between the minor releases of Kubernetes."""

from dataclasses import replace

import pytest

from drakit_explain.devices import Amount, CapacityFacts, CounterSetFacts
from drakit_explain.model import Constraint, DeviceID, Share
from drakit_explain.pending import Verdict
from tests.fakes.world import (
    ANY,
    POD,
    claim,
    device,
    explain,
    holding,
    node,
    request,
    slice_on,
    world_of,
)

ALL_MINORS = {34, 35, 36, 37, None}
CARD = CounterSetFacts(name="card", counters=(Amount("m", "1"),))
MEMORY = CapacityFacts(name="m", value="2")
PART = device("part", consumes=(CARD,))
SHARED = device("shared", capacity=[MEMORY], shareable=True)


def pool(driver, *devices):
    """The two slices of a pool with one counter, on node n1."""
    identity = {"driver": driver, "pool": "p", "pool_slices": 2}
    yield replace(slice_on("n1", *devices), name=f"{driver}-devices", **identity)
    yield replace(slice_on("n1"), name=f"{driver}-counters", counter_sets=(CARD,), **identity)


def share_of(name, *consumed, of="n1"):
    share = Share(device=DeviceID("d", of, name), consumed=consumed)
    return replace(holding("other"), shares=(share,))


def fitting(*facts):
    """Return the minor releases whose scheduler finds devices for the claim."""
    found = set()
    for minor in ALL_MINORS:
        world = world_of(ANY, node("n1"), *facts)
        world.use_release(minor)
        verdict = explain(POD, world).verdict
        assert verdict in (Verdict.FITS, Verdict.BLOCKED)
        if verdict is Verdict.FITS:
            found.add(minor)
    return found


def test_pools_of_two_drivers_with_one_name_have_counters_of_their_own_since_1_36():
    facts = [*pool("d", PART), *pool("z", PART), claim(request(count=2))]
    assert fitting(*facts) == {36, 37, None}


def test_a_share_without_amounts_consumes_no_counters_again_since_1_37():
    part = replace(PART, kind=replace(PART.kind, shareable=True))
    facts = [*pool("d", part), share_of("part", of="p"), claim(request())]
    assert fitting(*facts) == {37, None}


@pytest.mark.parametrize(
    ("values", "minors"),
    [
        pytest.param((0, 1, 0), {34, 35, 36}, id="one-twice"),
        pytest.param((0, 1, 2), ALL_MINORS, id="all-distinct"),
        pytest.param((0, 0, 0), set(), id="all-alike"),
    ],
)
def test_distinct_values_are_compared_with_all_devices_since_1_37(values, minors):
    devices = [device(f"g{n}", attributes={"numa": value}) for n, value in enumerate(values)]
    distinct = Constraint(attribute="d/numa", distinct=True)
    facts = [slice_on("n1", *devices), claim(request(count=3), constraints=[distinct])]
    assert fitting(*facts) == minors


@pytest.mark.parametrize(
    ("used", "minors"),
    [
        pytest.param("2", {35, 36}, id="too-much"),
        pytest.param("1", ALL_MINORS, id="half"),
    ],
)
def test_all_devices_include_one_of_which_others_use_too_much(used, minors):
    free = device("free", capacity=[MEMORY])
    asked = request(count=0, capacity=(Amount("m", "1"),))
    facts = [slice_on("n1", free, SHARED), share_of("shared", Amount("m", used)), claim(asked)]
    assert fitting(*facts) == minors
