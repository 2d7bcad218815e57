"""Faults between the steps of the engine: they leave nothing behind."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from drakit import DriverError
from drakit_nodeplugin.endpoints.failures import EndpointStoppedError
from drakit_nodeplugin.state.checkpoint import Checkpoint
from tests.fakes.claims import DRIVER, FakeDevices, claim_body, reference

A, B, C = "uid-a", "uid-b", "uid-c"


def away() -> EndpointStoppedError:
    return EndpointStoppedError(driver=DRIVER, reason="its stream ended")


def config(parameters, *, source="FromClaim", requests=(), driver=DRIVER):
    return {
        "source": source,
        "requests": list(requests),
        "opaque": {"driver": driver, "parameters": parameters},
    }


async def until(look) -> None:
    async with asyncio.timeout(5):
        while not look():
            await asyncio.sleep(0.001)


# ------------------------------------------------------------ rollback


async def test_a_claim_that_fails_halfway_is_undone_before_its_error_is_answered(
    start, claims, devices, caplog
):
    caplog.set_level(logging.INFO)
    plugin = await start()
    devices.failing.add("broken")
    claims.store(claim_body(A, "cam-0", "broken"), claim_body(B, "cam-0"))

    async def refuse(claim, device):
        devices.prepared.pop(device.name, None)

    devices.unprepare_device = refuse
    answers = await plugin.prepare(reference(A))

    assert "broken is broken" in answers[A].error
    assert (devices.prepared, await plugin.states(), plugin.files()) == ({}, {}, set())
    assert "claims rolled back" in caplog.messages
    assert "claims unprepared" not in caplog.messages
    assert (await plugin.prepare(reference(B)))[B].error is None
    await plugin.unprepare(reference(B))
    assert "claims unprepared" in caplog.messages


async def test_a_rollback_that_fails_keeps_the_device_until_it_is_undone(start, claims, devices):
    plugin = await start()
    devices.failing.add("broken")
    claims.store(claim_body(A, "cam-0", "broken"), claim_body(B, "cam-0"))
    await plugin.prepare(reference(A))
    assert await plugin.states() == {A: "unpreparing"}
    assert "still prepared for claim" in (await plugin.prepare(reference(B)))[B].error

    devices.failing.clear()
    assert await plugin.recovery.recover() == 0
    assert (devices.prepared, await plugin.states()) == ({}, {})


async def test_a_claim_whose_rollback_is_due_is_undone_first_and_then_prepared(
    start, claims, devices
):
    plugin = await start()
    devices.failing.add("broken")
    claims.store(claim_body(A, "cam-0", "broken"))
    await plugin.prepare(reference(A))
    devices.failing.clear()

    assert (await plugin.prepare(reference(A)))[A].error is None
    assert devices.prepared == {"cam-0": A, "broken": A}
    assert await plugin.states() == {A: "prepared"}


async def test_an_unavailable_driver_is_reported_before_anything_is_stored(start, claims, devices):
    plugin = await start()
    claims.store(claim_body(A, "cam-0"))
    devices.reason_away = away

    error = (await plugin.prepare(reference(A)))[A].error

    assert f"driver {DRIVER} is stopped: its stream ended" in error
    assert (devices.prepares, await plugin.states()) == (0, {})


async def test_a_slow_claim_holds_up_neither_the_answer_nor_the_entry_of_another(
    start, claims, devices
):
    plugin = await start()
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


# ------------------------------------------------------------ an unprepare that overtakes


async def test_a_prepare_that_hangs_is_given_up_for_its_unprepare(start, claims, devices):
    plugin = await start()
    devices.held["cam-0"] = asyncio.Event()
    claims.store(claim_body(A, "cam-0"))
    work = asyncio.create_task(plugin.prepare(reference(A)))
    await until(lambda: devices.prepares)

    plugin.abandon(A)
    assert "stopped preparing it" in (await work)[A].error
    assert await plugin.states() == {A: "preparing"}, "its unprepare comes"
    devices.held.clear()
    assert await plugin.unprepare(reference(A)) == {A: None}
    assert (devices.unprepares, await plugin.states()) == (1, {})


async def test_a_claim_can_be_prepared_again_after_it_was_given_up(start, claims, devices):
    plugin = await start()
    claims.store(claim_body(A, "cam-0"))
    # Before its driver is called: while the claim is read, or its lock is waited for.
    assert plugin.queue.take(A)
    work = asyncio.create_task(plugin.prepare(reference(A)))
    await asyncio.sleep(0)
    plugin.abandon(A)
    plugin.queue.release(A)
    assert "stopped preparing it" in (await work)[A].error
    assert devices.prepares == 0

    assert (await plugin.prepare(reference(A)))[A].error is None


# ------------------------------------------------------------ claims that an admin forgets


async def forget(plugin, uid) -> None:
    """Forget a claim as the plugin does on an admin's request."""
    (claim,) = (await plugin.checkpoint.find([uid])).values()
    assert await plugin.checkpoint.forget(uid, claim.generation)


