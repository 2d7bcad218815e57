"""The state of devices after reports, as the publisher and the kubelet see it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from drakit import Device, Health
from drakit.device import CounterSet, Inventory, Taint
from drakit_driver.runtime.contract import DeviceKey, HealthReport
from drakit_nodeplugin.config import DeviceHealthSettings
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.devices.pool_state import PoolState
from drakit_nodeplugin.state.holds import HeldDevice
from drakit_nodeplugin.state.records import StoredEndpoint
from tests.unit.devices.conftest import (
    DRIVER,
    NODE,
    SETTINGS,
    Node,
    cameras,
    inventory,
    pass_time,
    published,
    report,
    shown,
    taint_words,
)

pytestmark = pytest.mark.looptime

OK = Health.healthy()
BAD = Health.unhealthy("too hot")
BROKEN = Health.unhealthy("off the bus", evict_pods=True)
NOBODY = Health.unknown("it does not answer")


def unpreparing(*names: str, pool: str = NODE) -> list[HeldDevice]:
    return [HeldDevice(pool=pool, device=n, consumes={}, unpreparing=True) for n in names]


def health_of(manager: DeviceManager) -> Mapping[str, tuple[str, str]]:
    return {state.device: (state.status, state.message) for state in manager.health_states()}


# ------------------------------------------------------------ health


@pytest.mark.looptime(False)  # a loop's virtual time stands still within a turn
async def test_devices_that_recover_one_shortly_after_the_other_are_all_untainted(node: Node):
    names = [f"dev-{number}" for number in range(400)]
    health = DeviceHealthSettings(recovery_period=0.3, eviction_delay=1.0, timeout=30.0)
    settings = SETTINGS.model_copy(update={"health": health, "start_grace_period": 0.1})
    async with node.plugin(settings=settings) as manager:
        manager.replaced(DRIVER, inventory(*names))
        manager.reported(DRIVER, report(**dict.fromkeys(names, BAD)))
        await asyncio.sleep(0.4)
        for name in names:
            manager.reported(DRIVER, report(**{name: OK}))
        async with asyncio.timeout(10):
            while any(shown(manager.publication())[NODE].values()):
                await asyncio.sleep(0.05)


async def test_a_device_in_bad_health_is_tainted_and_untainted_after_its_recovery(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        assert health_of(manager) == {"a": ("unknown", ""), "b": ("unknown", "")}
        manager.reported(DRIVER, report(a=OK, b=OK))
        assert health_of(manager) == {"a": ("healthy", ""), "b": ("healthy", "")}
        await pass_time(5)
        manager.reported(DRIVER, report(a=BAD))
        assert shown(manager.publication()) == {NODE: {"a": ["unhealthy"], "b": []}}
        assert health_of(manager) == {"a": ("unhealthy", "too hot"), "b": ("healthy", "")}
        assert manager.capacity().pools[NODE].unhealthy == {"a"}
        await pass_time(5)
        manager.reported(DRIVER, report(a=OK))
        await pass_time(29)
        assert shown(manager.publication()) == {NODE: {"a": ["unhealthy"], "b": []}}
        assert health_of(manager)["a"] == ("unhealthy", "too hot")
        seen = manager.revision.number
        await pass_time(1)
        assert shown(manager.publication()) == {NODE: {"a": [], "b": []}}
        assert health_of(manager)["a"] == ("healthy", "")
        assert manager.revision.number > seen


async def test_a_device_that_stays_broken_is_evicted(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a"))
        manager.reported(DRIVER, report(a=BROKEN))
        await pass_time(9)
        assert shown(manager.publication()) == {NODE: {"a": ["unhealthy"]}}
        await pass_time(1)
        assert shown(manager.publication()) == {NODE: {"a": ["unhealthy", "unhealthy:NoExecute"]}}
        (device,) = manager.publication().pools[NODE].devices
        assert [taint.added_at - int(node.epoch) for taint in device.taints] == [0, 10]
        manager.reported(DRIVER, report(a=OK))
        await pass_time(30)
        assert shown(manager.publication()) == {NODE: {"a": []}}


async def test_a_device_that_flaps_changes_what_is_published_twice(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a"))
        seen = [manager.publication()]
        for number in range(100):
            manager.reported(DRIVER, report(a=OK if number % 2 else BAD))
            await asyncio.sleep(5)
            seen.append(manager.publication())
        await pass_time(30)
        seen.append(manager.publication())
        turns = [one != other for one, other in pairwise(seen)]
        assert sum(turns) == 2
        assert manager.revision.number <= 5


async def test_health_in_an_inventory_counts_when_it_is_new(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", health=OK))
        await pass_time(1)
        manager.reported(DRIVER, report(a=BAD))
        await pass_time(1)
        # It has nothing new on this device: the last report counts.
        manager.replaced(DRIVER, Inventory(devices=[*cameras("a", health=OK), *cameras("b")]))
        await pass_time(60)
        assert shown(manager.publication()) == {NODE: {"a": ["unhealthy"], "b": []}}
        manager.replaced(DRIVER, Inventory(devices=cameras("a", "b", health=BAD)))
        assert health_of(manager)["b"] == ("unhealthy", "too hot")
        await pass_time(1)
        manager.replaced(DRIVER, Inventory(devices=cameras("a", "b", health=OK)))
        await pass_time(31)
        assert shown(manager.publication()) == {NODE: {"a": [], "b": []}}


async def test_health_in_an_inventory_is_no_other_device(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", health=OK))
        await pass_time(1)
        before = manager.publication()
        manager.replaced(DRIVER, inventory("a", health=Health("healthy", "24 degrees")))
        assert manager.publication() is before
        assert health_of(manager)["a"] == ("healthy", "24 degrees")


async def test_a_device_that_was_unhealthy_is_so_after_its_driver_has_restarted(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        manager.reported(DRIVER, report(a=BAD, b=OK))
        await pass_time(1)
        manager.stopped(DRIVER, "it ended")
        assert shown(manager.publication()) == {
            NODE: {"a": ["stopped", "unhealthy"], "b": ["stopped"]}
        }
        assert health_of(manager)["b"] == ("unknown", "the driver is unavailable: it ended")
        await pass_time(60)
        manager.replaced(DRIVER, inventory("a", "b"))
        await pass_time(60)
        assert shown(manager.publication()) == {NODE: {"a": ["unhealthy"], "b": []}}
        assert health_of(manager) == {"a": ("unhealthy", "too hot"), "b": ("unknown", "")}
        manager.reported(DRIVER, report(a=OK))
        await pass_time(30)
        assert shown(manager.publication()) == {NODE: {"a": [], "b": []}}


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(DeviceKey("", "stranger"), id="a-device-that-is-not-there"),
        pytest.param(DeviceKey("strange", "a"), id="a-pool-that-is-not-there"),
    ],
)
async def test_a_report_on_what_is_not_there_is_ignored(node: Node, key: DeviceKey):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a"))
        seen = manager.revision.number
        manager.reported(DRIVER, HealthReport(devices={key: BAD}))
        assert manager.revision.number == seen
        assert shown(manager.publication()) == {NODE: {"a": []}}


async def test_devices_of_pools_that_no_node_owns_have_health_while_the_endpoint_is_available(
    node: Node,
):
    ports = {DeviceKey("fabric", "port-1"): BAD, DeviceKey("mesh", "port-2"): OK}

    def reported(manager: DeviceManager) -> set[tuple[str, str, str, str]]:
        states = manager.health_states()
        return {(each.pool, each.device, each.status, each.message) for each in states}

    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a"))
        # The name of an own pool is not the name of a foreign one.
        own = {DeviceKey(NODE, "a"): BAD}
        manager.reported(DRIVER, HealthReport(devices={}, unlisted=ports | own))
        listed = (NODE, "a", "unknown", "")
        expected = {
            listed,
            ("fabric", "port-1", "unhealthy", BAD.message),
            ("mesh", "port-2", "healthy", ""),
        }
        assert reported(manager) == expected
        seen = manager.revision.number
        manager.reported(DRIVER, HealthReport(devices={}, unlisted=ports))
        assert manager.revision.number == seen
        assert shown(manager.publication()) == {NODE: {"a": []}}

        manager.stopped(DRIVER, "it ended")
        assert {each.pool for each in manager.health_states()} == {NODE}
        manager.replaced(DRIVER, inventory("a"))
        assert reported(manager) == {listed}


async def test_an_unhealthy_device_is_so_after_a_restart_of_the_plugin(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b", "c"))
        manager.reported(DRIVER, report(a=BAD, b=BROKEN, c=OK))
        await pass_time(11)
        before = manager.publication()
    async with node.plugin() as manager:
        # Whether the publisher has listed or the driver was polled first does not matter.
        evicting = published("unhealthy", "unhealthy:NoExecute")
        manager.adopt(
            {
                (NODE, "a"): published("unhealthy"),
                (NODE, "b"): evicting,
                (NODE, "gone"): published("unhealthy"),
            }
        )
        manager.replaced(DRIVER, inventory("a", "b", "c"))
        assert shown(manager.publication()) == shown(before)
        assert health_of(manager)["a"][0] == "unhealthy"
        manager.reported(DRIVER, report(a=OK, b=BROKEN, c=OK))
        assert shown(manager.publication()) == shown(before)
        await pass_time(30)
        assert shown(manager.publication()) == {
            NODE: {"a": [], "b": ["unhealthy", "unhealthy:NoExecute"], "c": []}
        }


@pytest.mark.parametrize(
    "recovery",
    [pytest.param(30.0, id="a-minute-at-least"), pytest.param(90.0, id="longer-where-recovery-is")],
)
async def test_a_taint_from_before_a_restart_ends_if_its_driver_does_not_report_the_device(
    node: Node, recovery: float
):
    health = SETTINGS.health.model_copy(update={"recovery_period": recovery})
    due = max(60, recovery)
    async with node.plugin(settings=SETTINGS.model_copy(update={"health": health})) as manager:
        evicting = published("unhealthy", "unhealthy:NoExecute")
        manager.adopt({(NODE, name): evicting for name in ("silent", "unsure", "bad")})
        await pass_time(20)
        manager.replaced(DRIVER, inventory("silent", "unsure", "bad"))
        manager.reported(DRIVER, report(unsure=Health.unknown()))
        await pass_time(due - 1)
        manager.reported(DRIVER, report(bad=BAD))
        tainted = ["unhealthy", "unhealthy:NoExecute"]
        assert shown(manager.publication()) == {
            NODE: {"silent": tainted, "unsure": tainted, "bad": tainted}
        }
        await pass_time(1)
        assert shown(manager.publication()) == {
            NODE: {"silent": [], "unsure": tainted, "bad": tainted}
        }
        assert health_of(manager)["silent"] == ("unknown", "")
        await pass_time(1000)
        assert shown(manager.publication())[NODE]["unsure"] == tainted


async def test_a_report_before_the_slices_were_read_counts(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("unsure", "silent"))
        manager.reported(DRIVER, report(unsure=Health.unknown()))
        await pass_time(5)
        before = published("unhealthy")
        manager.adopt({(NODE, "unsure"): before, (NODE, "silent"): before})
        await pass_time(65)
        assert shown(manager.publication()) == {NODE: {"unsure": ["unhealthy"], "silent": []}}


LENS = Taint(key="camera.example.com/lens", effect="NoSchedule", value="dirty")
LENS_BEFORE = {(LENS.key, LENS.effect): 7}


def since(manager: DeviceManager) -> Mapping[str, Mapping[str, int]]:
    """Return the times of the taints of each device in the node's pool."""
    return {
        device.name: {
            word: taint.added_at
            for word, taint in zip(taint_words(device.taints), device.taints, strict=True)
        }
        for device in manager.publication().pools[NODE].devices
    }


