from __future__ import annotations

import pytest

from drakit_nodeplugin.slices.packing import PackingLimits
from drakit_nodeplugin.slices.plan import PoolIdentity, slice_name
from tests.unit.slices.world import (
    NODE,
    POOL,
    SMALL,
    PoolServer,
    counter_set,
    device,
    many,
    named,
    pool,
    taint,
)


def server(*devices, limits=SMALL, **fields) -> PoolServer:
    made = PoolServer(limits=limits)
    made.publish(pool(*devices, **fields))
    return made


# ------------------------------------------------------------ writes and generations


def test_a_first_publication_and_a_repetition_that_writes_nothing():
    made = PoolServer()
    assert made.publish(pool("a", "b")) == (1, 0, 0)
    assert made.publish(pool("b", "a")) == (0, 0, 0), "1024Mi is what the server calls 1Gi"
    (body,) = made.slices.values()
    assert body["spec"]["nodeName"] == body["spec"]["pool"]["name"] == "node-1"
    assert body["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "node-uid", "controller": True}
    ]


def test_a_driver_without_devices_has_one_empty_slice():
    made = PoolServer()
    assert made.publish(pool()) == (1, 0, 0)
    assert made.publish(pool()) == (0, 0, 0)


def test_a_thousand_devices_that_can_be_tainted_are_18_slices():
    made = PoolServer()
    assert made.publish(pool(*many(1000))) == (18, 0, 0)
    assert made.publish(pool(*many(1000, taint()))) == (0, 18, 0), "and all of them can be"
    assert made.generation == 1


def test_one_change_writes_one_slice_and_keeps_the_generation():
    made = server(*"abcde")
    before = made.published()
    assert made.publish(pool(*"acde")) == (0, 1, 0)
    assert made.publish(pool(*"acdef")) == (0, 1, 0)
    assert made.publish(pool(device("a", attributes={"model": "y"}), *"cdef")) == (0, 1, 0)
    after = made.published()
    assert {name: after[name] for name in "acde"} == {name: before[name] for name in "acde"}
    assert made.generation == 1


def test_a_value_of_another_type_is_a_change():
    made = server(device("a", attributes={"on": 1}))
    seen = made.plan(pool(device("a", attributes={"on": 1}))).known
    assert made.publish(pool(device("a", attributes={"on": True})), known=seen) == (0, 1, 0)


def test_growth_bumps_the_generation_of_all():
    made = server(*"abcdef")
    assert made.publish(pool(*"abcdefghi")) == (1, 2, 0)
    assert made.generation == 2


def test_devices_stand_in_the_order_of_their_numbers():
    made = PoolServer()
    made.publish(pool("kvm-10", "kvm-9", "kvm-1"))
    assert [*made.bodies()] == ["kvm-1", "kvm-9", "kvm-10"]


# ------------------------------------------------------------ the order of the driver


def tried(made: PoolServer) -> str:
    """The devices in the order in which the allocator tries them."""
    return "".join(made.bodies())


def test_an_ordered_inventory_is_published_in_its_order():
    made = server(*"cabhgfed", ordered=True)
    assert tried(made) == "cabhgfed"
    assert made.publish(pool(*"cabhgfed", ordered=True)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("after", "writes"),
    [
        pytest.param("bacdefgh", 1, id="inside-a-slice"),
        pytest.param("bacedfgh", 3, id="inside-two-slices"),
        pytest.param("hbcdefga", 3, id="across-slices"),
        pytest.param("xabcdefgh", 1, id="a-new-first"),
        pytest.param("abcxdefgh", 1, id="a-new-one-between-slices"),
        pytest.param("abcdefghx", 1, id="a-new-last"),
        pytest.param("xyabcdefgh", 4, id="more-first-than-there-is-room"),
        pytest.param("abdefgh", 1, id="one-less"),
        pytest.param("axbdefgh", 1, id="one-for-another"),
    ],
)
def test_a_change_of_the_order_costs(after, writes):
    """Slices of at most 4 devices are filled with 3."""
    made = server(*"abcdefgh", ordered=True)
    assert sum(made.publish(pool(*after, ordered=True))) == writes
    assert tried(made) == after
    assert made.publish(pool(*after, ordered=True)) == (0, 0, 0)


