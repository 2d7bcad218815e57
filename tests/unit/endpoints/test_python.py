from __future__ import annotations

import asyncio
import gc
import logging
import threading
from contextlib import suppress

import pytest

from drakit import Device, DriverError, Edits
from drakit_daemon import logs
from drakit_nodeplugin.endpoints.contract import EndpointContext, traits_of
from drakit_nodeplugin.endpoints.failures import DeviceFailedError, EndpointStoppedError
from drakit_nodeplugin.endpoints.python import thread as threads
from drakit_nodeplugin.endpoints.python.loading import LoadedDriver, PythonEndpoint
from tests.unit.endpoints.camera import (
    CLAIM,
    DEVICE,
    NODE,
    OTHER,
    Camera,
    new_endpoint,
    running,
    until,
)


async def test_a_driver_runs_in_a_thread_of_its_own(endpoint, behaviour, listener):
    assert listener.inventories == [["cam-0"]]
    assert behaviour.thread is not threading.current_thread()
    assert await endpoint.prepare(CLAIM, [DEVICE]) == [Edits(env={"CAMERA": "0"})]
    await endpoint.unprepare(CLAIM, [DEVICE])
    assert await endpoint.check(CLAIM, [DEVICE]) is True


async def test_a_call_whose_cancellation_the_driver_swallows_holds_up_no_other(endpoint, behaviour):
    begun, stubborn = threading.Event(), threading.Event()

    async def swallow() -> Edits:
        begun.set()
        while not stubborn.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return Edits()

    behaviour.prepare = swallow
    call = asyncio.create_task(endpoint.prepare(CLAIM, [DEVICE]))
    await until(begun.is_set)
    call.cancel()
    await endpoint.unprepare(CLAIM, [OTHER])
    assert not call.done(), "the device is not free yet"
    stubborn.set()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_driver_that_blocks_hurts_only_its_own_calls(endpoint, behaviour):
    begun, go = threading.Event(), threading.Event()

    def block() -> Edits:
        begun.set()
        while not go.is_set():
            pass
        return Edits()

    behaviour.prepare = block
    first = asyncio.create_task(endpoint.prepare(CLAIM, [DEVICE]))
    await until(begun.is_set)
    second = asyncio.create_task(endpoint.unprepare(CLAIM, [OTHER]))
    await asyncio.sleep(0.05)
    assert not first.done()
    assert not second.done()
    go.set()
    assert await first == [Edits()]
    await second


async def test_cancelling_a_call_cancels_it_in_the_driver(endpoint, behaviour):
    begun, cancelled = threading.Event(), threading.Event()

    async def wait() -> Edits:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    behaviour.prepare = wait
    call = asyncio.create_task(endpoint.prepare(CLAIM, [DEVICE]))
    await until(begun.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(cancelled.is_set)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        pytest.param(SystemExit(3), "SystemExit: 3", id="exits"),
        pytest.param(KeyboardInterrupt("stop"), "KeyboardInterrupt: stop", id="interrupts"),
    ],
)
async def test_a_call_that_ends_the_thread_stops_the_driver_and_not_the_daemon(
    endpoint, behaviour, listener, failure, reason, caplog
):
    async def leave() -> Edits:
        raise type(failure)(*failure.args)

    behaviour.prepare = leave
    waiting = asyncio.create_task(endpoint.prepare(CLAIM, [DEVICE]))
    behind = asyncio.create_task(endpoint.unprepare(CLAIM, [DEVICE]))
    for call in (waiting, behind):
        with pytest.raises(
            EndpointStoppedError, match=f"stopped: (it ended in the meantime|{reason})"
        ):
            await call
    assert await listener.hear() == reason
    assert listener.inventories == [["cam-0"]]
    await listener.hear()
    assert listener.inventories == [["cam-0"], ["cam-0"]], "it lives again"
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_log_line_of_the_driver_has_the_id_of_the_request_behind_it(endpoint, behaviour):
    seen: list[str] = []

    async def log() -> Edits:
        seen.append(logs.request_id.get())
        return Edits()

    behaviour.prepare = log
    with logs.request_scope("k7f3"):
        await endpoint.prepare(CLAIM, [DEVICE])
    await endpoint.prepare(CLAIM, [DEVICE])
    assert seen == ["k7f3", "-"]


