"""Hardware that claims hold: counter sets and capacity, in addition to device names."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from drakit import CounterSet, Device
from drakit_nodeplugin.claims.prepare import LISTED_SECONDS
from drakit_nodeplugin.state.checkpoint import rows, schema
from drakit_nodeplugin.state.holds import (
    Hardware,
    HeldDevice,
    PoolContent,
    held_beside_unpreparing,
    units_of,
)
from tests.fakes.checkpoints import stored_claim, stored_device
from tests.fakes.claims import DRIVER, NODE, claim_body, reference
from tests.unit.claims.conftest import errors, opened, stopped

A, B, C, D = "uid-a", "uid-b", "uid-c", "uid-d"


def part(name: str, memory: str, *, card: str = "card", **fields) -> Device:
    return Device(name=name, consumes={card: {"memory": memory}}, **fields)


CARD = CounterSet(name="card", counters={"memory": "40Gi"})
DEVICES = (
    part("whole", "40Gi"),
    part("half-0", "20Gi"),
    part("half-1", "20971520Ki"),
    part("shared", "10Gi", allow_multiple_allocations=True),
    Device(name="nic", capacity={"bandwidth": "100G"}, allow_multiple_allocations=True),
    Device(name="plain"),
)
CONTENT = PoolContent(devices={device.name: device for device in DEVICES}, counter_sets=(CARD,))
HARDWARE = Hardware(pools={NODE: CONTENT})


def share(device: str, number: int, **amounts: str) -> dict:
    return {"device": device, "shareID": f"share-{number}", "consumedCapacity": amounts}


@pytest.fixture
async def plugin(start):
    plugin = await start()
    plugin.inventories.list(*DEVICES, counter_sets=[CARD])
    return plugin


async def allocated(plugin, **results) -> None:
    for name, result in results.items():
        given = result if isinstance(result, list) else [result]
        plugin.claims.store(claim_body(f"uid-{name}", *given))


# ------------------------------------------------------------ counters


@pytest.mark.parametrize("leaving", [False, True], ids=["prepared", "unpreparing"])
async def test_a_partition_of_a_device_that_is_held_is_refused(plugin, devices, leaving):
    await allocated(plugin, a="whole", b="half-0")
    assert await errors(plugin, A) == [None]
    if leaving:
        devices.reason_away = stopped
        assert await plugin.unprepare(reference(A)) == {A: None}
        devices.reason_away = None
    (error,) = await errors(plugin, B)
    assert error == (
        f"claim lab/claim-{B}, request main: device half-0 cannot be used together with device "
        f"whole of claim lab/claim-{A}: both consume memory of counter set card, and not enough is "
        f"left; this pod starts automatically once the pod that uses lab/claim-{A} is gone"
    )
    assert devices.prepares == 1
    assert devices.seen[0].consumes == {"card": {"memory": "40Gi"}}
    assert await plugin.unprepare(reference(A)) == {A: None}
    assert await errors(plugin, B) == [None]


async def test_only_a_claim_that_consumes_the_counter_is_named_as_holder(plugin):
    """After an inventory has shrunk, a claim that does not fit by itself has no holder, and 0
    always fits."""
    card = CounterSet(name="card", counters={"memory": "10Gi", "engines": "2"})
    engine = {"card": {"memory": "0", "engines": "1"}}
    plugin.inventories.list(
        part("whole", "40Gi"),
        Device(name="engine-0", consumes=engine),
        Device(name="engine-1", consumes=engine),
        counter_sets=[card],
    )
    await allocated(plugin, a="engine-0", b="whole", c="engine-1")
    first, second, third = [(await errors(plugin, uid))[0] for uid in (A, B, C)]
    assert (first, third) == (None, None)
    assert "the claim requires more memory of counter set card than the driver provides" in (
        second or ""
    )


async def test_partitions_that_fit_do_not_overlap_and_the_largest_holder_is_named(plugin):
    await allocated(plugin, a="half-0", b="shared", c="half-1", d=["half-1"])
    assert await errors(plugin, A, B) == [None, None]
    (error,) = await errors(plugin, C)
    assert f"together with device half-0 of claim lab/claim-{A}: both consume memory" in error
    await plugin.unprepare(reference(B))
    assert await errors(plugin, D) == [None], "written as Ki, it is the other half"


async def test_a_counter_counts_once_however_many_shares_a_device_has(plugin):
    await allocated(plugin, a=share("shared", 1), b=share("shared", 2), c="half-0", d="half-1")
    assert await errors(plugin, A, B, C) == [None, None, None]
    assert (await errors(plugin, D))[0] is not None
    await plugin.unprepare(reference(A))
    assert (await errors(plugin, D))[0] is not None, "one share is left"
    await plugin.unprepare(reference(B))
    assert await errors(plugin, D) == [None]


async def test_admin_access_consumes_nothing_and_is_never_refused(plugin):
    admin = {"device": "whole", "adminAccess": True}
    await allocated(plugin, a=admin, b="half-0", c=admin, d="half-1")
    assert await errors(plugin, A, B, C, D) == [None] * 4


async def test_one_claim_that_exceeds_the_inventory(plugin):
    await allocated(plugin, a=["whole", "half-0"])
    (error,) = await errors(plugin, A)
    assert "device whole has less capacity than when it was allocated" in error
    assert "more memory of counter set card than the driver provides; delete the pod" in error


async def test_amounts_are_added_exactly(plugin):
    large = CounterSet(name="large", counters={"memory": "1000000000000000000000000000000"})
    devices = [
        part("most", large.counters["memory"], card="large"),
        part("one", "1n", card="large"),
    ]
    tenths = CounterSet(name="tenths", counters={"memory": "300m"})
    devices += [part(f"tenth-{n}", "0.1", card="tenths") for n in range(4)]
    plugin.inventories.list(*devices, counter_sets=[large, tenths])
    await allocated(plugin, a="most", b="one", c=["tenth-0", "tenth-1", "tenth-2"], d="tenth-3")
    refused = [error is not None for error in await errors(plugin, A, C, B, D)]
    assert refused == [False, False, True, True]


# ------------------------------------------------------------ capacity


async def test_shares_that_exceed_a_capacity_are_refused(plugin):
    await allocated(
        plugin,
        a=share("nic", 1, bandwidth="20G"),
        b=[share("nic", 2, bandwidth="30G"), share("nic", 3, bandwidth="30G")],
        c=share("nic", 4, bandwidth="19531251Ki"),
        d=share("nic", 5, bandwidth="20000M"),
    )
    assert await errors(plugin, A, B) == [None, None]
    (error,) = await errors(plugin, C)
    assert f"device nic cannot be used together with device nic of claim lab/claim-{B}" in error
    assert "both consume capacity bandwidth" in error
    assert await errors(plugin, D) == [None]


async def test_a_share_of_a_device_that_has_less_than_before(plugin):
    await allocated(plugin, a=share("nic", 1, bandwidth="200G"), b=share("nic", 2, other="1"))
    for error, name in zip(await errors(plugin, A, B), ("bandwidth", "other"), strict=True):
        assert f"the claim requires more capacity {name} than the driver provides" in error


# ------------------------------------------------------------ devices that are not listed


async def test_a_device_that_is_listed_a_moment_later_is_prepared(plugin):
    plugin.inventories.list()
    await allocated(plugin, a="whole")
    preparing = asyncio.create_task(errors(plugin, A))
    await asyncio.sleep(0.05)
    assert not preparing.done()
    plugin.inventories.list(DEVICES[-1])
    plugin.inventories.list(*DEVICES, counter_sets=[CARD])
    assert await preparing == [None]
    (row,) = (await plugin.checkpoint.find([A])).values()
    assert row.devices[0].consumes == DEVICES[0].consumes


async def test_a_device_that_is_not_listed_is_refused(plugin, devices, monkeypatch):
    monkeypatch.setattr("drakit_nodeplugin.claims.prepare.LISTED_SECONDS", 0.01)
    await allocated(
        plugin,
        a=["plain", "gone"],
        b="plain",
        c={"device": "gone", "adminAccess": True},
        d={"device": "plain", "pool": "network"},
    )
    error, *others, network = await errors(plugin, A, B, C, D)
    assert error == (
        f"claim lab/claim-{A}, request main: driver {DRIVER} does not list device gone on this "
        "node; the kubelet retries, and the pod starts once the driver lists the device; if the "
        "device is gone, delete the pod; if the driver refuses the device, the node plugin's log "
        "has the reason"
    )
    assert "does not list device plain" in network
    assert others == [None, None]
    assert await plugin.states() == {B: "prepared", C: "prepared"}


async def test_a_driver_of_network_devices_prepares_what_nobody_lists(plugin, devices):
    devices.traits = replace(devices.traits, network_devices=True)
    network = {"device": "plain", "pool": "network"}
    await allocated(plugin, a=[network, {**network, "device": "gone"}], b="plain", c=network)
    async with asyncio.timeout(LISTED_SECONDS / 2):
        error, other, second = await errors(plugin, A, B, C)
    assert (error, other) == (None, None), "a device of this node can have the same name"
    assert f"lab/claim-{A}" in (second or "")
    assert {(device.pool, device.name) for device in devices.seen} == {
        ("network", "plain"),
        ("network", "gone"),
        (NODE, "plain"),
    }


@pytest.mark.parametrize("listed", [True, False], ids=["a-driver", "device-plugins"])
async def test_a_device_that_is_gone_is_refused_at_once(plugin, listed):
    if not listed:
        plugin.inventories.pools = None  # its devices consume only their names
    plugin.inventories.gone = {"plain"}
    await allocated(plugin, a="plain", b="whole", c={"device": "plain", "adminAccess": True})
    async with asyncio.timeout(LISTED_SECONDS / 2):
        error, other, admin = await errors(plugin, A, B, C)
    assert error == (
        f"claim lab/claim-{A}, request main: device plain is gone: driver {DRIVER} no longer "
        "lists it on this node; the kubelet retries, and the pod starts if the device returns; "
        "otherwise delete the pod, and also the claim if no template created it"
    )
    assert other is None
    assert "is gone" in admin
    assert await plugin.states() == {B: "prepared"}


async def test_a_device_in_use_is_prepared_again_although_it_is_not_listed(plugin, devices):
    devices.traits = replace(devices.traits, checks=True)
    await allocated(plugin, a="whole", b="half-0")
    assert await errors(plugin, A) == [None]
    plugin.inventories.list(*DEVICES[1:], counter_sets=[CARD])
    devices.out_of_order.add("whole")
    assert await errors(plugin, A) == [None]
    assert devices.prepares == 2
    (error,) = await errors(plugin, B)
    assert "together with device whole" in error, "its consumption is still known"


# ------------------------------------------------------------ rows that were rebuilt


def rebuilt(name: str, device: str, **fields):
    device = stored_device(device, **fields)
    return stored_claim(name, devices=(device,), state="prepared", rebuilt="listed")


async def test_a_rebuilt_row_blocks_what_consumes_until_the_inventory_completes_it(plugin):
    rows = [rebuilt("x", "half-9"), rebuilt("y", "half-0")]
    written = (await plugin.checkpoint.write(rows)).written
    await allocated(plugin, a="half-1", b="plain")
    error, other = await errors(plugin, A, B)
    assert (
        "cannot be used together with device half-9 of claim lab/x: the driver does not list "
        "device half-9, so the counters that this device consumes are unknown" in error
    )
    assert other is None, "what consumes nothing is not blocked"
    nine = part("half-9", "1Gi", card="other")
    others = CounterSet(name="other", counters={"memory": "1Gi"})
    plugin.inventories.list(*DEVICES, nine, counter_sets=[CARD, others])
    assert await errors(plugin, A) == [None]
    known = await plugin.checkpoint.find(["uid-x", "uid-y"])
    assert [known[uid].devices[0].consumes for uid in ("uid-x", "uid-y")] == [
        {"other": {"memory": "1Gi"}},
        {"card": {"memory": "20Gi"}},
    ]
    assert known == written, "only the knowledge about it has changed"


async def test_a_share_of_a_rebuilt_row_may_take_all(plugin):
    await plugin.checkpoint.write([rebuilt("x", "nic", share_id="9")])
    await allocated(plugin, a=share("nic", 1, bandwidth="1G"), b=share("shared", 2))
    error, other = await errors(plugin, A, B)
    assert "together with device nic of claim lab/x: both consume capacity bandwidth" in error
    assert other is None


# ------------------------------------------------------------ holds of claims that leave


def stored(name: str, device: str, *, state="prepared", **fields):
    listed = CONTENT.devices[device]
    return stored_claim(
        name,
        state=state,
        devices=(stored_device(device, consumes=listed.consumes, **fields),),
    )


def test_the_holds_beside_a_claim_that_is_being_unprepared():
    nic = {"consumed_capacity": {"bandwidth": "2G"}}
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        schema.create(connection)

        def write(*claims):
            done = rows.write(connection, claims, hardware=HARDWARE)
            assert len(done.written) == len(claims)

        write(stored("a", "half-0"), stored("b", "plain"), stored("c", "nic", share_id="1", **nic))
        assert held_beside_unpreparing(connection) == []
        leaving = {"state": "unpreparing"}
        write(
            stored("d", "half-1", **leaving),
            stored("e", "nic", share_id="2", **nic, **leaving),
            stored("f", "plain", admin_access=True, **leaving),
        )
        memory = {"card": units_of({"memory": "20Gi"})}
        assert held_beside_unpreparing(connection) == [
            HeldDevice(pool=NODE, device="half-0", consumes=memory),
            HeldDevice(pool=NODE, device="half-1", consumes=memory, unpreparing=True),
            HeldDevice(
                pool=NODE,
                device="nic",
                consumes={},
                shared=units_of({"bandwidth": "4G"}),
                exclusive=False,
                unpreparing=True,
            ),
        ]
        write(rebuilt("g", "nine"), replace(rebuilt("h", "ten"), state="unpreparing"))
        found = {each.device: each.consumes for each in held_beside_unpreparing(connection)}
        assert found == {"half-0": memory, "half-1": memory, "nic": {}, "nine": None, "ten": None}


# ------------------------------------------------------------ costs


def exclusive(number: int):
    return stored_device(f"cam-{number}", consumes={})


def partition(number: int):
    return stored_device(f"part-{number}", consumes={f"card-{number // 4}": {"memory": "10Gi"}})


def share_of_many(number: int):
    consumed = {"bandwidth": "1M"}
    fields = {"share_id": f"{number}", "consumed_capacity": consumed, "consumes": {}}
    return stored_device(f"nic-{number % 1000}", **fields)


def share_of_one(number: int):
    return stored_device("nic", share_id=f"{number}", consumes={})


@pytest.mark.parametrize(
    ("device", "most"),
    [(exclusive, 1.2), (share_of_one, 1.2), (partition, 1.7), (share_of_many, 1.7)],
)
def test_the_cost_of_a_prepare_hardly_grows_with_holds_on_other_hardware(device, most):
    nics = [Device(name=f"nic-{n}", capacity={"bandwidth": "1G"}) for n in range(1000)]
    sets = [CounterSet(name=f"card-{n}", counters={"memory": "40Gi"}) for n in range(1000)]
    content = PoolContent(devices={d.name: d for d in nics}, counter_sets=tuple(sets))
    hardware = Hardware(pools={NODE: content})

    def steps(before: int) -> int:
        """Return the work of SQLite, in tens of instructions of its virtual machine."""
        counted: list[int] = []
        claims = [stored_claim(f"{number}", devices=(device(number),)) for number in range(before)]
        new = [stored_claim(f"{before + n}", devices=(device(before + n),)) for n in range(8)]
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
            with rows.transaction(connection):
                schema.create(connection)
                rows.write(connection, claims, hardware=hardware)
            connection.set_progress_handler(lambda: counted.append(1), 10)
            assert len(rows.write(connection, new, hardware=hardware).written) == 8
        return len(counted)

    assert steps(3000) < most * steps(600)


async def test_a_device_that_changes_during_the_call_is_counted_as_it_was(plugin, devices):
    """Without side effects there is no intent: the only check is that of the result."""
    devices.traits = replace(devices.traits, side_effects=False)
    await allocated(plugin, a=share("nic", 1, bandwidth="80G"), b=share("nic", 2, bandwidth="80G"))
    gate = devices.held["nic"] = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        both = [group.create_task(errors(plugin, uid)) for uid in (A, B)]
        await asyncio.sleep(0.1)
        (nic,) = [device for device in DEVICES if device.name == "nic"]
        plugin.inventories.list(replace(nic, capacity={"bandwidth": "1000G"}))
        gate.set()
    found = [error for task in both for error in task.result()]
    assert found.count(None) == 1
    (error,) = [error for error in found if error is not None]
    assert "both consume capacity bandwidth" in error


async def test_unpreparing_a_rebuilt_claim_keeps_others_from_its_counter_set(plugin, devices):
    await plugin.checkpoint.write([rebuilt("y", "half-0")])
    unprepared = []
    unprepare = devices.unprepare_device

    async def recorded(claim, device):
        unprepared.append(device)
        await unprepare(claim, device)

    devices.unprepare_device = recorded
    await plugin.unprepare(reference("uid-y"))
    assert unprepared[0].consumes.keys() == {CARD.name}


async def test_rows_of_one_batch_stay_sound_when_a_rebuilt_one_is_among_them(plugin, devices):
    await allocated(plugin, a="half-0")
    assert await errors(plugin, A) == [None]
    await plugin.checkpoint.write([rebuilt("y", "half-1")])
    devices.reason_away = stopped
    await plugin.unprepare(reference(A), reference("uid-y"))
    await plugin.checkpoint.close()
    async with opened(plugin.checkpoint.path) as again:
        damage = again.damage
    assert damage is None


@pytest.mark.parametrize("end", ["unavailable", "prepared again"])
async def test_an_entry_that_another_claim_completed_is_not_written_from_memory(
    plugin, start, devices, end
):
    """The body of such an entry and its index would differ, and the next start would quarantine."""
    await allocated(plugin, a="half-0", b="half-1")
    assert await errors(plugin, A) == [None]
    (row,) = (await plugin.checkpoint.find([A])).values()
    unknown = tuple(replace(device, consumes=None) for device in row.devices)
    await plugin.checkpoint.write([replace(row, rebuilt="confirmed", devices=unknown)])
    without = [device for device in DEVICES if device.name != "half-0"]
    plugin.inventories.list(*without, counter_sets=[CARD])
    assert await errors(plugin, A) == [None]
    plugin.inventories.list(*DEVICES, counter_sets=[CARD])
    assert await errors(plugin, B) == [None]  # completes the row of A

    if end == "unavailable":
        devices.reason_away = stopped
        await plugin.unprepare(reference(A))
        devices.reason_away = None
    else:
        devices.traits = replace(devices.traits, checks=True)
        devices.out_of_order.add("half-0")
        plugin.inventories.list(*without, counter_sets=[CARD])
        assert await errors(plugin, A) == [None]

    assert (await start()).checkpoint.damage is None
