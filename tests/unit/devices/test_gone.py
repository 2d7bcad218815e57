"""Devices that vanish from an inventory: those that claims hold stay, tainted, until released."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from drakit import Capacity, Device, Health
from drakit.device import CounterSet, Inventory, RejectedDevice
from drakit_nodeplugin.devices.model import DeviceHealth
from drakit_nodeplugin.devices.stored import GONE_SECONDS
from drakit_nodeplugin.state.checkpoint import CheckpointError
from tests.unit.devices.conftest import (
    DRIVER,
    NODE,
    SETTINGS,
    Node,
    inventory,
    pass_time,
    published,
    shown,
    taint_words,
)

pytestmark = pytest.mark.looptime

BAD = Health.unhealthy("too hot")

DELAY = SETTINGS.gone_eviction_delay


def evicting(*names: str, withdrawn: Collection[str] = ()) -> Inventory:
    devices = [Device(name=name, evict_if_gone=True) for name in names]
    return Inventory(devices=devices, withdrawn=withdrawn)


def added_at(manager, name: str) -> int:
    (device,) = [d for d in manager.publication().pools[NODE].devices if d.name == name]
    (taint,) = [t for t in device.taints if t.key == "drakit.dev/gone"]
    return taint.added_at


def health_of(manager, name: str) -> DeviceHealth:
    (found,) = [each for each in manager.health_states() if each.device == name]
    return found


# ------------------------------------------------------------ in one life of the plugin


async def test_a_device_that_no_claim_holds_goes_at_once(node: Node, looptime):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        await pass_time(5)
        manager.replaced(DRIVER, inventory("b"))
        await pass_time(0)
        assert shown(manager.publication()) == {NODE: {"b": []}}
        assert looptime == 5


async def test_a_held_device_is_tainted_at_once_and_goes_when_it_is_released(node: Node):
    node.store.used = {NODE: {"a"}}
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        await pass_time(5)
        seen = manager.revision.number
        manager.replaced(DRIVER, inventory("b"))
        assert shown(manager.publication()) == {NODE: {"a": ["gone"], "b": []}}
        assert manager.revision.number == seen + 1
        assert health_of(manager, "a").status == "unhealthy"
        assert "no longer lists it" in health_of(manager, "a").message
        assert manager.is_gone(NODE, "a")
        assert not manager.is_gone(NODE, "b")
        hardware, capacity = manager.hardware(), manager.capacity().pools[NODE]
        assert hardware is not None
        assert hardware.device(NODE, "a") is None
        assert (capacity.healthy, capacity.unhealthy, capacity.gone) == ({"b"}, set(), {"a"})
        await pass_time(3600)
        assert shown(manager.publication()) == {NODE: {"a": ["gone"], "b": []}}
        assert manager.revision.number == seen + 1, "nothing changes while the claim holds it"
        assert added_at(manager, "a") == int(node.epoch) + 5
        node.store.used = {}
        await pass_time(GONE_SECONDS)
        assert shown(manager.publication()) == {NODE: {"b": []}}
        assert [each.device for each in manager.health_states()] == ["b"]
        assert not manager.is_gone(NODE, "a")


async def test_held_devices_keep_their_places_in_the_order_of_the_driver(node: Node):
    node.store.used = {NODE: {"b", "e"}}

    def listed(names: str) -> Inventory:
        return Inventory(devices=[Device(name=name) for name in names], ordered=True)

    async with node.plugin() as manager:
        manager.replaced(DRIVER, listed("edcba"))
        await pass_time(5)
        for names, order in (("dca", "edcba"), ("acd", "eacbd"), ("dceba", "dceba")):
            manager.replaced(DRIVER, listed(names))
            await pass_time(5)
            found = manager.publication().pools[NODE]
            assert "".join(each.name for each in found.devices) == order
            assert found.ordered


async def test_a_device_that_stays_away_evicts_its_pods_after_a_delay(node: Node):
    node.store.used = {NODE: {"a", "b"}}
    async with node.plugin() as manager:
        manager.replaced(DRIVER, evicting("a", "b", "c"))
        manager.replaced(DRIVER, evicting("b", "c"))
        assert shown(manager.publication()) == {NODE: {"a": ["gone"], "b": [], "c": []}}
        await pass_time(4)
        manager.replaced(DRIVER, evicting("c"))
        seen = manager.revision.number
        await pass_time(DELAY - 5)
        assert shown(manager.publication()) == {NODE: {"a": ["gone"], "b": ["gone"], "c": []}}
        assert manager.revision.number == seen
        await pass_time(1)
        assert shown(manager.publication())[NODE]["a"] == ["gone:NoExecute"]
        assert shown(manager.publication())[NODE]["b"] == ["gone"], "it vanished later"
        assert added_at(manager, "a") == int(node.epoch + DELAY), "a toleration counts from then"
        await pass_time(4)
        assert shown(manager.publication())[NODE]["b"] == ["gone:NoExecute"]
        await pass_time(3600)
        assert added_at(manager, "a") == int(node.epoch + DELAY)


async def test_devices_that_return_within_the_delay_are_never_evicted(node: Node):
    """A hub that resets unplugs its devices for a moment, perhaps again and again."""
    node.store.used = {NODE: {"a"}, f"{NODE}/usb": {"a"}}
    both = [Device(name="a", pool=pool, evict_if_gone=True) for pool in ("", "usb")]
    async with node.plugin() as manager:
        for _ in range(3):
            manager.replaced(DRIVER, Inventory(devices=both))
            await pass_time(1)
            assert shown(manager.publication()) == {NODE: {"a": []}, f"{NODE}/usb": {"a": []}}
            manager.replaced(DRIVER, inventory("x"))
            await pass_time(DELAY - 1)
            gone = {NODE: {"a": ["gone"], "x": []}, f"{NODE}/usb": {"a": ["gone"]}}
            assert shown(manager.publication()) == gone


async def test_each_device_of_two_pools_and_two_endpoints_has_its_own_delay(node: Node):
    node.store.used = {f"{NODE}/one": {"a"}, f"{NODE}/two": {"a"}}

    def listed(pool: str, *names: str) -> Inventory:
        devices = [Device(name=name, pool=pool, evict_if_gone=True) for name in names]
        return Inventory(devices=devices)

    async with node.plugin("any", endpoints=()) as manager:
        for pool in ("one", "two"):
            manager.replaced(pool, listed(pool, "a", "b"))
        await pass_time(1)
        manager.replaced("one", listed("one", "b"))
        await pass_time(4)
        manager.replaced("two", listed("two", "b"))
        await pass_time(DELAY - 4)
        assert shown(manager.publication()) == {
            f"{NODE}/one": {"a": ["gone:NoExecute"], "b": []},
            f"{NODE}/two": {"a": ["gone"], "b": []},
        }
        manager.replaced("two", listed("two", "a", "b"))
        await pass_time(DELAY)
        assert shown(manager.publication()) == {
            f"{NODE}/one": {"a": ["gone:NoExecute"], "b": []},
            f"{NODE}/two": {"a": [], "b": []},
        }


@pytest.mark.parametrize(
    "after_seconds", [pytest.param(2, id="at-once"), pytest.param(60, id="after-the-delay")]
)
async def test_a_withdrawn_device_is_gone_and_its_pods_are_not_evicted_until_it_is_unplugged(
    node: Node, after_seconds: float
):
    """The device may have been unplugged before, if it returns without a policy that matches it."""
    node.store.used = {NODE: {"a", "b"}}
    async with node.plugin() as manager:
        manager.replaced(DRIVER, evicting("a", "b", "c"))
        manager.replaced(DRIVER, evicting("c"))
        await pass_time(after_seconds)
        manager.replaced(DRIVER, evicting("c", withdrawn=["a", "c", "no-such"]))
        await pass_time(60)
        expected = {NODE: {"a": ["gone"], "b": ["gone:NoExecute"], "c": []}}
        assert shown(manager.publication()) == expected
        manager.replaced(DRIVER, evicting("c"))
        await pass_time(DELAY - 1)
        assert shown(manager.publication()) == expected
        await pass_time(1)
        expected = {NODE: {"a": ["gone:NoExecute"], "b": ["gone:NoExecute"], "c": []}}
        assert shown(manager.publication()) == expected, "now it is unplugged"
        node.store.used = {NODE: {"b"}}
        await pass_time(GONE_SECONDS)
        assert shown(manager.publication()) == {NODE: {"b": ["gone:NoExecute"], "c": []}}


async def test_pods_learn_what_their_containers_have_of_a_device_that_is_gone(node: Node):
    node.store.used = {NODE: {"a", "b", "c"}}
    kept = "keeps its device node, which does not work, and cannot open another one"
    async with node.plugin() as manager:
        stays = Device(name="b")
        manager.replaced(DRIVER, Inventory(devices=[*evicting("a", "c").devices, stays]))
        manager.replaced(DRIVER, Inventory(devices=[], withdrawn=["c"]))
        await pass_time(1)
        messages = {name: health_of(manager, name).message for name in "abc"}
        assert f"{kept}; Kubernetes evicts the pod after goneEvictionDelay" in messages["a"]
        assert f"{kept}; if the device does not return, delete the pod" in messages["b"]
        assert messages["c"].endswith("its pods keep it")
        manager.replaced(DRIVER, Inventory(devices=[]))
        await pass_time(1)
        assert health_of(manager, "c").message == messages["a"], "now it is unplugged"


async def test_a_device_that_can_no_longer_be_published_does_not_evict_its_pods(node: Node):
    """The device still exists: its driver has a bug."""
    node.store.used = {NODE: {"a", "b"}}
    async with node.plugin() as manager:
        manager.replaced(DRIVER, evicting("a", "b", "c"))
        bad = Device(name="a", attributes={"no name": 1}, evict_if_gone=True)
        manager.replaced(DRIVER, Inventory(devices=[bad, Device(name="c"), Device(name=None)]))
        await pass_time(60)
        assert shown(manager.publication()) == {
            NODE: {"a": ["gone"], "b": ["gone:NoExecute"], "c": []}
        }


USB = f"{NODE}/usb"
BAD_VALUE = {"temperature": 40.5}


def lamp(pool: Any = "", **fields: Any) -> Device:
    return Device(name="a", pool=pool, evict_if_gone=True, **fields)


@pytest.mark.parametrize(
    ("listed", "evicted"),
    [
        pytest.param({"devices": [lamp("usb", attributes=BAD_VALUE)]}, {NODE}, id="a-value"),
        pytest.param({"devices": [lamp(5)]}, set(), id="a-pool-that-is-no-text"),
        pytest.param({"devices": [lamp("No Pool"), lamp("usb")]}, set(), id="a-malformed-pool"),
        pytest.param(
            {"devices": [], "fallback": [lamp(attributes=BAD_VALUE)]}, {USB}, id="in-the-fallback"
        ),
        pytest.param({"devices": [], "withdrawn": ["usb/a"]}, {NODE}, id="withdrawn-in-one-pool"),
        pytest.param({"devices": [], "withdrawn": ["a"]}, set(), id="withdrawn-in-all-pools"),
    ],
)
async def test_a_device_is_still_there_in_its_own_pool_and_in_any_list(
    node: Node, listed: dict[str, Any], evicted: set[str]
):
    node.store.used = {NODE: {"a"}, USB: {"a"}}
    both = [lamp(), lamp("usb")]
    fallback = both if "fallback" in listed else None
    async with node.plugin() as manager:
        manager.replaced(DRIVER, Inventory(devices=both, fallback=fallback))
        manager.replaced(DRIVER, Inventory(**listed))
        await pass_time(60)
        pools = shown(manager.publication())
        assert {name for name, each in pools.items() if "gone:NoExecute" in each["a"]} == evicted


async def test_a_device_that_its_own_process_finds_malformed_is_reported_as_any_other(node: Node):
    async with node.plugin() as manager:
        reports = [RejectedDevice(device="a", reason=each) for each in ("Invalid", "InUse")]
        manager.replaced(DRIVER, Inventory(devices=[Device(name="b")], rejected=reports))
        assert (dict(manager.rejected), manager.rejected_count) == ({"a": ""}, 1)
        assert [each.reason for each in manager.rejected_by_drivers] == ["InUse"]


async def test_a_device_that_vanishes_again_and_again_has_a_taint_of_the_last_time(node: Node):
    node.store.used = {NODE: {"a"}}
    async with node.plugin() as manager:
        for _ in range(3):
            manager.replaced(DRIVER, inventory("a", "b"))
            await pass_time(10)
            assert shown(manager.publication()) == {NODE: {"a": [], "b": []}}
            manager.replaced(DRIVER, inventory("b"))
            await pass_time(10)
        assert added_at(manager, "a") == int(node.epoch) + 50


async def test_a_pool_whose_devices_are_gone_goes_with_the_last_of_them(node: Node):
    node.store.used = {f"{NODE}/usb": {"a", "b"}}
    usb = [Device(name=name, pool="usb") for name in ("a", "b", "c")]
    async with node.plugin() as manager:
        manager.replaced(DRIVER, Inventory(devices=[*usb, Device(name="x")]))
        manager.replaced(DRIVER, inventory("x"))
        await pass_time(1)
        assert shown(manager.publication()) == {
            NODE: {"x": []},
            f"{NODE}/usb": {"a": ["gone"], "b": ["gone"]},
        }
        node.store.used = {f"{NODE}/usb": {"b"}}
        await pass_time(GONE_SECONDS)
        assert shown(manager.publication())[f"{NODE}/usb"] == {"b": ["gone"]}
        node.store.used = {}
        await pass_time(GONE_SECONDS)
        assert manager.publication().pools.keys() == {NODE}
        assert manager.publication().complete
        await pass_time(2)
        assert node.store.rows[DRIVER].pools == {NODE: ("x",)}


async def test_the_counter_sets_of_a_gone_partition_stay_as_long_as_it_does(node: Node):
    node.store.used = {NODE: {"part"}}
    counters = {"memory": "80Gi"}
    part = Device(name="part", consumes={"card": {"memory": "40Gi"}})
    async with node.plugin() as manager:
        card, other = (CounterSet(name=name, counters=counters) for name in ("card", "other"))
        manager.replaced(DRIVER, Inventory(devices=[part], counter_sets=[card, other]))
        manager.replaced(DRIVER, inventory("x"))
        await pass_time(1)
        assert manager.publication().pools[NODE].counter_sets == (card,)
        node.store.used = {}
        await pass_time(GONE_SECONDS)
        assert manager.publication().pools[NODE].counter_sets == ()


async def test_while_the_checkpoint_cannot_be_read_nothing_goes(node: Node, caplog):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        await pass_time(2)
        node.store.error = CheckpointError("no disk")
        manager.replaced(DRIVER, inventory("b"))
        await pass_time(60)
        assert shown(manager.publication()) == {NODE: {"a": ["gone"], "b": []}}
        problem = "devices that are gone stay published: the checkpoint cannot be read"
        assert [record.message for record in caplog.records].count(problem) == 1
        node.store.error = None
        await pass_time(GONE_SECONDS)
        assert shown(manager.publication()) == {NODE: {"b": []}}


def shared(*names: str, users: int = 2) -> Inventory:
    """Return devices of which claims share the capacity; copies of them are the fallback."""
    capacity = {"users": Capacity(value=str(users), default="1")}
    return Inventory(
        devices=[Device(name=n, allow_multiple_allocations=True, capacity=capacity) for n in names],
        fallback=[Device(name=f"{name}-{user}") for name in names for user in range(users)],
    )


@pytest.mark.parametrize("held", [(), ("kvm-1",)], ids=["free", "held"])
@pytest.mark.parametrize(
    "after",
    [
        pytest.param(shared("tun"), id="one-of-two-devices"),
        pytest.param(shared("kvm", "tun", users=1), id="fewer-users"),
        pytest.param(shared(), id="all-devices"),
        pytest.param(inventory("kvm", "tun"), id="without-fallback"),
        pytest.param(inventory(), id="all-devices-and-the-fallback"),
    ],
)
async def test_devices_vanish_that_only_the_fallback_had(
    node: Node, after: Inventory, held: Collection[str]
):
    node.store.used = {NODE: {*held}}
    async with node.plugin() as manager:
        manager.replaced(DRIVER, shared("kvm", "tun"))
        await pass_time(5)
        manager.replaced(DRIVER, after)
        assert manager.publication().pools.keys() == {NODE}
        await pass_time(5)
        pool = manager.publication().pools[NODE]
        assert {each.name for each in pool.devices} == {each.name for each in after.devices} | {
            *held
        }
        if after.fallback is not None:
            listed = {each.name for each in after.fallback}
            assert {each.name for each in pool.fallback or ()} == listed | {*held}
        assert not manager.rejected
    async with node.plugin() as manager:
        await pass_time(SETTINGS.start_grace_period + 1)  # the driver does not return in time
        assert {*held} <= {each.name for each in manager.publication().pools[NODE].devices}


@pytest.mark.parametrize("held", [(), ("kvm",)], ids=["free", "held"])
async def test_a_held_device_that_only_the_other_inventory_lists_stays_as_it_was(
    node: Node, held: Collection[str]
):
    def fallback(manager) -> list[tuple[str, bool, list[str]]]:
        devices = manager.publication().pools[NODE].fallback or ()
        return [(d.name, d.device == Device(name="kvm"), taint_words(d.taints)) for d in devices]

    copies = [("kvm-0", False, []), ("kvm-1", False, [])]
    kept = [("kvm", True, ["gone"])] if held else []
    node.store.used = {NODE: {*held}}
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("kvm"))
        manager.set_in_use(node.store.used)
        await pass_time(5)
        for _ in range(2):  # a driver may list its devices again
            manager.replaced(DRIVER, shared("kvm"))
            await pass_time(GONE_SECONDS)
            assert sorted(fallback(manager)) == sorted(kept + copies)
        assert shown(manager.publication()) == {NODE: {"kvm": []}}, "the inventory lists it"
    async with node.plugin() as manager:
        manager.set_in_use(node.store.used)
        manager.replaced(DRIVER, shared("kvm"))
        await pass_time(GONE_SECONDS)
        assert sorted(fallback(manager)) == sorted(kept + copies)
        node.store.used = {}
        manager.set_in_use({})
        await pass_time(GONE_SECONDS)
        assert sorted(fallback(manager)) == copies


async def test_a_device_that_leaves_one_inventory_is_still_evicted_once_it_is_gone(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, evicting("kvm"))
        manager.replaced(DRIVER, replace(evicting("kvm"), fallback=shared("kvm").fallback))
        await pass_time(GONE_SECONDS)
        node.store.used = {NODE: {"kvm"}}
        manager.replaced(DRIVER, replace(inventory(), fallback=shared("kvm").fallback))
        await pass_time(DELAY + GONE_SECONDS)
        assert shown(manager.publication()) == {NODE: {"kvm": ["gone:NoExecute"]}}


async def test_the_copy_of_a_held_device_follows_the_inventory_that_lists_it(node: Node):
    held = {NODE: {"kvm-0"}}
    node.store.used = held
    async with node.plugin() as manager:
        manager.replaced(DRIVER, shared("kvm"))
        manager.set_in_use(held)
        assert shown(manager.publication()) == {NODE: {"kvm": [], "kvm-0": ["gone"]}}
        copies = [Device(name="kvm-0", attributes={"model": "b"})]
        manager.replaced(DRIVER, replace(shared("kvm"), fallback=copies))
        devices = manager.publication().pools[NODE].devices
        assert [each.device for each in devices if each.name == "kvm-0"] == copies
        node.store.used = {}
        manager.set_in_use({})
        await pass_time(GONE_SECONDS)
        assert shown(manager.publication()) == {NODE: {"kvm": []}}


async def test_an_answer_from_before_a_device_vanished_does_not_let_it_go(node: Node):
    answers: asyncio.Queue[dict[str, frozenset[str]]] = asyncio.Queue()
    node.store.devices_in_use = answers.get
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        manager.replaced(DRIVER, inventory("b"))
        await pass_time(0)  # a question about "a" is on its way
        manager.replaced(DRIVER, Inventory(devices=[]))
        answers.put_nowait({})
        await pass_time(0)
        assert shown(manager.publication()) == {NODE: {"b": ["gone"]}}
        answers.put_nowait({NODE: frozenset({"b"})})
        await pass_time(GONE_SECONDS)
        assert shown(manager.publication()) == {NODE: {"b": ["gone"]}}


# ------------------------------------------------------------ over restarts


@pytest.mark.parametrize(
    ("listing", "word"),
    [
        pytest.param(inventory, "gone", id="NoSchedule"),
        pytest.param(evicting, "gone:NoExecute", id="NoExecute"),
    ],
)
async def test_a_restart_keeps_a_gone_device_as_it_is(node: Node, listing, word):
    node.store.used = {NODE: {"a"}}
    async with node.plugin() as manager:
        manager.replaced(DRIVER, listing("a", "b"))
        await pass_time(5)
        manager.replaced(DRIVER, listing("b"))
        await pass_time(DELAY + 5)
        since = added_at(manager, "a")
    writes = node.store.writes
    async with node.plugin() as manager:
        assert manager.publication().held == {NODE}
        taint = ("drakit.dev/gone", "NoExecute" if "NoExecute" in word else "NoSchedule")
        manager.adopt({(NODE, "a"): {taint: since}})
        await pass_time(10)
        manager.replaced(DRIVER, listing("b"))
        await pass_time(10)
        assert shown(manager.publication()) == {NODE: {"a": [word], "b": []}}
        assert added_at(manager, "a") == since
        assert node.store.writes == writes, "a restart without a change writes nothing"
        manager.replaced(DRIVER, listing("a", "b"))
        await pass_time(1)
        assert shown(manager.publication()) == {NODE: {"a": [], "b": []}}


async def test_after_a_restart_the_attributes_of_a_gone_device_are_known(node: Node):
    """The claim is prepared again, and its container reads the attributes in a metadata file."""
    front = Device(name="a", attributes={"model": "x"})
    node.store.used = {NODE: {"a"}}
    async with node.plugin() as manager:
        manager.set_in_use(node.store.used)
        manager.replaced(DRIVER, Inventory(devices=[front]))
        await pass_time(5)
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("b"))
        assert manager.device(NODE, "a") == front


async def test_a_restart_within_the_delay_begins_it_again_and_forgets_nothing(node: Node):
    node.store.used = {NODE: {"a", "b"}}
    async with node.plugin() as manager:
        manager.replaced(DRIVER, evicting("a", "b", "c"))
        await pass_time(5)
        manager.replaced(DRIVER, evicting("c"))
        since = added_at(manager, "a")
        await pass_time(DELAY - 1)
    for _ in range(2):
        async with node.plugin() as manager:
            manager.adopt({(NODE, name): published("gone", at=since) for name in ("a", "b")})
            await pass_time(2)
            manager.replaced(DRIVER, evicting("b", "c"))
            await pass_time(DELAY - 1)
            assert shown(manager.publication()) == {NODE: {"a": ["gone"], "b": [], "c": []}}
            assert added_at(manager, "a") == since
    async with node.plugin() as manager:
        manager.adopt({(NODE, "a"): published("gone", at=since)})
        manager.replaced(DRIVER, evicting("b", "c"))
        await pass_time(DELAY)
        assert shown(manager.publication())[NODE] == {"a": ["gone:NoExecute"], "b": [], "c": []}


async def test_a_driver_that_does_not_return_leaves_its_gone_devices_gone(node: Node):
    node.store.used = {NODE: {"a"}}
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        manager.replaced(DRIVER, inventory("b"))
        await pass_time(5)
        manager.stopped(DRIVER, "it ended")
        assert shown(manager.publication()) == {NODE: {"a": ["stopped", "gone"], "b": ["stopped"]}}
        await pass_time(5)
    async with node.plugin() as manager:
        await pass_time(31)
        assert shown(manager.publication()) == {NODE: {"a": ["stopped", "gone"], "b": ["stopped"]}}
        node.store.used = {}
        await pass_time(GONE_SECONDS)
        assert shown(manager.publication()) == {NODE: {"b": ["stopped"]}}
        await pass_time(300)
        assert manager.capacity().inactive == {NODE}


async def test_the_counter_set_of_a_partition_that_vanished_during_a_restart_stays(node: Node):
    """The plugin knows only the partition's name, so it keeps all published counter sets."""
    node.store.used = {NODE: {"part"}}
    card, other = (CounterSet(name=name, counters={"memory": "80Gi"}) for name in ("card", "other"))
    part = Device(name="part", consumes={"card": {"memory": "40Gi"}})
    async with node.plugin() as manager:
        manager.replaced(DRIVER, Inventory(devices=[part], counter_sets=[card]))
        await pass_time(2)
    async with node.plugin() as manager:
        manager.replaced(DRIVER, Inventory(devices=[Device(name="x")], counter_sets=[other]))
        await pass_time(1)
        found = manager.publication().pools[NODE]
        assert {device.name for device in found.devices} == {"part", "x"}
        assert (found.counter_sets, found.keeps_counter_sets) == ((other,), True)
        node.store.used = {}
        await pass_time(GONE_SECONDS)
        assert not manager.publication().pools[NODE].keeps_counter_sets