async def test_whether_the_driver_is_unavailable_has_the_reason_that_a_call_would_raise(
    behaviour, listener
):
    endpoint = new_endpoint(lambda: Camera(behaviour), listener)
    assert (endpoint.traits.side_effects, endpoint.traits.checks) == (True, True)
    assert endpoint.unavailable().reason == "it has not started yet"
    await endpoint.start()
    assert endpoint.unavailable() is None

    behaviour.end.set()
    await until(endpoint.unavailable)
    with pytest.raises(EndpointStoppedError) as raised:
        await endpoint.check(CLAIM, [DEVICE])
    assert str(raised.value) == str(endpoint.unavailable())
    await endpoint.close()
    assert endpoint.unavailable().reason == "the node plugin is stopping"


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        pytest.param(None, "its stream ended", id="returns"),
        pytest.param(ValueError("a bug"), "ValueError: a bug", id="raises"),
        pytest.param(DriverError("the bus is gone"), "the bus is gone", id="with-a-reason"),
        pytest.param(SystemExit(3), "SystemExit: 3", id="ends-its-thread"),
        pytest.param(KeyboardInterrupt("x"), "KeyboardInterrupt: x", id="interrupts"),
        pytest.param(asyncio.CancelledError(), "it canceled its own stream", id="cancels"),
        pytest.param(type("Odd", (Exception,), {"__str__": None})(), "Odd (no message)", id="odd"),
    ],
)
async def test_a_driver_whose_stream_ends_is_stopped_and_started_again(
    endpoint, behaviour, listener, failure, reason
):
    behaviour.failure = failure
    behaviour.end.set()
    assert (await listener.hear()).startswith(reason)
    behaviour.end.clear()
    await listener.hear()
    assert listener.inventories == [["cam-0"], ["cam-0"]]
    assert behaviour.made == 2
    assert await endpoint.prepare(CLAIM, [DEVICE]) == [Edits(env={"CAMERA": "0"})]


async def test_a_call_that_runs_while_the_driver_ends_is_no_cancellation_of_ours(
    endpoint, behaviour
):
    begun = threading.Event()

    async def wait() -> Edits:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    behaviour.prepare = wait
    call = asyncio.create_task(endpoint.prepare(CLAIM, [DEVICE]))
    await until(begun.is_set)
    behaviour.end.set()
    with pytest.raises(EndpointStoppedError, match="is stopped: it"):
        await call


async def test_a_call_that_raises_no_exception_of_python_fails_alone(endpoint, behaviour):
    class Panic(BaseException):
        """The exception that PyO3 raises for a panic in Rust."""

    async def panic() -> Edits:
        raise Panic("index out of bounds")

    works, behaviour.prepare = behaviour.prepare, panic
    with pytest.raises(DeviceFailedError, match="Panic: index out of bounds"):
        await endpoint.prepare(CLAIM, [DEVICE])
    behaviour.prepare = works
    assert await endpoint.prepare(CLAIM, [DEVICE]) == [Edits(env={"CAMERA": "0"})]


async def test_a_driver_that_refuses_its_configuration_is_not_started(behaviour, listener):
    behaviour.refuse = DriverError("policies[0].paths[0]: /dev/kvm cannot be read")
    endpoint = new_endpoint(lambda: Camera(behaviour), listener)
    with pytest.raises(DriverError, match="cannot be read"):
        await endpoint.start()
    with pytest.raises(EndpointStoppedError):
        await endpoint.prepare(CLAIM, [DEVICE])


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        pytest.param(
            ValueError("a bug"), "it could not be started: ValueError: a bug", id="raises"
        ),
        pytest.param(SystemExit(3), "it could not be started: SystemExit: 3", id="exits"),
    ],
)
async def test_a_driver_that_fails_in_its_start_is_started_again(
    behaviour, listener, short_delays, failure, reason
):
    behaviour.refuse = failure
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        assert await listener.hear() == reason
        await until(lambda: behaviour.made > 2)
        assert listener.told == [reason], "the same reason is told once"
        behaviour.refuse = DriverError("the bus is gone")
        await until(lambda: listener.reasons[-1] == "the bus is gone")
        behaviour.refuse = None
        await until(lambda: listener.inventories)


async def test_closing_ends_the_thread_and_closes_the_driver(behaviour, listener):
    endpoint = new_endpoint(lambda: Camera(behaviour), listener)
    await endpoint.start()
    await endpoint.close()
    assert behaviour.closed == 1
    with pytest.raises(EndpointStoppedError, match="the node plugin is stopping"):
        await endpoint.prepare(CLAIM, [DEVICE])


async def test_our_own_stop_is_no_stop_of_the_driver(behaviour, listener):
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        await listener.hear()
    assert listener.reasons == []