async def test_a_prepare_in_flight_of_a_claim_that_an_admin_forgets_stores_nothing(
    start, claims, devices
):
    """The command reports that its driver did not unprepare it."""
    plugin = await start()
    devices.held["cam-0"] = asyncio.Event()
    claims.store(claim_body(A, "cam-0"))
    late = asyncio.create_task(plugin.prepare(reference(A)))
    await until(lambda: devices.prepares)

    await forget(plugin, A)
    devices.held.pop("cam-0").set()

    assert "its entry was removed from the checkpoint meanwhile" in (await late)[A].error
    assert (await plugin.states(), plugin.files()) == ({}, set())
    assert await plugin.recovery.recover() == 0
    assert devices.unprepares == 0
    assert (await plugin.prepare(reference(A)))[A].error is None, "the kubelet's next attempt"
    assert await plugin.unprepare(reference(A)) == {A: None}
    assert (devices.prepared, await plugin.states(), plugin.files()) == ({}, {}, set())


async def test_an_unprepare_in_flight_of_a_claim_that_an_admin_forgets_succeeds(
    start, claims, devices
):
    plugin = await start()
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
    start, claims, devices
):
    plugin = await start()
    claims.store(claim_body(A, "cam-0"))
    await plugin.prepare(reference(A))
    devices.held["cam-0"] = asyncio.Event()
    late = asyncio.create_task(plugin.queue.prepare_again(reference(A)))
    await until(lambda: devices.prepares == 2)

    await forget(plugin, A)
    (plugin.cdi / f"{DRIVER}-claim_{A}.json").unlink()  # as the command does
    devices.held.pop("cam-0").set()

    assert "its entry was removed from the checkpoint meanwhile" in (await late).error
    assert (await plugin.states(), plugin.files(), devices.unprepares) == ({}, set(), 0)


async def test_another_claim_waits_for_a_late_prepare_which_then_undoes_nothing(
    start, claims, devices
):
    plugin = await start()
    devices.held["cam-0"] = asyncio.Event()
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-0"))
    late = asyncio.create_task(plugin.prepare(reference(A)))
    await until(lambda: devices.prepares)
    await forget(plugin, A)
    other = asyncio.create_task(plugin.prepare(reference(B)))
    await until(lambda: plugin.is_waiting(B))
    devices.held.pop("cam-0").set()

    assert (await late)[A].error is not None
    assert (await other)[B].error is None
    assert devices.unprepares == 0
    assert await plugin.states() == {B: "prepared"}
    assert plugin.files() == {f"{DRIVER}-claim_{B}.json"}


async def test_another_claim_waits_for_a_late_failure_which_then_undoes_nothing(
    start, claims, devices
):
    plugin = await start()
    devices.failing.add("broken")
    devices.held["broken"] = asyncio.Event()
    claims.store(claim_body(A, "cam-0", "broken"), claim_body(B, "cam-0"))
    late = asyncio.create_task(plugin.prepare(reference(A)))
    await until(lambda: devices.prepares == 2 and "cam-0" in devices.prepared)
    await forget(plugin, A)
    other = asyncio.create_task(plugin.prepare(reference(B)))
    await until(lambda: plugin.is_waiting(B))
    devices.held.pop("broken").set()

    assert "broken is broken" in (await late)[A].error
    assert (await other)[B].error is None
    assert (devices.unprepares, devices.prepared) == (0, {"cam-0": B})
    assert await plugin.states() == {B: "prepared"}


# ------------------------------------------------------------ what vendors' code can do


class Unspeakable(DriverError):
    def __str__(self) -> str:
        raise RuntimeError("not text")


async def test_an_error_without_a_text_is_an_error_of_its_claim_alone(start, claims, devices):
    plugin = await start()
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