async def test_a_claim_that_was_released_during_a_restart_lets_its_device_go(node: Node):
    node.store.used = {NODE: {"a"}}
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        manager.replaced(DRIVER, inventory("b"))
        await pass_time(5)
    node.store.used = {}
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("b"))
        await pass_time(1)
        assert shown(manager.publication()) == {NODE: {"b": []}}


@pytest.mark.parametrize(
    ("effect", "word"),
    [
        pytest.param("NoSchedule", "gone", id="NoSchedule"),
        pytest.param("NoExecute", "gone:NoExecute", id="NoExecute"),
    ],
)
async def test_after_the_loss_of_the_checkpoint_published_slices_name_gone_devices(
    node: Node, effect, word
):
    node.store.used = {NODE: {"a"}}  # rebuilt from the node
    async with node.plugin() as manager:
        manager.adopt(
            {
                (NODE, "a"): {("drakit.dev/gone", effect): 17},
                (NODE, "free"): {("drakit.dev/gone", effect): 17},
                (NODE, "other"): published("stopped"),
            }
        )
        manager.replaced(DRIVER, inventory("b"))
        await pass_time(1)
        assert shown(manager.publication()) == {NODE: {"a": [word], "b": []}}
        assert added_at(manager, "a") == 17


# ------------------------------------------------------------ several endpoints