@pytest.mark.parametrize(
    "order",
    [
        pytest.param("listed first", id="the-driver-is-there-before-the-slices-are-read"),
        pytest.param("adopted first", id="the-slices-are-read-before-the-driver-is-there"),
    ],
)
@pytest.mark.parametrize("known", [pytest.param(True, id="known"), pytest.param(False, id="new")])
async def test_taints_keep_over_a_restart_the_times_that_were_published(
    node: Node, order: str, known: bool
):
    if known:
        node.store.rows[DRIVER] = StoredEndpoint(name=DRIVER, pools={NODE: ("a", "b")})
    worse = Taint(key=LENS.key, effect=LENS.effect, value="broken")
    listed = Inventory(devices=[Device(name="a", taints=(worse,)), *cameras("b")])
    before = {
        (NODE, "a"): LENS_BEFORE | published("unhealthy", at=8),
        (NODE, "b"): published("unhealthy", "unhealthy:NoExecute", at=9),
    }
    async with node.plugin() as manager:
        if order == "listed first":
            manager.replaced(DRIVER, listed)
            manager.adopt(before)
        else:
            manager.adopt(before)
            manager.replaced(DRIVER, listed)
        assert since(manager) == {
            "a": {LENS.key: 7, "unhealthy": 8},
            "b": {"unhealthy": 9, "unhealthy:NoExecute": 9},
        }