async def test_a_driver_that_starts_slowly_is_taken_once_it_is_there(
    behaviour, listener, monkeypatch, short_delays, caplog
):
    monkeypatch.setattr(threads, "START_SECONDS", 0.05)
    go = threading.Event()
    begun: list[threading.Thread] = []

    def make() -> Camera:
        begun.append(threading.current_thread())
        while not go.is_set():
            pass
        return Camera(behaviour)

    async with running(new_endpoint(make, listener)) as endpoint:
        assert await listener.hear() == "it is still starting"
        (slow,) = [record for record in caplog.records if record.msg == "driver is slow to start"]
        assert "make (" in slow.where
        assert "test_python.py, line" in slow.where
        with pytest.raises(EndpointStoppedError, match="it is still starting"):
            await endpoint.prepare(CLAIM, [DEVICE])
        await asyncio.sleep(0.2)
        assert len(begun) == 1, "no second thread hangs beside the first"

        go.set()
        await listener.hear()
        assert listener.inventories == [["cam-0"]]
        assert await endpoint.prepare(CLAIM, [DEVICE]) == [Edits(env={"CAMERA": "0"})]
    assert behaviour.closed == 1


async def test_a_driver_that_is_slow_to_list_its_devices_is_unavailable_until_it_has(
    behaviour, listener, monkeypatch
):
    monkeypatch.setattr(threads, "LIST_SECONDS", 0.05)
    go = threading.Event()

    async def devices(driver):
        while not go.is_set():
            await asyncio.sleep(0.01)
        yield [Device(name="cam-0", edits=Edits.of_device_nodes("/dev/camera0"))]
        await asyncio.Event().wait()

    behaviour.devices = devices
    async with running(new_endpoint(lambda: Camera(behaviour), listener)) as endpoint:
        assert await listener.hear() == "it has not listed its devices yet"
        assert endpoint.unavailable().reason == "it has not listed its devices yet"
        go.set()
        await until(lambda: endpoint.unavailable() is None)
        await until(lambda: listener.inventories)


async def test_a_driver_that_hangs_in_its_start_does_not_hold_up_the_stop(
    behaviour, listener, monkeypatch
):
    monkeypatch.setattr(threads, "START_SECONDS", 0.05)
    monkeypatch.setattr(threads, "CLOSE_SECONDS", 0.05)
    go = threading.Event()

    def make() -> Camera:
        go.wait(5)
        return Camera(behaviour)

    endpoint = new_endpoint(make, listener)
    await endpoint.start()
    async with asyncio.timeout(2):
        await endpoint.close()

    go.set()
    await until(lambda: behaviour.closed)


async def test_a_call_while_the_driver_is_being_closed_finds_it_stopped(
    endpoint, behaviour, listener, monkeypatch
):
    closing, go = threading.Event(), threading.Event()

    def close(self) -> None:
        closing.set()
        go.wait(5)

    monkeypatch.setattr(Camera, "close", close)
    behaviour.end.set()
    await until(closing.is_set)
    assert await listener.hear() == "its stream ended", "told before it has closed"
    with pytest.raises(EndpointStoppedError):
        await endpoint.unprepare(CLAIM, [DEVICE])
    await asyncio.sleep(0.1)
    assert behaviour.made == 1, "the next one does not begin beside it"
    go.set()
    await until(lambda: behaviour.made == 2)


async def test_a_driver_that_fails_to_close_keeps_the_reason_of_its_end(
    endpoint, behaviour, listener, monkeypatch, caplog
):
    def close(self) -> None:
        raise ValueError("a bug in close")

    monkeypatch.setattr(Camera, "close", close)
    behaviour.failure = DriverError("the bus is gone")
    behaviour.end.set()
    assert await listener.hear() == "the bus is gone"
    await until(lambda: behaviour.made == 2)
    errors = [r for r in caplog.records if r.msg == "driver failed to close"]
    assert "ValueError: a bug in close" in errors[0].exception


async def test_a_call_that_its_loop_never_begins_ends_with_the_driver(endpoint, behaviour):
    go = threading.Event()

    async def linger() -> Edits:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.get_running_loop().run_in_executor(None, go.wait, 5)
        raise AssertionError

    behaviour.prepare = linger
    first = asyncio.create_task(endpoint.prepare(CLAIM, [DEVICE]))
    await asyncio.sleep(0.05)
    behaviour.end.set()
    await asyncio.sleep(0.1)
    late = asyncio.create_task(endpoint.prepare(CLAIM, [DEVICE]))
    await asyncio.sleep(0.05)
    go.set()
    async with asyncio.timeout(5):
        for call in (first, late):
            with pytest.raises(EndpointStoppedError):
                await call


