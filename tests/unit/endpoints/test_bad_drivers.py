"""Drivers that misbehave, in their own threads: each harms only itself."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from drakit import Device, Edits
from drakit_driver.runtime import loop
from drakit_driver.runtime.failures import EndpointStoppedError
from tests.unit.endpoints.camera import (
    CLAIM,
    DEVICE,
    OTHER,
    PREPARED,
    Behaviour,
    Camera,
    Listener,
    new_endpoint,
    running,
    until,
)

FLOOD = (
    "it yielded more than 2,000 inventories within a second; this is a bug in the driver, which "
    "must wait for a change before it yields again"
)


def records(caplog, text: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.msg == text]


async def never_waits(driver):
    while True:
        yield [Device(name="cam-0")]


async def test_a_flood_stops_its_driver(behaviour, listener):
    behaviour.devices = never_waits
    async with running(new_endpoint(lambda: Camera(behaviour), listener)) as endpoint:
        await until(lambda: FLOOD in listener.reasons)
        assert len(listener.inventories) < 100
        with pytest.raises(EndpointStoppedError, match="more than 2,000"):
            await endpoint.prepare(CLAIM, [DEVICE])


async def test_a_driver_that_is_stopped_can_clean_up_in_its_loop(behaviour, listener):
    cleaned: list[str] = []

    async def devices(driver):
        try:
            yield [Device(name="cam-0")]
            yield ["nonsense"]
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(threading.current_thread().name)

    behaviour.devices = devices
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        await until(lambda: cleaned and listener.reasons)
    assert set(cleaned) == {"driver-camera.example.com"}
    assert listener.reasons[0] == (
        "it listed str, which is not a Device; this is a bug in the driver"
    )


async def test_tasks_that_a_driver_leaves_behind_are_ended_and_named(
    behaviour, listener, short_delays, caplog
):
    ended: list[str] = []

    async def leak():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("leak")

    async def devices(driver):
        driver.kept = asyncio.create_task(leak(), name="bus-reader")
        yield [Device(name="cam-0")]
        await asyncio.sleep(0.05)

    behaviour.devices = devices
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        await until(lambda: behaviour.made == 2)
        assert ended[:1] == ["leak"]
    (record, *_) = records(caplog, "driver left tasks behind")
    assert (record.levelno, record.count, record.driver) == (logging.WARNING, 1, Camera.name)
    assert record.tasks.startswith("bus-reader (test_tasks_that")
    assert not records(caplog, "driver's tasks did not stop in time and are abandoned")


async def test_a_call_in_flight_is_no_task_that_was_left_behind(
    endpoint, behaviour, listener, caplog
):
    begun, undone = threading.Event(), []

    async def work():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            undone.append(True)

    behaviour.prepare = work
    call = asyncio.create_task(endpoint.prepare(CLAIM, [DEVICE]))
    await until(begun.is_set)
    behaviour.end.set()
    with pytest.raises(EndpointStoppedError, match="is unavailable: it"):
        await call
    await until(lambda: behaviour.closed)
    assert undone == [True], "what it began is undone before the driver is closed"
    assert not records(caplog, "driver left tasks behind")


async def test_tasks_and_threads_that_do_not_end_do_not_keep_the_driver_from_living_again(
    behaviour, listener, short_delays, caplog, monkeypatch
):
    monkeypatch.setattr(loop, "TASKS_SECONDS", 0.05)
    monkeypatch.setattr(loop, "_left", set())
    go = threading.Event()

    async def swallow():
        while not go.is_set():
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    def job():
        while not go.is_set():
            time.sleep(0.01)

    async def devices(driver):
        driver.kept = asyncio.create_task(swallow(), name="stubborn")
        driver.job = asyncio.get_running_loop().run_in_executor(None, job)
        yield [Device(name="cam-0")]
        behaviour.devices = behaviour._devices

    behaviour.devices = devices
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        await until(lambda: behaviour.made == 2)
        await until(lambda: listener.inventories)
    go.set()
    for task in loop._left:
        task._log_destroy_pending = False  # asyncio would say so at the end of the tests
    (record,) = records(caplog, "driver's tasks did not stop in time and are abandoned")
    assert record.tasks.startswith("stubborn (")
    assert records(caplog, "driver's threads did not stop in time and are abandoned")


async def test_a_task_that_exits_while_the_loop_ends_does_not_cut_the_rest_short(
    behaviour, listener, short_delays, caplog
):
    ended: list[str] = []

    async def leak(name):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if name == "exits":
                raise SystemExit(3) from None
            await asyncio.sleep(0.01)
            ended.append(name)

    leaked: list[asyncio.Task[None]] = []

    async def devices(driver):
        leaked.extend(asyncio.create_task(leak(name)) for name in ("exits", "exits", "ends"))
        yield [Device(name="cam-0")]
        behaviour.devices = behaviour._devices

    behaviour.devices = devices
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        await until(lambda: behaviour.made == 2)
    assert ended == ["ends"]
    # Retrieved here, or asyncio logs the exits into whichever test is running when it collects.
    assert [type(task.exception()) for task in leaked] == [SystemExit, SystemExit, type(None)]
    # Before that it may have been seen while it ended.
    assert "its stream ended" in listener.reasons


async def test_a_driver_that_blocks_is_named_and_delays_no_other(
    endpoint, behaviour, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(loop, "PERIOD_SECONDS", 0.02)
    monkeypatch.setattr(loop, "LOG_SECONDS", (0.2, 30))
    go = threading.Event()

    def block_the_bus() -> Edits:
        while not go.is_set():
            pass
        return Edits()

    behaviour.prepare = block_the_bus
    other_behaviour, other_listener = Behaviour(), Listener()
    async with running(new_endpoint(lambda: Camera(other_behaviour), other_listener)) as other:
        call = asyncio.create_task(endpoint.prepare(CLAIM, [DEVICE]))
        await until(lambda: endpoint.blocked)
        behind = asyncio.create_task(endpoint.unprepare(CLAIM, [OTHER]))
        assert "block_the_bus (" in endpoint.blocked
        assert "test_bad_drivers.py, line " in endpoint.blocked
        assert endpoint.unavailable() is None, "it may answer again"
        assert other.blocked is None
        assert await other.prepare(CLAIM, [DEVICE, OTHER]) == [PREPARED] * 2
        assert not any(each.done() for each in (call, behind))
        go.set()
        await asyncio.gather(call, behind)
        await until(lambda: endpoint.blocked is None)
    # On a busy machine, a loop can be late for other reasons, too.
    (warning,) = (
        record
        for record in records(caplog, "driver blocks its event loop")
        if record.where.startswith("test_a_driver_that_blocks")
    )
    assert (warning.levelno, warning.driver) == (logging.WARNING, Camera.name)
    end = records(caplog, "driver responds again")[0]
    assert end.levelno == logging.INFO
    assert end.seconds >= 0