async def test_a_taint_that_went_after_a_restart_returns_as_a_new_one(node: Node):
    async with node.plugin() as manager:
        manager.adopt({(NODE, "a"): LENS_BEFORE})
        manager.replaced(DRIVER, inventory("a"))
        await pass_time(5)
        manager.replaced(DRIVER, Inventory(devices=[Device(name="a", taints=(LENS,))]))
        assert since(manager) == {"a": {LENS.key: int(node.epoch) + 5}}


async def test_taints_of_a_driver_that_is_missing_after_a_restart_keep_their_times(node: Node):
    node.store.rows[DRIVER] = StoredEndpoint(name=DRIVER, pools={NODE: ("a",)})
    async with node.plugin() as manager:
        manager.adopt({(NODE, "a"): LENS_BEFORE | published("stopped", at=8)})
        await pass_time(40)
        assert since(manager) == {"a": {"stopped": 8}}
        manager.replaced(DRIVER, Inventory(devices=[Device(name="a", taints=(LENS,))]))
        assert since(manager) == {"a": {LENS.key: 7}}
        manager.stopped(DRIVER, "it ended")
        assert since(manager) == {"a": {LENS.key: 7, "stopped": int(node.epoch) + 40}}


async def test_a_time_that_was_not_published_is_that_of_the_restart(node: Node):
    async with node.plugin() as manager:
        manager.adopt({(NODE, "a"): published("unhealthy", at=None)})
        manager.replaced(DRIVER, inventory("a"))
        assert since(manager) == {"a": {"unhealthy": int(node.epoch)}}