def test_a_driver_that_begins_to_order_its_devices_and_ends():
    made = server(*"abc")
    assert made.publish(pool(*"cab", ordered=True)) == (0, 1, 0)
    assert made.publish(pool(*"cab")) == (0, 1, 0)
    assert tried(made) == "abc"


def test_the_published_order_stays_while_the_driver_is_missing():
    made = server(*"dcba", ordered=True)
    missing = [named(name, taint()) for name in "abcd"]
    made.publish(pool(*missing, keeps_counter_sets=True, partition_type_attribute=None))
    assert tried(made) == "dcba"


def test_a_device_that_vanished_during_a_restart_keeps_its_place():
    made = server(*"dcbazy", ordered=True)
    wanted = pool(*"dbazy", named("c"), ordered=True)
    assert made.publish(wanted) == (0, 0, 0)
    assert tried(made) == "dcbazy"


def test_counter_sets_do_not_disturb_an_order():
    sets = [counter_set(f"s{n}") for n in range(3)]
    made = server(*"hgfe", counter_sets=tuple(sets[:2]), ordered=True)
    made.publish(pool(*"xhygfe", counter_sets=tuple(sets), ordered=True))
    assert tried(made) == "xhygfe"
    made.publish(pool(*"efghxyabcd", counter_sets=tuple(sets), ordered=True))
    assert tried(made) == "efghxyabcd"
    assert made.sets().keys() == {"s0", "s1", "s2"}


# ------------------------------------------------------------ types of partitions


def partition(name: str, **attributes: str):
    return device(name, consumes={"card": {"memory": "1"}}, attributes=attributes)


def test_a_slice_with_partitions_names_the_attribute_with_their_type():
    parts = [partition(f"part-{n}", profile="1g") for n in range(4)]
    fields = {"counter_sets": (counter_set("card"),), "partition_type_attribute": "x.y/profile"}
    made = server(*parts, "whole", **fields)

    def types() -> list[tuple[int, str]]:
        specs = [body["spec"] for body in made.current()]
        return [(len(spec["devices"]), spec.get("partitionTypeAttribute", "")) for spec in specs]

    assert types() == [(3, "x.y/profile"), (2, "x.y/profile"), (0, "")]
    assert made.publish(pool(*parts, "whole", **fields)) == (0, 0, 0)
    missing = [named(each.name, taint()) for each in parts]
    gone = pool(*missing, named("whole"), keeps_counter_sets=True, partition_type_attribute=None)
    assert made.publish(gone) == (0, 2, 0)
    assert types() == [(3, "x.y/profile"), (2, "x.y/profile"), (0, "")]
    vanished = [partition("old"), *parts, device("whole")]
    made.publish(pool(*vanished, **fields))
    assert "x.y/profile" in {name for _, name in types()}, "of the slices where all have a type"
    assert "old" in made.bodies()
    made.publish(pool("whole", **fields))
    assert {name for _, name in types()} == {""}


# ------------------------------------------------------------ what others have done


def test_a_driver_that_used_other_names_is_taken_over():
    made = PoolServer()
    made.publish(pool("a"))
    (body,) = made.slices.values()
    spec = body["spec"] | {"pool": body["spec"]["pool"] | {"generation": 7}}
    named_so = body["metadata"] | {"name": "00000-camera.example.com-node-1-x7c2p"}
    made.slices = {named_so["name"]: body | {"metadata": named_so, "spec": spec}}
    assert made.publish(pool("a")) == (1, 0, 1)
    assert made.publish(pool("a")) == (0, 0, 0)


def test_another_node_object_of_the_same_name_becomes_the_owner():
    made = server(*"abcdef")
    for body in made.slices.values():
        body["metadata"]["ownerReferences"][0]["uid"] = "an-older-node"
    assert made.publish(pool(*"abcdef")) == (0, 2, 0)
    assert made.generation == 1


@pytest.mark.parametrize("field", ["allNodes", "perDeviceNodeSelection", "nodeSelector"])
def test_a_slice_with_another_node_selection_is_corrected(field):
    made = server("a")
    (body,) = made.slices.values()
    body["spec"][field] = True
    assert made.publish(pool("a")) == (0, 1, 0)
    assert made.publish(pool("a")) == (0, 0, 0)


