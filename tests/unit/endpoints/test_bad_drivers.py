"""Drivers that misbehave, in their own threads: each harms only itself."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from drakit import Device, Edits
from drakit_nodeplugin.endpoints import latest_value
from drakit_nodeplugin.endpoints.failures import EndpointStoppedError
from drakit_nodeplugin.endpoints.python import loop
from tests.unit.endpoints.camera import (
    CLAIM,
    DEVICE,
    OTHER,
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


async def gives_way(driver):
    while True:
        yield [Device(name="cam-0")]
        await asyncio.sleep(0)


@pytest.mark.parametrize("devices", [never_waits, gives_way])
async def test_a_flood_stops_its_driver_and_leaves_the_loop_of_the_daemon_alone(
    behaviour, listener, devices
):
    behaviour.devices = devices
    loop = asyncio.get_running_loop()
    async with running(new_endpoint(lambda: Camera(behaviour), listener)) as endpoint:
        await until(lambda: FLOOD in listener.reasons)
        assert endpoint.unavailable().reason == FLOOD
        assert len(listener.inventories) < 100
        with pytest.raises(EndpointStoppedError, match="more than 2,000"):
            await endpoint.prepare(CLAIM, [DEVICE])
        began_at = loop.time()
        await asyncio.sleep(0)
        assert loop.time() - began_at < 0.5


async def test_only_the_latest_inventory_of_a_driver_that_yields_often_is_reported_and_rarely(
    behaviour, listener
):
    yields = 300

    async def devices(driver):
        for number in range(yields + 1):
            yield [Device(name=f"cam-{number}")]
            await asyncio.sleep(0.001)
        await asyncio.Event().wait()

    behaviour.devices = devices
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        began_at = time.monotonic()
        await until(lambda: listener.inventories[-1:] == [[f"cam-{yields}"]])
        # The first at once, then one in 100 ms.
        assert len(listener.inventories) <= 2 + (time.monotonic() - began_at) / 0.1


async def test_an_inventory_that_was_not_reported_before_the_end_is_never_reported(
    behaviour, listener, monkeypatch
):
    """A driver that yields its last inventory while the previous one is being read, and then
    ends."""

    async def devices(driver):
        yield [Device(name="cam-0")]
        await asyncio.sleep(0.1)  # the first has been taken
        yield [Device(name="cam-1")]
        yield [Device(name="cam-2")]

    monkeypatch.setattr(latest_value, "PACE_SECONDS", 1)
    behaviour.devices = devices
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        await until(lambda: listener.reasons)
        assert listener.told[1:] == ["its stream ended"]
        assert listener.inventories == [["cam-0"]]


async def test_nonsense_stops_its_driver_with_a_reason(behaviour, listener):
    async def devices(driver):
        yield ["cam-0"]

    behaviour.devices = devices
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        await until(lambda: listener.reasons)
        assert listener.reasons[-1] == (
            "it listed str, which is not a Device; this is a bug in the driver"
        )


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
        await until(lambda: cleaned)
    assert set(cleaned) == {"driver-camera.example.com"}


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
    undone: list[bool] = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            undone.append(True)

    behaviour.prepare = work
    call = asyncio.create_task(endpoint.prepare(CLAIM, [DEVICE]))
    await asyncio.sleep(0.05)
    behaviour.end.set()
    with pytest.raises(EndpointStoppedError):
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
        assert "block_the_bus (" in endpoint.blocked
        assert "test_bad_drivers.py, line " in endpoint.blocked
        assert endpoint.unavailable() is None, "it may answer again"
        assert other.blocked is None
        assert await other.prepare(CLAIM, [DEVICE, OTHER]) == [Edits(env={"CAMERA": "0"})] * 2
        go.set()
        await call
        await until(lambda: endpoint.blocked is None)
    # On a busy machine, a loop can be late for other reasons, too.
    (warning,) = (
        record
        for record in records(caplog, "driver blocks its event loop")
        if record.where.startswith("test_a_driver_that_blocks")
    )
    assert (warning.levelno, warning.driver) == (logging.WARNING, Camera.name)
    end = records(caplog, "driver answers again")[0]
    assert end.levelno == logging.INFO
    assert end.seconds >= 0