async def test_a_gone_device_of_a_device_plugin_stays_in_its_own_pool(node: Node):
    node.store.used = {f"{NODE}/one": {"a"}}
    async with node.plugin("any", endpoints=()) as manager:
        for name in ("one", "two"):
            devices = [Device(name=each, pool=name) for each in ("a", "b")]
            manager.replaced(name, Inventory(devices=devices))
        await pass_time(1)
        manager.replaced("one", Inventory(devices=[]))
        await pass_time(1)
        assert shown(manager.publication()) == {
            f"{NODE}/one": {"a": ["gone"]},
            f"{NODE}/two": {"a": [], "b": []},
        }
        assert manager.hardware() is None
        assert manager.is_gone(f"{NODE}/one", "a")
        assert not manager.is_gone(f"{NODE}/two", "a")
        node.store.used = {}
        await pass_time(GONE_SECONDS)
        assert shown(manager.publication())[f"{NODE}/one"] == {}


async def test_the_pool_of_another_endpoint_replaces_one_whose_devices_are_all_gone(node: Node):
    node.store.used = {f"{NODE}/one": {"a"}}
    one = Inventory(devices=[Device(name="a", pool="one")])
    async with node.plugin("any", endpoints=()) as manager:
        manager.replaced("first", one)
        await pass_time(1)
        manager.replaced("first", Inventory(devices=[]))
        await pass_time(1)
        manager.replaced("second", one)
        await pass_time(1)
        assert shown(manager.publication()) == {f"{NODE}/one": {"a": []}}
        assert not manager.is_gone(f"{NODE}/one", "a")