@pytest.mark.parametrize("writes", range(5))
def test_an_interrupted_round_is_finished_without_writing_anything_twice(writes):
    made = server(*"abcdefghi")
    wanted = pool(*"abcdefghixyz")
    total = sum(made.publish(wanted, writes=writes))
    assert total == 4
    assert sum(made.publish(wanted)) == 4 - writes
    assert set(made.published()) == set("abcdefghixyz")


@pytest.mark.parametrize("writes", range(1, 3))
def test_slices_that_an_interrupted_round_left_behind_may_change_in_any_way(writes):
    made = server(*"abcdefgh")
    made.publish(pool(*"bcdefgh"))
    changed = [device(name, attributes={"model": "y"}) for name in "bcdefgh"]
    assert made.publish(pool(*changed), writes=writes) == (0, 3, 0)
    # There is room in the first slice, too, but that one is not written any more.
    assert made.publish(pool(*changed, device("x"))) == (0, 3 - writes, 0)
    assert set(made.published()) == set("bcdefghx")
    assert made.generation == 2


def test_labels_of_others_stay():
    made = server("a")
    (body,) = made.slices.values()
    body["metadata"]["labels"] = {"team": "lab"}
    made.publish(pool("b"))
    (body,) = made.slices.values()
    assert body["metadata"]["labels"] == {"team": "lab"}


# ------------------------------------------------------------ taints


def test_any_number_of_taints_never_bump_the_generation():
    made = server(*"abcdefghi")
    tainted = [device(name, taint()) for name in "abcdef"]
    assert made.publish(pool(*tainted, *"ghi")) == (0, 2, 0)
    assert made.publish(pool(*"abcdefghi")) == (0, 2, 0)
    assert made.generation == 1


def test_a_taint_keeps_the_time_when_it_was_added():
    made = server(device("a", taint(at=1_700_000_000)), "b")
    again = pool(device("a", taint(at=1_800_000_000)), "b")
    assert made.publish(again) == (0, 0, 0)
    more = device("a", taint(at=1_800_000_000), taint("drakit.dev/stopped", at=1_800_000_000))
    assert made.publish(pool(more, "b")) == (0, 1, 0)
    assert made.bodies()["a"]["taints"] == [
        {
            "key": "drakit.dev/unhealthy",
            "effect": "NoSchedule",
            "timeAdded": "2023-11-14T22:13:20Z",
        },
        {"key": "drakit.dev/stopped", "effect": "NoSchedule", "timeAdded": "2027-01-15T08:00:00Z"},
    ]


def test_devices_that_an_earlier_release_placed_beyond_the_limit_move_once():
    made = server(*"abcdef", limits=PackingLimits(max_devices=6, fill_devices=6))
    before = made.published()
    made.limits = SMALL
    assert made.publish(pool(*"abcdef")) == (1, 1, 0)
    after = made.published()
    assert [name for name in "abcdef" if after[name] != before[name]] == ["e", "f"]
    tainted = [device(name, taint()) for name in "abcdef"]
    assert made.publish(pool(*tainted)) == (0, 2, 0)
    assert made.published() == after


# ------------------------------------------------------------ what is only known by name


def test_a_device_that_is_known_by_name_only_changes_its_taints():
    made = server("a", "b")
    assert made.publish(pool(named("a", taint()), named("b"))) == (0, 1, 0)
    body = made.bodies()["a"]
    assert body["attributes"] == {"model": {"string": "x"}}
    assert body["taints"][0]["key"] == "drakit.dev/unhealthy"
    assert made.publish(pool("a", "b")) == (0, 1, 0)
    assert "taints" not in made.bodies()["a"]


def test_a_device_that_is_known_by_name_and_was_wiped_is_left_out():
    """Selectors that read an attribute would fail on it, for all claims of the cluster."""
    made = server("b")
    assert made.publish(pool(named("a", taint()), "b", named("c"))) == (0, 0, 0)
    assert made.bodies().keys() == {"b"}
    assert made.publish(pool("a", "b", named("c"))) == (0, 1, 0)