# ------------------------------------------------------------ fallbacks


async def test_devices_of_a_fallback_alone_are_tainted_as_others_are(node: Node):
    def whole(health: Health | None = None) -> Inventory:
        return Inventory(devices=cameras("part"), fallback=cameras("whole", health=health))

    def fallback(manager: DeviceManager) -> list[str]:
        (device,) = manager.publication().pools[NODE].fallback or ()
        return taint_words(device.taints)

    async with node.plugin() as manager:
        manager.adopt({(NODE, "whole"): published("unhealthy", at=8)})
        manager.replaced(DRIVER, whole())
        assert fallback(manager) == ["unhealthy"]
        await pass_time(1)
        manager.replaced(DRIVER, whole(OK))
        await pass_time(31)
        assert fallback(manager) == []
        manager.set_unpreparing(unpreparing("whole"))
        assert fallback(manager) == ["unpreparing"]
        manager.set_unpreparing(())
        manager.reported(DRIVER, report(whole=BAD))
        assert fallback(manager) == ["unhealthy"]


# ------------------------------------------------------------ other taints


async def test_a_drivers_own_taint_keeps_its_time(node: Node):
    async with node.plugin() as manager:
        for number in range(2):
            lensed = Device(name="a", attributes={"n": number}, taints=(LENS,))
            manager.replaced(DRIVER, Inventory(devices=[lensed]))
            await pass_time(10)
        assert since(manager) == {"a": {LENS.key: int(node.epoch)}}


async def test_devices_that_are_being_unprepared_are_tainted_while_they_are(node: Node):
    async with node.plugin() as manager:
        manager.set_unpreparing(unpreparing("c", "a"))
        manager.replaced(DRIVER, inventory("a", "b"))
        assert shown(manager.publication()) == {NODE: {"a": ["unpreparing"], "b": []}}
        assert health_of(manager)["a"] == ("unknown", "")
        manager.set_unpreparing([*unpreparing("b"), *unpreparing("b", pool="elsewhere")])
        assert shown(manager.publication()) == {NODE: {"a": [], "b": ["unpreparing"]}}
        seen = manager.revision.number
        manager.set_unpreparing(unpreparing("b"))
        assert manager.revision.number == seen
        manager.set_unpreparing(())
        assert shown(manager.publication()) == {NODE: {"a": [], "b": []}}


