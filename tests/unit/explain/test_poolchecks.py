"""Problems of published pools."""

from dataclasses import replace

import pytest

from drakit_explain.codes import Code
from drakit_explain.devices import DeviceFacts, Place
from drakit_explain.model import SliceFacts
from drakit_explain.poolchecks import PoolCondition, node_problems, pool_conditions, slice_problems
from tests.fakes.world import node, on, world_of


def of(name, *devices, place="n1", **facts):
    facts = {"driver": "d", "pool": "p", "place": on(place)} | facts
    return SliceFacts(
        name=name, uid=name, devices=tuple(DeviceFacts(name=each) for each in devices), **facts
    )


READY = of("s1", "g0")
HALF = of("s1", "g0", pool_slices=2)


@pytest.mark.parametrize(
    ("slices", "code", "words"),
    [
        pytest.param([READY], None, "", id="ready"),
        pytest.param([HALF], Code.POOL_INCOMPLETE, "has 1 of 2 slices", id="a-slice-is-missing"),
        pytest.param(
            [READY, of("s2", "g1")], Code.POOL_INCOMPLETE, "has 2 of 1 slices", id="one-too-many"
        ),
        pytest.param(
            [of("s1", "g0", pool_slices=3), of("s2", "g1", pool_slices=4)],
            Code.POOL_INCOMPLETE,
            "with different resourceSliceCount (3, 4)",
            id="slices-disagree",
        ),
        pytest.param([of("s1", "g0", "g0")], Code.POOL_INVALID, "the name g0", id="a-device-twice"),
        pytest.param(
            [READY, of("s2", "g1", generation=2)],
            Code.SLICES_OUTDATED,
            "older generations than 2",
            id="an-old-slice-remains",
        ),
        pytest.param(
            [HALF, of("s2", "g1", generation=2, pool_slices=2, place="n2")],
            Code.SLICES_OUTDATED,
            "older generations than 2",
            id="a-newer-generation-on-another-node",
        ),
        pytest.param(
            [READY, of("s2", "g0", place="n2")],
            Code.POOL_NAME_CONFLICT,
            "also published by node n2, and",
            id="one-name-on-two-nodes",
        ),
        pytest.param(
            [READY, of("s2", "g0", place="n2"), of("s3", "g0", place="n3")],
            Code.POOL_NAME_CONFLICT,
            "also published by node n2 and others",
            id="one-name-on-three-nodes",
        ),
        pytest.param(
            [HALF, of("s2", "g1", pool_slices=2, place="n2")], None, "", id="one-pool-of-two-nodes"
        ),
        pytest.param([READY, of("s2", "g0", place="gone")], None, "", id="twin-of-a-missing-node"),
    ],
)
def test_what_is_wrong_with_the_pools_of_a_node(slices, code, words):
    world = world_of(node("n1"), node("n2"), node("n3"), *slices)
    reasons = node_problems(world.node("n1"), world)
    assert [each.code for each in reasons] == ([] if code is None else [code])
    for each in reasons:
        assert each.sentence.startswith("pool p of driver d ")
        assert words in each.sentence
        assert each.transient == f"{code} d p"
        assert each.regarding.kind == "Node"


def test_an_unreadable_slice_may_be_the_missing_one():
    world = world_of(node("n1"), HALF, replace(of("x"), driver="", pool="", place=None))
    assert node_problems(world.node("n1"), world) == []


def test_a_missing_node_is_reported_once_for_a_pool():
    slices = [of("s2", place="gone"), of("s1", place="gone"), of("s0", place="n1")]
    world = world_of(node("n1"), *slices)
    found = [each for of in slices for each in slice_problems(of, world)]
    assert [(each.code, each.regarding.name) for each in found] == [(Code.NODE_GONE, "s1")]
    assert found[0].transient


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(world_of(READY), id="nodes-may-not-be-listed"),
        pytest.param(world_of(node("n2"), replace(READY, place=Place(every=True))), id="all-nodes"),
    ],
)
def test_a_slice_without_a_missing_node(world):
    (only,) = world.slices()
    assert slice_problems(only, world) == []


def test_pools_are_counted_by_their_condition():
    world = world_of(
        node("n1"),
        node("n2"),
        of("a", "g0", pool="ready"),
        of("b", "g0", pool="half", pool_slices=2),
        of("c", "g0", "g0", pool="invalid"),
        of("d1", "g0", pool="twin"),
        of("d2", "g0", pool="twin", place="n2"),
        of("e1", "g0", pool="old"),
        of("e2", "g0", pool="old", generation=2),
        of("f", "g0", pool="lost", place="gone"),
        replace(of("g", "g0", pool="network"), place=Place(every=True)),
        replace(of("h", "g0", pool="network-half", pool_slices=2), place=Place(every=True)),
    )
    assert pool_conditions(world) == {
        PoolCondition.READY: 2,
        PoolCondition.INCOMPLETE: 2,
        PoolCondition.INVALID: 1,
        PoolCondition.CONFLICTING: 2,
        PoolCondition.OUTDATED: 1,
        PoolCondition.NODE_MISSING: 1,
    }
