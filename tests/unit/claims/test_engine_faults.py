"""Faults between the steps of the engine: they leave nothing behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from drakit import Device, DriverError
from drakit_nodeplugin.state.checkpoint import Checkpoint
from tests.fakes.claims import DRIVER, FakeDevices, claim_body, opaque, reference
from tests.fakes.tasks import until
from tests.unit.claims.conftest import forget, stopped

A, B, C = "uid-a", "uid-b", "uid-c"


# ------------------------------------------------------------ rollback


@pytest.mark.parametrize("then", ["recovery", "prepare", "unprepare"])
async def test_a_rollback_that_fails_keeps_the_device_until_it_is_undone(
    plugin, claims, devices, then
):
    devices.failing.add("broken")
    claims.store(claim_body(A, "cam-0", "broken"), claim_body(B, "cam-0"))
    await plugin.prepare(reference(A))
    assert await plugin.states() == {A: "unpreparing"}
    assert "still prepared for claim" in (await plugin.prepare(reference(B)))[B].error

    devices.failing.clear()
    match then:
        case "recovery":
            assert await plugin.recovery.recover() == 0
        case "prepare":
            assert (await plugin.prepare(reference(A)))[A].error is None
            assert devices.prepared == {"cam-0": A, "broken": A}
        case _:
            assert await plugin.unprepare(reference(A)) == {A: None}
    states = {A: "prepared"} if then == "prepare" else {}
    assert (await plugin.states(), bool(devices.prepared)) == (states, bool(states))


async def test_a_slow_claim_holds_up_neither_the_answer_nor_the_entry_of_another(
    plugin, claims, devices
):
    devices.held["cam-0"] = asyncio.Event()
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    plugin.answers.clear()
    work = asyncio.create_task(plugin.prepare(reference(A), reference(B)))
    await until(lambda: B in plugin.answers)

    assert await plugin.states() == {A: "preparing", B: "prepared"}
    assert await plugin.unprepare(reference(B)) == {B: None}
    devices.held["cam-0"].set()
    await work
    assert plugin.answers[A].error is None


@pytest.mark.parametrize("side_effects", [True, False])
@pytest.mark.parametrize("is_known", [True, False], ids=["tainted", "forgotten"])
async def test_a_device_that_is_unplugged_during_its_prepare_fails_its_claim_alone(
    plugin, claims, devices, side_effects, is_known
):
    """Without side effects no row shows the claim, so that the device is forgotten at once."""
    devices.traits = replace(devices.traits, side_effects=side_effects)
    devices.held["cam-0"] = asyncio.Event()
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    plugin.inventories.list(Device(name="cam-0"), Device(name="cam-1"))
    work = asyncio.create_task(plugin.prepare(reference(A), reference(B)))
    await until(lambda: devices.prepares)
    plugin.inventories.list(Device(name="cam-1"))
    plugin.inventories.gone = {"cam-0"} if is_known else set()
    devices.held["cam-0"].set()
    answers = await work
    assert (plugin.answers[A].reason, answers[B].error) == ("DeviceGone", None)
    assert await plugin.states() == {B: "prepared"}
    assert plugin.files() == {f"{DRIVER}-claim_{B}.json"}
    assert not side_effects or devices.prepared == {"cam-1": B}


@pytest.mark.parametrize("step", ["read", "result"])
async def test_an_internal_error_is_one_of_its_claim_alone(
    plugin, claims, monkeypatch, caplog, step
):
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    if step == "read":
        claims.bodies[f"claim-{A}"]["status"]["devices"] = ["cam-0"]
    else:
        build = plugin.specs.build

        def failing(uid: str, *args: Any, **fields: Any) -> str:
            return build(uid, *args, **fields) if uid == B else 1 / 0

        monkeypatch.setattr(plugin.specs, "build", failing)
    answers = await plugin.prepare(reference(A), reference(B))
    assert "an internal error of the node plugin" in (answers[A].error or "")
    assert answers[B].error is None
    assert await plugin.states() == {B: "prepared"}
    assert "engine failed" in caplog.messages


# ------------------------------------------------------------ claims that an admin forgets


async def test_a_prepare_in_flight_of_a_claim_that_an_admin_forgets_stores_nothing(
    plugin, claims, devices
):
    """The command reports that its driver did not unprepare it."""
    devices.held["cam-0"] = asyncio.Event()
    claims.store(claim_body(A, "cam-0"))
    late = asyncio.create_task(plugin.prepare(reference(A)))
    await until(lambda: devices.prepares)

    await forget(plugin, A)
    devices.held.pop("cam-0").set()

    assert "the entry was removed from the checkpoint in the meantime" in (await late)[A].error
    assert (await plugin.states(), plugin.files()) == ({}, set())
    assert await plugin.recovery.recover() == 0
    assert devices.unprepares == 0
    assert (await plugin.prepare(reference(A)))[A].error is None, "the kubelet's next attempt"
    assert await plugin.unprepare(reference(A)) == {A: None}
    assert (devices.prepared, await plugin.states(), plugin.files()) == ({}, {}, set())


async def test_an_unprepare_in_flight_of_a_claim_that_an_admin_forgets_succeeds(
    plugin, claims, devices
):
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-0"))
    await plugin.prepare(reference(A))
    devices.held["cam-0"] = asyncio.Event()
    late = asyncio.create_task(plugin.unprepare(reference(A)))
    await until(lambda: devices.unprepares)

    await forget(plugin, A)
    devices.held.pop("cam-0").set()

    assert await late == {A: None}
    assert (devices.prepared, await plugin.states(), plugin.files()) == ({}, {}, set())
    assert (await plugin.prepare(reference(B)))[B].error is None


async def test_a_second_prepare_in_flight_of_a_claim_that_an_admin_forgets_stores_nothing(
    plugin, claims, devices
):
    claims.store(claim_body(A, "cam-0"))
    await plugin.prepare(reference(A))
    devices.held["cam-0"] = asyncio.Event()
    late = asyncio.create_task(plugin.queue.prepare_again(reference(A)))
    await until(lambda: devices.prepares == 2)

    await forget(plugin, A)
    (plugin.cdi / f"{DRIVER}-claim_{A}.json").unlink()  # as the command does
    devices.held.pop("cam-0").set()

    assert "the entry was removed from the checkpoint in the meantime" in (await late).error
    assert (await plugin.states(), plugin.files(), devices.unprepares) == ({}, set(), 0)


@pytest.mark.parametrize("fails", [False, True], ids=["success", "failure"])
async def test_another_claim_waits_for_a_late_prepare_which_then_undoes_nothing(
    plugin, claims, devices, fails
):
    gate = devices.held["cam-1"] = asyncio.Event()
    devices.failing |= {"cam-1"} if fails else set()
    claims.store(claim_body(A, "cam-0", "cam-1"), claim_body(B, "cam-0"))
    late = asyncio.create_task(plugin.prepare(reference(A)))
    await until(lambda: devices.prepares == 2 and "cam-0" in devices.prepared)
    await forget(plugin, A)
    other = asyncio.create_task(plugin.prepare(reference(B)))
    await until(lambda: plugin.is_waiting(B))
    gate.set()

    assert (await late)[A].error is not None
    assert (await other)[B].error is None
    assert (devices.unprepares, devices.prepared["cam-0"]) == (0, B)
    assert await plugin.states() == {B: "prepared"}
    assert plugin.files() == {f"{DRIVER}-claim_{B}.json"}


# ------------------------------------------------------------ what vendors' code can do


class Unspeakable(DriverError):
    def __str__(self) -> str:
        raise RuntimeError("not text")


async def test_an_error_without_a_text_is_an_error_of_its_claim_alone(plugin, claims, devices):
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    right = devices.prepare_device

    async def prepare(claim, device):
        if claim.uid == A:
            raise Unspeakable
        return await right(claim, device)

    devices.prepare_device = prepare
    answers = await plugin.prepare(reference(A), reference(B))
    assert "Unspeakable (no message)" in answers[A].error
    assert answers[B].error is None


async def test_a_check_that_hangs_holds_up_its_claim_alone_and_is_given_up(plugin, claims, devices):
    devices.traits = FakeDevices(checks=True).traits
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    await plugin.prepare(reference(A), reference(B))
    devices.held["cam-0"] = asyncio.Event()
    plugin.answers.clear()
    work = asyncio.create_task(plugin.prepare(reference(A), reference(B)))
    await until(lambda: B in plugin.answers)
    assert A not in plugin.answers
    plugin.abandon(A)
    await work
    assert "stopped preparing the claim" in plugin.answers[A].error
    assert await plugin.states() == {A: "prepared", B: "prepared"}


async def test_rollbacks_do_not_wait_for_each_other(plugin, claims, devices):
    plugin.cdi.write_text("a file where the directory should be")
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    hanging = asyncio.Event()
    right = devices.unprepare_device

    async def unprepare(claim, device):
        if claim.uid == A:
            await hanging.wait()
        await right(claim, device)

    devices.unprepare_device = unprepare
    plugin.answers.clear()
    work = asyncio.create_task(plugin.prepare(reference(A), reference(B)))
    await until(lambda: B in plugin.answers)
    assert A not in plugin.answers
    hanging.set()
    await work


# ------------------------------------------------------------ drivers that change


@pytest.mark.parametrize("before", [True, False], ids=["had-side-effects", "gets-side-effects"])
async def test_a_driver_whose_side_effects_change_is_asked_to_undo_either_way(
    start, claims, devices, before
):
    devices.traits = FakeDevices(side_effects=before).traits
    plugin = await start()
    claims.store(claim_body(A, "cam-0"))
    await plugin.prepare(reference(A))

    devices.traits = FakeDevices(side_effects=not before).traits
    plugin = await start()
    assert await plugin.unprepare(reference(A)) == {A: None}
    assert (devices.unprepares, devices.prepared, await plugin.states()) == (1, {}, {})


# ------------------------------------------------------------ recovery


@pytest.fixture
async def unprepared_without_driver(plugin, claims, devices):
    """A plugin with two claims that the kubelet unprepared while their driver was unavailable."""
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    await plugin.prepare(reference(A), reference(B))
    devices.reason_away = stopped
    await plugin.unprepare(reference(A), reference(B))
    devices.reason_away = None
    return plugin


async def test_an_undo_that_hangs_delays_neither_the_recovery_nor_the_calls_of_others(
    unprepared_without_driver, devices
):
    plugin = unprepared_without_driver
    devices.held["cam-0"] = asyncio.Event()
    first = asyncio.create_task(plugin.recovery.recover())
    async with asyncio.timeout(5):
        while await plugin.states() != {A: "unpreparing"}:
            await asyncio.sleep(0.001)
        assert await plugin.unprepare(reference(B)) == {B: None}
        assert (await plugin.prepare(reference(B)))[B].error is None

        devices.failing.add("cam-1")
        await plugin.unprepare(reference(B))
        devices.failing.clear()
        assert await plugin.recovery.recover() == 1, "the one that hangs"
    assert await plugin.states() == {A: "unpreparing"}
    assert not first.done()
    devices.held["cam-0"].set()
    assert await first == 0


@pytest.mark.parametrize("error", [DriverError("no answer within 300 s"), KeyError("cam-0")])
async def test_claims_that_failed_together_are_undone_one_by_one(
    unprepared_without_driver, devices, error
):
    plugin = unprepared_without_driver
    under_way: set[str] = set()

    async def unprepare(device) -> None:
        """Prepare a whole batch in one call, which fails because cam-0 is broken."""
        under_way.add(device.name)
        together = set(under_way)
        await asyncio.sleep(0)
        together |= under_way
        under_way.discard(device.name)
        if "cam-0" in together:
            raise error

    devices.unprepare_device = lambda claim, device: unprepare(device)
    assert await plugin.recovery.recover() == 2
    assert await plugin.recovery.recover() == 1
    assert await plugin.states() == {A: "unpreparing"}


async def test_recovery_leaves_alone_what_is_worked_on(plugin, claims, devices):
    devices.held["cam-0"] = asyncio.Event()
    claims.store(claim_body(A, "cam-0"))
    work = asyncio.create_task(plugin.prepare(reference(A)))
    await until(lambda: devices.prepares)

    assert await plugin.recovery.recover() == 1
    devices.held["cam-0"].set()
    assert (await work)[A].error is None


# ------------------------------------------------------------ what is prepared already


async def test_a_failure_to_prepare_again_takes_nothing_from_running_containers(
    plugin, claims, devices
):
    devices.traits = FakeDevices(checks=True).traits
    claims.store(claim_body(A, "cam-0"))
    await plugin.prepare(reference(A))
    devices.out_of_order.add("cam-0")
    right = devices.prepare_device

    async def refuse(claim, device):
        raise stopped()

    devices.prepare_device = refuse
    assert (await plugin.prepare(reference(A)))[A].error is not None
    assert await plugin.states() == {A: "prepared"}
    assert len(plugin.files()) == 1
    assert devices.unprepares == 0
    devices.prepare_device = right
    assert (await plugin.prepare(reference(A)))[A].error is None


async def test_another_config_is_another_allocation(plugin, claims, devices):
    claims.store(claim_body(A, "cam-0"))
    await plugin.prepare(reference(A))
    claims.store(claim_body(A, "cam-0", config=[opaque({"mode": "fast"})]))

    assert (await plugin.prepare(reference(A)))[A].error is None
    assert (devices.prepares, devices.unprepares) == (2, 1)
    assert devices.seen[-1].configs == ({"mode": "fast"},)


# ------------------------------------------------------------ drivers without side effects


async def test_without_side_effects_nothing_is_undone_and_there_is_one_transaction(
    plugin, claims, devices
):
    devices.traits = FakeDevices(side_effects=False).traits
    devices.failing.add("broken")
    claims.store(claim_body(A, "cam-0", "broken"), claim_body(B, "cam-0"), claim_body(C, "cam-0"))
    states = []
    write = plugin.checkpoint.write

    async def watched(batch, **options):
        states.append([claim.state for claim in batch])
        return await write(batch, **options)

    plugin.checkpoint.write = watched
    answers = await plugin.prepare(reference(A), reference(B), reference(C))

    assert states == [["prepared", "prepared"]]
    assert "broken is broken" in answers[A].error
    assert answers[B].error is None
    assert "still prepared for" in answers[C].error
    assert plugin.files() == {f"{DRIVER}-claim_{B}.json"}
    assert await plugin.unprepare(reference(B)) == {B: None}
    assert (devices.unprepares, await plugin.states(), plugin.files()) == (0, {}, set())


async def test_without_the_api_server_a_rebuilt_claim_is_not_answered(plugin, claims, devices):
    claims.store(claim_body(A, "cam-0"))
    await plugin.prepare(reference(A))
    (row,) = (await plugin.checkpoint.find([A])).values()
    unknown = replace(row.devices[0], request="")
    await plugin.checkpoint.write([replace(row, rebuilt="listed", devices=(unknown,))])
    claims.answers = False

    assert "does not respond" in (await plugin.prepare(reference(A)))[A].error
    claims.answers = True
    answer = (await plugin.prepare(reference(A)))[A]
    assert (answer.error, answer.devices[0].requests) == (None, ("main",))
    assert devices.unprepares == 0


async def test_a_prepared_claim_is_answered_while_the_nodes_labels_are_not_known(start, claims):
    plugin = await start()
    body = claim_body(A, "cam-0", node=None)
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    body["status"]["allocation"]["nodeSelector"] = {"nodeSelectorTerms": [term]}
    claims.store(body, {**body, "metadata": {**body["metadata"], "uid": B, "name": f"claim-{B}"}})
    await plugin.prepare(reference(A))

    plugin = await start()
    object.__setattr__(plugin.parts.node, "labels", None)
    assert (await plugin.prepare(reference(A)))[A].error is None
    assert "labels of node" in (await plugin.prepare(reference(B)))[B].error


# ------------------------------------------------------------ the checkpoint


async def test_nothing_is_answered_before_a_damaged_checkpoint_is_rebuilt(plugin, claims):
    claims.store(claim_body(A, "cam-0"))
    plugin.checkpoint.damage = "it is no database"
    works = [
        asyncio.create_task(plugin.prepare(reference(A))),
        asyncio.create_task(plugin.unprepare(reference(B))),
    ]
    await asyncio.sleep(0.01)
    assert not any(work.done() for work in works)
    plugin.engine.rebuilt.set()
    assert (await works[0])[A].error is None
    assert await works[1] == {B: None}


async def test_the_call_that_opens_a_checkpoint_without_its_entries_is_refused(
    start, claims, tmp_path
):
    plugin = await start()
    claims.store(claim_body(A, "cam-0"))
    await plugin.prepare(reference(A))
    plugin = await start()
    empty = Checkpoint(tmp_path / "empty.db")
    await empty.open()
    await empty.close()
    for file in tmp_path.glob("checkpoint.db*"):
        file.unlink()
    empty.path.replace(plugin.checkpoint.path)  # as an admin who starts over does
    first, second = await asyncio.gather(
        plugin.unprepare(reference(A)), plugin.unprepare(reference(B))
    )
    assert "no entry for 1 CDI file" in first[A]
    assert "no entry for 1 CDI file" in second[B]
    assert len(plugin.files()) == 1, "from which the entry is rebuilt"
    waits = asyncio.create_task(plugin.unprepare(reference(A)))
    await asyncio.sleep(0.01)
    assert not waits.done()
    plugin.engine.rebuilt.set()
    assert await waits == {A: None}
