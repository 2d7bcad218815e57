"""The pools of a node, as the scheduler puts slices together."""

from dataclasses import replace

import pytest

from drakit_explain.devices import Amount, CounterSetFacts
from drakit_explain.model import SliceFacts
from drakit_explain.pools import NodeView, PoolState, pools_of_node, rules_of
from tests.fakes.world import device, on

NODE = NodeView("n1", {"zone": "a"})


def of(name, *devices, place=None, **facts):
    facts = {"driver": "d", "pool": "p", "place": place or on("n1")} | facts
    return SliceFacts(name=name, uid=name, devices=devices, **facts)


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


def test_a_slice_without_a_place_that_we_know_is_for_no_node():
    assert states(replace(of("s", device("g0")), place=None)) == []


CARD = CounterSetFacts(name="card", counters=(Amount("m", "1"),))


@pytest.mark.parametrize(
    ("slices", "problem"),
    [
        pytest.param(
            [
                of("a", pool_slices=2, counter_sets=(CARD,)),
                of("b", pool_slices=2, counter_sets=(CARD,)),
            ],
            "the name card",
            id="a-counter-set-twice",
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


@pytest.mark.parametrize(
    ("minor", "expected"),
    [(34, [PoolState.INCOMPLETE]), (36, [PoolState.INCOMPLETE]), (37, []), (None, [])],
)
def test_since_1_37_counters_of_another_node_make_no_pool(minor, expected):
    counters = of("c", pool_slices=2, counter_sets=(CARD,), place=on("n2"))
    found = pools_of_node([counters], NODE, rules=rules_of(minor))
    assert [pool.state for pool in found] == expected
    found = pools_of_node([counters], NodeView("n2", {}), rules=rules_of(minor))
    assert [pool.state for pool in found] == [PoolState.INCOMPLETE]


@pytest.mark.parametrize("minor", [34, 36, 37])
def test_counters_of_another_node_count_for_devices_of_this_one(minor):
    here = of("d", device("g0", consumes=(CARD,)), pool_slices=2)
    counters = of("c", pool_slices=2, counter_sets=(CARD,), place=on("n2"))
    (pool,) = pools_of_node([here, counters], NODE, rules=rules_of(minor))
    assert (pool.state, pool.slices, pool.elsewhere) == (PoolState.READY, (here,), ())
    assert list(pool.counters.values()) == [1_000_000_000]


def test_devices_beside_the_counters_in_a_slice_are_found():
    """Kubernetes 1.34 publishes them so, and no later release does."""
    here = of("here", device("g0", consumes=(CARD,)), counter_sets=(CARD,))
    (pool,) = pools_of_node([here], NODE)
    assert names(here) == ["g0"]
    assert len(pool.counters) == 1
    assert names(replace(here, place=on("n2"))) == []


@pytest.mark.parametrize(("minor", "expected"), [(34, [PoolState.INCOMPLETE]), (35, [])])
def test_up_to_1_34_a_node_has_an_older_generation_whose_newer_one_is_for_others(minor, expected):
    older = of("older", device("g0"), pool_slices=2)
    newer = of("newer", device("g1"), generation=2, place=on("n2"))
    found = pools_of_node([older, newer], NODE, rules=rules_of(minor))
    assert [pool.state for pool in found] == expected