async def test_the_end_of_a_driver_is_logged_with_its_traceback(
    endpoint, behaviour, listener, caplog
):
    behaviour.failure = ValueError("a bug")
    behaviour.end.set()
    await listener.hear()
    await until(lambda: [r for r in caplog.records if r.msg == "endpoint stopped"])
    (record,) = [r for r in caplog.records if r.msg == "driver ended"]
    assert (record.levelno, record.exc_info) == (logging.ERROR, None)
    assert record.exception.startswith("Traceback (most recent call last):")
    assert record.exception.endswith("ValueError: a bug\n")


async def test_a_driver_without_a_generator_is_stopped_and_its_neighbours_are_served(
    behaviour, listener, short_delays
):
    async def forgets_to_yield():
        return [Device(name="cam-0")]

    behaviour.devices = lambda driver: forgets_to_yield()
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        assert await listener.hear() == (
            "it could not be started: its devices() never yields; it must be an async generator"
        )
        behaviour.devices = behaviour._devices
        await until(lambda: listener.inventories)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(threads.asyncio, "new_event_loop", id="files"),
        pytest.param(threading.Thread, "start", id="threads"),
    ],
)
async def test_a_process_that_is_out_of_something_tries_again(
    behaviour, listener, short_delays, monkeypatch, place, name
):
    endpoint = new_endpoint(lambda: Camera(behaviour), listener)
    with monkeypatch.context() as patched:

        def refuse(*_):
            raise RuntimeError("there is no more")

        patched.setattr(place, name, refuse)
        await endpoint.start()
        assert listener.reasons == ["it could not be started: RuntimeError: there is no more"]
    async with asyncio.timeout(5):
        task = asyncio.create_task(endpoint.run())
        await until(lambda: listener.inventories)
    task.cancel()
    await asyncio.wait({task})
    await endpoint.close()


async def test_a_driver_that_does_not_end_is_waited_for_once(behaviour, listener, monkeypatch):
    monkeypatch.setattr(threads, "CLOSE_SECONDS", 0.3)
    go = threading.Event()

    def close(self) -> None:
        while not go.is_set():
            pass

    monkeypatch.setattr(Camera, "close", close)
    endpoint = new_endpoint(lambda: Camera(behaviour), listener)
    await endpoint.start()
    began_at = asyncio.get_running_loop().time()
    await endpoint.close()
    assert asyncio.get_running_loop().time() - began_at < 0.6
    go.set()


def hosted(make, listener) -> PythonEndpoint:
    """The endpoint of a driver as the host makes it."""
    driver = LoadedDriver(name=Camera.name, make=make, traits=traits_of(Camera), where="here")
    context = EndpointContext(listener=listener, node=NODE, report=lambda diagnostic: None)
    return driver.endpoint(context)


async def test_a_driver_has_ended_once_it_has_closed(behaviour, listener, monkeypatch):
    monkeypatch.setattr(threads, "CLOSE_SECONDS", 0.05)
    go = threading.Event()
    monkeypatch.setattr(Camera, "close", lambda self: go.wait(5))
    endpoint = hosted(lambda: Camera(behaviour), listener)
    await endpoint.start()
    await endpoint.close()
    ended = asyncio.create_task(endpoint.ended())
    done, _ = await asyncio.wait({ended}, timeout=0.3)
    assert not done
    go.set()
    async with asyncio.timeout(5):
        await ended


async def test_a_driver_that_hangs_in_its_start_has_ended_once_it_was_closed(
    behaviour, listener, monkeypatch
):
    monkeypatch.setattr(threads, "START_SECONDS", 0.05)
    monkeypatch.setattr(threads, "CLOSE_SECONDS", 0.05)
    go = threading.Event()

    def make() -> Camera:
        go.wait(5)
        return Camera(behaviour)

    endpoint = hosted(make, listener)
    await endpoint.start()
    await endpoint.close()
    ended = asyncio.create_task(endpoint.ended())
    done, _ = await asyncio.wait({ended}, timeout=0.3)
    assert not done
    go.set()
    async with asyncio.timeout(5):
        await ended
    assert (behaviour.made, behaviour.closed) == (1, 1)


async def test_a_driver_that_was_never_started_has_ended(behaviour, listener):
    async with asyncio.timeout(1):
        await hosted(lambda: Camera(behaviour), listener).ended()