def test_taints_of_a_driver_stay_while_it_is_missing():
    lens = taint("camera.example.com/lens", at=1)
    made = server(device("a", lens, taint(at=2)))
    seen = made.plan(pool(device("a", lens, taint(at=2)))).known
    missing = pool(named("a", taint("drakit.dev/stopped", at=3)))
    assert made.publish(missing, known=seen) == (0, 1, 0)
    assert [(each["key"], each["timeAdded"]) for each in made.bodies()["a"]["taints"]] == [
        ("camera.example.com/lens", "1970-01-01T00:00:01Z"),
        ("drakit.dev/stopped", "1970-01-01T00:00:03Z"),
    ]
    assert made.publish(missing) == (0, 0, 0)
    made.publish(pool(device("a")))
    assert "taints" not in made.bodies()["a"], "the driver is available again, and has no taint"


def test_a_drivers_own_taint_alone_is_no_difference_while_the_driver_is_missing():
    wanted = pool(device("a", taint("camera.example.com/lens")))
    made = server(*wanted.devices)
    seen = made.plan(wanted).known
    assert made.publish(pool(named("a")), known=seen) == (0, 0, 0)
    assert made.publish(pool(named("a"))) == (0, 0, 0)


def test_unmentioned_counter_sets_stay():
    made = server("a", counter_sets=(counter_set("gpu-0"),))
    before = made.sets()
    missing = {"keeps_counter_sets": True, "partition_type_attribute": None}
    assert made.publish(pool(named("a"), **missing)) == (0, 0, 0)
    assert made.publish(pool(named("a", taint()), **missing)) == (0, 1, 0)
    assert made.sets() == before


def test_the_counter_set_of_a_device_that_vanished_during_a_restart_stays_beside_others():
    """Without it, the scheduler would skip the whole pool."""
    made = server("a", "b", counter_sets=(counter_set("gpu-0"), counter_set("gpu-1")))
    before = made.sets()
    wanted = pool(
        named("a", taint()), "b", counter_sets=(counter_set("gpu-1"),), keeps_counter_sets=True
    )
    made.publish(wanted)
    assert made.sets() == before
    made.publish(pool("b", counter_sets=(counter_set("gpu-1"),)))
    assert made.sets().keys() == {"gpu-1"}


# ------------------------------------------------------------ counters


def test_counter_sets_have_slices_of_their_own():
    made = PoolServer()
    sets = tuple(counter_set(f"gpu-{i}") for i in range(9))
    assert made.publish(pool("a", counter_sets=sets)) == (3, 0, 0)
    assert made.publish(pool("a", counter_sets=sets)) == (0, 0, 0)
    changed = (*sets[:8], counter_set("gpu-8", "16"))
    assert made.publish(pool("a", counter_sets=changed)) == (0, 1, 0)
    assert made.publish(pool("a", counter_sets=changed[1:])) == (0, 1, 0)
    assert made.publish(pool("a")) == (0, 1, 2)


# ------------------------------------------------------------ names


def test_further_pools_have_names_of_their_own():
    identity = PoolIdentity(driver="d", node="node-1", node_uid="u", pool="node-1/gpus")
    made = PoolServer(identity)
    made.publish(pool("a"))
    ((name, body),) = made.slices.items()
    assert name.startswith("00000-d-node-1-gpus-")
    assert body["spec"]["pool"]["name"] == "node-1/gpus"
    assert body["spec"]["nodeName"] == "node-1"


def test_names_of_slices_are_those_of_earlier_releases():
    assert slice_name(POOL, 10) == "0000a-camera.example.com-node-1-510df1f7"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(("a", "b-c"), ("a-b", "c"), id="driver-and-node-that-join-alike"),
        pytest.param(("a", "n/x"), ("a", "n-x"), id="a-pool-and-a-node-that-look-alike"),
    ],
)
def test_two_pools_never_share_a_name(one, other):
    names = {
        slice_name(PoolIdentity(driver=driver, node="n", node_uid="u", pool=name), 0)
        for driver, name in (one, other)
    }
    assert len(names) == 2


def test_a_name_is_never_longer_than_the_api_allows():
    node = ".".join(["n" * 60] * 4)
    long = PoolIdentity(driver="d" * 63, node=node, node_uid="u", pool=node)
    names = {slice_name(long, index) for index in range(3)}
    assert len(names) == 3
    assert all(len(name) <= 253 for name in names)