async def test_a_check_that_hangs_holds_up_its_claim_alone_and_is_given_up(start, claims, devices):
    devices.traits = FakeDevices(checks=True).traits
    plugin = await start()
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    await plugin.prepare(reference(A), reference(B))
    devices.held["cam-0"] = asyncio.Event()
    plugin.answers.clear()
    work = asyncio.create_task(plugin.prepare(reference(A), reference(B)))
    await until(lambda: B in plugin.answers)
    assert A not in plugin.answers
    plugin.abandon(A)
    await work
    assert "stopped preparing it" in plugin.answers[A].error
    assert await plugin.states() == {A: "prepared", B: "prepared"}


async def test_rollbacks_do_not_wait_for_each_other(start, claims, devices):
    plugin = await start()
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


# ------------------------------------------------------------ recovery after a crash


async def test_an_undo_that_hangs_does_not_keep_recovery_from_the_others(start, claims, devices):
    plugin = await start()
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    await plugin.prepare(reference(A), reference(B))
    devices.reason_away = away
    await plugin.unprepare(reference(A))
    devices.reason_away = None
    devices.held["cam-0"] = asyncio.Event()
    first = asyncio.create_task(plugin.recovery.recover())
    await until(lambda: devices.unprepares == 2)

    devices.failing.add("cam-1")
    await plugin.unprepare(reference(B))
    devices.failing.clear()
    assert await plugin.recovery.recover() == 1, "the one that hangs"
    assert await plugin.states() == {A: "unpreparing"}
    devices.held["cam-0"].set()
    assert await first == 0


async def test_a_claim_that_recovery_has_undone_does_not_wait_for_one_that_hangs(
    start, claims, devices
):
    plugin = await start()
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    await plugin.prepare(reference(A), reference(B))
    devices.reason_away = away
    await plugin.unprepare(reference(A), reference(B))
    devices.reason_away = None
    devices.held["cam-0"] = asyncio.Event()
    recovery = asyncio.create_task(plugin.recovery.recover())
    async with asyncio.timeout(5):
        while await plugin.states() != {A: "unpreparing"}:
            await asyncio.sleep(0.001)
        assert await plugin.unprepare(reference(B)) == {B: None}
        assert (await plugin.prepare(reference(B)))[B].error is None
    assert not recovery.done()
    devices.held["cam-0"].set()
    assert await recovery == 0


async def test_claims_that_failed_together_are_undone_one_by_one(start, claims, devices):
    plugin = await start()
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    await plugin.prepare(reference(A), reference(B))
    devices.reason_away = away
    await plugin.unprepare(reference(A), reference(B))
    devices.reason_away = None
    under_way: set[str] = set()

    async def unprepare(device) -> None:
        """Prepare a whole batch in one call, which fails because cam-0 is broken."""
        under_way.add(device.name)
        together = set(under_way)
        await asyncio.sleep(0)
        together |= under_way
        under_way.discard(device.name)
        if "cam-0" in together:
            raise DriverError("the driver did not answer unprepare_claims within 300 s")

    devices.unprepare_device = lambda claim, device: unprepare(device)
    assert await plugin.recovery.recover() == 2
    assert await plugin.recovery.recover() == 1
    assert await plugin.states() == {A: "unpreparing"}


async def test_a_claim_that_a_crash_left_preparing_is_undone_at_the_next_start(
    start, claims, devices
):
    plugin = await start()
    devices.held["cam-0"] = asyncio.Event()
    claims.store(claim_body(A, "cam-0"))
    work = asyncio.create_task(plugin.prepare(reference(A)))
    await until(lambda: devices.prepares)
    work.cancel()
    await asyncio.wait({work})
    devices.held.clear()
    devices.prepared["cam-0"] = A

    plugin = await start()
    assert await plugin.states() == {A: "preparing"}
    assert await plugin.recovery.recover() == 0
    assert (devices.prepared, await plugin.states()) == ({}, {})


async def test_recovery_leaves_alone_what_is_worked_on(start, claims, devices):
    plugin = await start()
    devices.held["cam-0"] = asyncio.Event()
    claims.store(claim_body(A, "cam-0"))
    work = asyncio.create_task(plugin.prepare(reference(A)))
    await until(lambda: devices.prepares)

    assert await plugin.recovery.recover() == 1
    devices.held["cam-0"].set()
    assert (await work)[A].error is None


# ------------------------------------------------------------ what is prepared already


