"""The pools of a node, as the scheduler puts slices together."""

from dataclasses import replace

import pytest

from drakit_explain.devices import Amount, CounterSetFacts, DeviceFacts, DeviceKind, Place
from drakit_explain.model import SliceFacts
from drakit_explain.pools import NodeView, PoolState, pools_of_node
from tests.fakes.world import device, on

NODE = NodeView("n1", {"zone": "a"})


def of(name, *devices, place=None, **facts):
    facts = {"driver": "d", "pool": "p", "place": place or on("n1")} | facts
    return SliceFacts(name=name, uid=name, devices=devices, **facts)


def selecting(value):
    expression = {"key": "zone", "operator": "In", "values": [value]}
    return Place(selector={"nodeSelectorTerms": [{"matchExpressions": [expression]}]})


def states(*slices):
    return [(pool.identity.pool, pool.state) for pool in pools_of_node(slices, NODE)]


def names(*slices):
    return [
        each.devices[index].name
        for pool in pools_of_node(slices, NODE)
        for each in pool.slices
        for index in range(len(each.devices))
        if pool.reaches(each, index)
    ]


@pytest.mark.parametrize(
    ("place", "found"),
    [
        pytest.param(on("n1"), True, id="this-node"),
        pytest.param(on("n2"), False, id="another-node"),
        pytest.param(Place(every=True), True, id="all-nodes"),
        pytest.param(selecting("a"), True, id="a-selector"),
        pytest.param(selecting("b"), False, id="a-selector-of-others"),
    ],
)
def test_a_slice_is_for_nodes(place, found):
    assert names(of("s", device("g0"), place=place)) == (["g0"] if found else [])


def test_a_slice_without_a_place_that_we_know_is_for_no_node():
    assert states(replace(of("s", device("g0")), place=None)) == []


def test_devices_with_places_of_their_own():
    slices = replace(
        of("s", device("here", place=on("n1")), device("there", place=on("n2"))),
        place=None,
        by_device=True,
    )
    assert names(slices) == ["here"]


def test_the_highest_generation_counts_alone():
    assert names(of("old", device("g0")), of("new", device("g1"), generation=2)) == ["g1"]


def test_a_pool_that_lacks_a_slice_is_incomplete():
    assert states(of("s", device("g0"), pool_slices=2)) == [("p", PoolState.INCOMPLETE)]


def test_slices_for_other_nodes_complete_a_pool():
    near = of("near", device("g0"), pool_slices=2)
    far = of("far", device("g1"), pool_slices=2, place=on("n2"))
    assert states(near, far) == [("p", PoolState.READY)]
    assert names(near, far) == ["g0"]


def test_a_newer_generation_without_slices_for_the_node_removes_the_pool():
    near = of("near", device("g0"), pool_slices=2)
    assert states(near, of("far", device("g1"), generation=2, place=on("n2"))) == []


CARD = CounterSetFacts(name="card", counters=(Amount("m", "1"),))


@pytest.mark.parametrize(
    ("slices", "problem"),
    [
        pytest.param([of("s", device("g0"), device("g0"))], "the name g0", id="a-name-twice"),
        pytest.param(
            [
                of("a", pool_slices=2, counter_sets=(CARD,)),
                of("b", pool_slices=2, counter_sets=(CARD,)),
            ],
            "the name card",
            id="a-counter-set-twice",
        ),
        pytest.param(
            [of("s", device("g0", consumes=(CARD,)))],
            "consumes counter set card, which the pool does not have",
            id="a-counter-set-that-is-missing",
        ),
        pytest.param(
            [
                of(
                    "a",
                    device("g0", consumes=(replace(CARD, counters=(Amount("x", "1"),)),)),
                    pool_slices=2,
                ),
                of("b", pool_slices=2, counter_sets=(CARD,)),
            ],
            "which has no counter x",
            id="a-counter-that-is-missing",
        ),
    ],
)
def test_a_pool_that_contradicts_itself_is_invalid(slices, problem):
    (pool,) = pools_of_node(slices, NODE)
    assert pool.state is PoolState.INVALID
    assert problem in pool.problem


def test_pools_with_binding_conditions_come_last():
    binding = DeviceFacts(name="b", kind=DeviceKind(binding=True))
    slices = [of("s1", binding, pool="a"), of("s2", device("x"), pool="b")]
    assert [pool for pool, _ in states(*slices)] == ["b", "a"]


def test_devices_beside_the_counters_in_a_slice_are_found():
    """Kubernetes 1.34 publishes them so, and no later release does."""
    here = of("here", device("g0", consumes=(CARD,)), counter_sets=(CARD,))
    (pool,) = pools_of_node([here], NODE)
    assert names(here) == ["g0"]
    assert len(pool.counters) == 1
    assert names(replace(here, place=on("n2"))) == []