async def test_devices_in_maintenance_are_tainted_and_stay_so_over_a_restart(node: Node):
    devices = frozenset({(NODE, "a"), ("elsewhere", "b")})
    async with node.plugin() as manager:
        manager.set_maintenance(devices)
        manager.replaced(DRIVER, inventory("a", "b"))
        assert shown(manager.publication()) == {NODE: {"a": ["maintenance"], "b": []}}
        assert health_of(manager)["a"] == ("unknown", ""), "its health stays that of its driver"
        seen = manager.revision.number
        manager.set_maintenance(frozenset(devices))
        assert manager.revision.number == seen
    async with node.plugin() as manager:
        manager.set_maintenance(None)  # the API server has not answered yet
        manager.adopt({(NODE, "a"): published("maintenance", at=17)})
        manager.replaced(DRIVER, inventory("a", "b"))
        assert shown(manager.publication()) == {NODE: {"a": ["maintenance"], "b": []}}
        assert since(manager)["a"] == {"maintenance": 17}
        manager.replaced(DRIVER, inventory("a", "b", "c"))
        assert shown(manager.publication())[NODE]["a"] == ["maintenance"]
        manager.set_maintenance(frozenset())
        assert shown(manager.publication()) == {NODE: {"a": [], "b": [], "c": []}}


async def test_no_device_gets_more_taints_than_the_api_allows(node: Node):
    own = tuple(Taint(key=f"lab.test/{number}", effect="None") for number in range(12))
    async with node.plugin() as manager:
        manager.set_maintenance(frozenset({(NODE, "a")}))
        manager.set_unpreparing(unpreparing("a"))
        manager.replaced(DRIVER, Inventory(devices=[Device(name="a", taints=own)]))
        manager.reported(DRIVER, report(a=BROKEN))
        await pass_time(11)
        manager.stopped(DRIVER, "crashed")
        (device,) = manager.publication().pools[NODE].devices
        assert len(device.taints) == 16
        assert "maintenance" in taint_words(device.taints)


# ------------------------------------------------------------ inventories


async def test_what_is_equal_stays_the_same_object(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        await pass_time(1)
        seen, before = manager.revision.number, manager.publication()
        states = manager.health_states()
        manager.replaced(DRIVER, inventory("a", "b"))
        assert manager.revision.number == seen
        assert manager.publication() is before
        assert manager.health_states() is states
        manager.replaced(DRIVER, inventory("a", "b", "c"))
        after = manager.publication().pools[NODE].devices
        assert all(new is old for new, old in zip(after, before.pools[NODE].devices, strict=False))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(1, True, id="a-value"),
        pytest.param((1, 0), (True, False), id="values-of-a-list"),
    ],
)
async def test_an_attribute_of_another_type_is_a_change(node: Node, old, new):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, Inventory(devices=[Device(name="a", attributes={"n": old})]))
        await pass_time(1)
        manager.replaced(DRIVER, Inventory(devices=[Device(name="a", attributes={"n": new})]))
        (device,) = manager.publication().pools[NODE].devices
        assert device.device is not None
        assert repr(device.device.attributes["n"]) == repr(new)


async def test_pools_counters_and_fallbacks_are_passed_on(node: Node):
    gpu = CounterSet(name="gpu-0", counters={"memory": "80Gi"}, pool="gpus")
    partition = Device(name="part-0", pool="gpus", consumes={"gpu-0": {"memory": "40Gi"}})
    whole = Device(name="whole-0", pool="gpus", health=BAD)
    camera = Device(name="cam-0")
    async with node.plugin() as manager:
        manager.replaced(
            DRIVER,
            Inventory(devices=[partition, camera], counter_sets=[gpu], fallback=[whole]),
        )
        published = manager.publication()
        gpus = published.pools[f"{NODE}/gpus"]
        assert [device.device for device in gpus.devices] == [partition]
        assert gpus.counter_sets == (gpu,)
        assert gpus.fallback is not None
        assert [(d.device, taint_words(d.taints)) for d in gpus.fallback] == [
            (whole, ["unhealthy"])
        ]
        assert published.pools[NODE].counter_sets == ()
        assert published.pools[NODE].fallback == ()
        await pass_time(1)
        manager.replaced(DRIVER, Inventory(devices=[camera]))
        await pass_time(0)
        assert manager.publication().pools.keys() == {NODE}
        assert manager.publication().pools[NODE].fallback is None