async def test_a_device_out_of_order_is_prepared_again(start, claims, devices):
    devices.traits = FakeDevices(checks=True).traits
    plugin = await start()
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    await plugin.prepare(reference(A), reference(B))
    devices.out_of_order.add("cam-0")

    answers = await plugin.prepare(reference(A), reference(B))

    assert [answer.error for answer in answers.values()] == [None, None]
    assert devices.prepares == 3


async def test_a_failure_to_prepare_again_takes_nothing_from_running_containers(
    start, claims, devices
):
    devices.traits = FakeDevices(checks=True).traits
    plugin = await start()
    claims.store(claim_body(A, "cam-0"))
    await plugin.prepare(reference(A))
    devices.out_of_order.add("cam-0")
    right = devices.prepare_device

    async def refuse(claim, device):
        raise away()

    devices.prepare_device = refuse
    assert (await plugin.prepare(reference(A)))[A].error is not None
    assert await plugin.states() == {A: "prepared"}
    assert len(plugin.files()) == 1
    assert devices.unprepares == 0
    devices.prepare_device = right
    assert (await plugin.prepare(reference(A)))[A].error is None


async def test_another_config_is_another_allocation(start, claims, devices):
    plugin = await start()
    body = claim_body(A, "cam-0")
    claims.store(body)
    await plugin.prepare(reference(A))
    body["status"]["allocation"]["devices"]["config"] = [config({"mode": "fast"})]

    assert (await plugin.prepare(reference(A)))[A].error is None
    assert (devices.prepares, devices.unprepares) == (2, 1)
    assert devices.seen[-1].configs == ({"mode": "fast"},)


# ------------------------------------------------------------ drivers without side effects


async def test_without_side_effects_nothing_is_undone_and_nothing_is_left(start, claims, devices):
    devices.traits = FakeDevices(side_effects=False).traits
    plugin = await start()
    devices.failing.add("broken")
    claims.store(claim_body(A, "cam-0", "broken"), claim_body(B, "cam-0"), claim_body(C, "cam-0"))

    answers = await plugin.prepare(reference(A), reference(B), reference(C))

    assert "broken is broken" in answers[A].error
    assert [answers[B].error is None, answers[C].error is None] == [True, False]
    assert "still prepared for" in answers[C].error
    assert plugin.files() == {f"{DRIVER}-claim_{B}.json"}
    assert await plugin.unprepare(reference(B)) == {B: None}
    assert (devices.unprepares, await plugin.states(), plugin.files()) == (0, {}, set())


async def test_without_side_effects_there_is_one_transaction(start, claims, devices):
    devices.traits = FakeDevices(side_effects=False).traits
    plugin = await start()
    states = []
    write = plugin.checkpoint.write

    async def watched(batch, **options):
        states.append({claim.state for claim in batch})
        return await write(batch, **options)

    plugin.checkpoint.write = watched
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    await plugin.prepare(reference(A), reference(B))
    assert states == [{"prepared"}]


async def test_without_the_api_server_a_rebuilt_claim_is_not_answered(start, claims, devices):
    plugin = await start()
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


async def test_nothing_is_answered_before_a_damaged_checkpoint_is_rebuilt(start, claims):
    plugin = await start()
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
    assert "no entry for the CDI files of 1 claims" in first[A]
    assert "no entry for the CDI files of 1 claims" in second[B]
    assert len(plugin.files()) == 1, "from which the entry is rebuilt"
    waits = asyncio.create_task(plugin.unprepare(reference(A)))
    await asyncio.sleep(0.01)
    assert not waits.done()
    plugin.engine.rebuilt.set()
    assert await waits == {A: None}


@pytest.mark.parametrize("bad", [None, "text", [1], 7], ids=["null", "text", "list", "number"])
async def test_parameters_that_are_no_object_are_an_error_of_the_claim(start, claims, bad):
    plugin = await start()
    body = claim_body(A, "cam-0")
    body["status"]["allocation"]["devices"]["config"] = [config(bad, source="FromClass")]
    claims.store(body)

    error = (await plugin.prepare(reference(A)))[A].error
    assert (
        f"opaque parameters for driver {DRIVER} in its DeviceClass are not a JSON object" in error
    )


async def test_parameters_nested_without_end_are_an_error_of_the_claim(start, claims):
    plugin = await start()
    deep: dict = {}
    for _ in range(900):
        deep = {"a": deep}
    body = claim_body(A, "cam-0")
    body["status"]["allocation"]["devices"]["config"] = [config(deep)]
    claims.store(body)

    assert "nested deeper than 64" in (await plugin.prepare(reference(A)))[A].error