async def test_a_driver_without_devices_has_an_empty_pool(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, Inventory(devices=[]))
        assert shown(manager.publication()) == {NODE: {}}
        assert manager.publication().complete


async def test_bad_devices_are_rejected_and_reported_once(node: Node, caplog):
    caplog.set_level(logging.ERROR)
    async with node.plugin() as manager:
        bad = [Device(name="No_Name"), Device(name="a", attributes={"1 2": 3}), Device(name="b")]
        manager.replaced(DRIVER, Inventory(devices=[*cameras("b"), *bad]))
        assert shown(manager.publication()) == {NODE: {"b": []}}
        assert manager.rejected_count == 3
        await pass_time(1)
        manager.replaced(DRIVER, Inventory(devices=[*cameras("b", "c"), *bad]))
        assert shown(manager.publication()) == {NODE: {"b": [], "c": []}}
        await pass_time(1)
        manager.replaced(DRIVER, inventory("a", "b"))
        assert manager.rejected_count == 0
    assert len(node.rejected) == 1
    assert node.rejected[0].keys() == {"No_Name", "a", "b"}
    rejected = [record for record in caplog.records if record.msg == "device is rejected"]
    assert [record.__dict__["device"] for record in rejected] == ["No_Name", "a", "b"]


async def test_two_endpoints_cannot_have_one_pool(node: Node):
    async with node.plugin("one", "two") as manager:
        manager.replaced("one", inventory("a"))
        manager.replaced("two", Inventory(devices=[*cameras("b"), *cameras("c", pool="cs")]))
        assert shown(manager.publication()) == {NODE: {"a": []}, f"{NODE}/cs": {"c": []}}
        assert [*map(list, node.rejected)] == [[NODE]]
        manager.stopped("two", "it ended")
        assert manager.stop_reason == "it ended"
        assert shown(manager.publication()) == {NODE: {"a": []}, f"{NODE}/cs": {"c": ["stopped"]}}


class Unequal:
    """A vendor's value that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(Device(name="x", attributes={"n": Unequal()}), id="attribute"),  # type: ignore[dict-item]
        pytest.param(Device(name="x", capacity=Unequal()), id="capacity"),  # type: ignore[arg-type]
        pytest.param(Unequal(), id="device"),
    ],
)
async def test_nonsense_costs_the_device_at_most(node: Node, device: Any):
    async with node.plugin() as manager:
        for number in range(3):
            manager.replaced(DRIVER, Inventory(devices=[*cameras(f"a-{number}"), device]))
            await pass_time(1)
            assert f"a-{number}" in shown(manager.publication())[NODE]


@pytest.mark.parametrize("step", ["replace", "refresh", "desired", "settle"])
async def test_an_error_in_one_pool_leaves_the_others_alone_and_is_reported(
    node: Node, monkeypatch: pytest.MonkeyPatch, step: str
):
    bad, works = f"{NODE}/bad", getattr(PoolState, step)

    def fails(pool: PoolState, *arguments: Any, **options: Any) -> Any:
        if pool.name == bad:
            raise KeyError("a bug")
        return works(pool, *arguments, **options)

    def listed(*names: str) -> Inventory:
        return Inventory(devices=[*cameras(*names), *cameras("x", pool="bad")])

    async with node.plugin() as manager:
        manager.replaced(DRIVER, listed("a"))
        manager.publication()
        monkeypatch.setattr(PoolState, step, fails)
        manager.replaced(DRIVER, listed("a", "b"))
        manager.publication()
        await pass_time(1)
        publication = manager.publication()
        assert shown(publication) == {NODE: {"a": [], "b": []}}
        assert publication.held == {bad}, "its slices stay as they are"
        assert manager.rejected_count == 1
        (told,) = node.rejected
        assert "an internal error of the node plugin" in told[bad]
        monkeypatch.undo()
        manager.replaced(DRIVER, listed("b"))
        await pass_time(1)
        assert shown(manager.publication()) == {NODE: {"b": []}, bad: {"x": []}}
        assert not manager.rejected
