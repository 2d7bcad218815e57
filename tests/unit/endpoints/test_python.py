from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from drakit import Device, DriverError, Edits
from drakit.device import Health, Inventory
from drakit_daemon import logs
from drakit_driver.runtime import thread as threads
from drakit_driver.runtime.contract import DeviceKey, EndpointContext, HealthReport, traits_of
from drakit_driver.runtime.failures import DeviceFailedError, EndpointStoppedError
from drakit_driver.runtime.loading import LoadedDriver, PythonEndpoint
from tests.unit.endpoints.camera import (
    CLAIM,
    DEVICE,
    NODE,
    OTHER,
    PREPARED,
    Camera,
    new_endpoint,
    running,
    until,
)


async def test_a_driver_runs_in_a_thread_of_its_own(endpoint, behaviour, listener):
    assert listener.inventories == [["cam-0"]]
    assert behaviour.thread is not threading.current_thread()
    assert await endpoint.prepare(CLAIM, [DEVICE]) == [PREPARED]
    await endpoint.unprepare(CLAIM, [DEVICE])
    assert await endpoint.check(CLAIM, [DEVICE]) is True


async def test_a_call_whose_cancellation_the_driver_swallows_holds_up_no_other(endpoint, behaviour):
    begun, cancelled, stubborn = threading.Event(), threading.Event(), threading.Event()

    async def swallow() -> Edits:
        begun.set()
        while not stubborn.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                cancelled.set()
        return Edits()

    behaviour.prepare = swallow
    call = asyncio.create_task(endpoint.prepare(CLAIM, [DEVICE]))
    await until(begun.is_set)
    call.cancel()
    await until(cancelled.is_set)
    await endpoint.unprepare(CLAIM, [OTHER])
    assert not call.done(), "the device is not free yet"
    stubborn.set()
    with pytest.raises(asyncio.CancelledError):
        await call


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
            EndpointStoppedError, match=f"is unavailable: (it ended in the meantime|{reason})"
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
    assert await endpoint.prepare(CLAIM, [DEVICE]) == [PREPARED]


async def test_a_call_that_raises_no_exception_of_python_fails_alone(endpoint, behaviour):
    class Panic(BaseException):
        """The exception that PyO3 raises for a panic in Rust."""

    async def panic() -> Edits:
        raise Panic("index out of bounds")

    works, behaviour.prepare = behaviour.prepare, panic
    with pytest.raises(DeviceFailedError, match="Panic: index out of bounds"):
        await endpoint.prepare(CLAIM, [DEVICE])
    behaviour.prepare = works
    assert await endpoint.prepare(CLAIM, [DEVICE]) == [PREPARED]


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
    async with running(new_endpoint(lambda: Camera(behaviour), listener)) as endpoint:
        await listener.hear()
    assert behaviour.closed == 1
    with pytest.raises(EndpointStoppedError, match="the node plugin is stopping"):
        await endpoint.prepare(CLAIM, [DEVICE])
    assert listener.reasons == [], "our own stop is no stop of the driver"


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
        go.set()
        await listener.hear()
        assert listener.inventories == [["cam-0"]]
        assert await endpoint.prepare(CLAIM, [DEVICE]) == [PREPARED]
        assert len(begun) == 1, "no second thread hung beside the first"
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
    await asyncio.sleep(0.05)
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


async def forgets_to_yield(driver):
    return [Device(name="cam-0")]


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        pytest.param(forgets_to_yield, "never yields", id="forgets-to-yield"),
        pytest.param(lambda driver: [], "returned list", id="returns"),
    ],
)
async def test_a_driver_without_a_generator_is_stopped(
    behaviour, listener, short_delays, devices, problem
):
    behaviour.devices = devices
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        assert (await listener.hear()).startswith(
            f"it could not be started: its devices() {problem}; it must be an async generator"
        )
        behaviour.devices = behaviour._devices
        await until(lambda: listener.inventories)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(threads, "new_event_loop", id="files"),
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
    task = asyncio.create_task(endpoint.run())
    await until(lambda: listener.inventories)
    task.cancel()
    await asyncio.wait({task})
    await endpoint.close()


def hosted(make, listener) -> PythonEndpoint:
    """The endpoint of a driver as the host makes it."""
    driver = LoadedDriver(name=Camera.name, make=make, traits=traits_of(Camera), where="here")
    context = EndpointContext(listener=listener, node=NODE)
    return driver.endpoint(context)


async def closed_before_its_end(endpoint: PythonEndpoint, go: threading.Event) -> None:
    """Close an endpoint whose driver hangs until `go`: the close gives up, the end waits."""
    await endpoint.start()
    async with asyncio.timeout(4):
        await endpoint.close()
    ended = asyncio.create_task(endpoint.ended())
    done, _ = await asyncio.wait({ended}, timeout=0.1)
    assert not done
    go.set()
    async with asyncio.timeout(5):
        await ended


async def test_a_driver_has_ended_once_it_has_closed(behaviour, listener, monkeypatch):
    monkeypatch.setattr(threads, "CLOSE_SECONDS", 0.05)
    go = threading.Event()
    monkeypatch.setattr(Camera, "close", lambda self: go.wait(5))
    await closed_before_its_end(hosted(lambda: Camera(behaviour), listener), go)


async def test_a_driver_that_hangs_in_its_start_has_ended_once_it_was_closed(
    behaviour, listener, monkeypatch
):
    monkeypatch.setattr(threads, "START_SECONDS", 0.05)
    monkeypatch.setattr(threads, "CLOSE_SECONDS", 0.05)
    go = threading.Event()

    def make() -> Camera:
        go.wait(5)
        return Camera(behaviour)

    await closed_before_its_end(hosted(make, listener), go)
    assert (behaviour.made, behaviour.closed) == (1, 1)


async def test_a_driver_that_was_never_started_has_ended(behaviour, listener):
    async with asyncio.timeout(1):
        await hosted(lambda: Camera(behaviour), listener).ended()


# ------------------------------------------------------------ health


class PolledCamera(Camera):
    health_period_seconds = 0.1

    async def health(self, device):
        return self.behaviour.health(device)


def polled(behaviour, listener):
    return new_endpoint(lambda: PolledCamera(behaviour), listener, PolledCamera)


async def test_health_is_reported_after_the_inventory_and_beside_calls_for_the_device(
    behaviour, listener
):
    begun = threading.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    behaviour.health = lambda device: Health.healthy()
    behaviour.prepare = wait
    async with running(polled(behaviour, listener)) as endpoint:
        assert isinstance(await listener.hear(), Inventory)
        key = DeviceKey("", "cam-0")
        assert await listener.hear() == HealthReport(devices={key: Health.healthy()})
        call = asyncio.create_task(endpoint.prepare(CLAIM, [DEVICE]))
        await until(begun.is_set)
        behaviour.health = lambda device: Health.unhealthy("dirty")
        assert await listener.hear() == HealthReport(devices={key: Health.unhealthy("dirty")})
        call.cancel()
        await asyncio.wait({call})


async def test_a_health_that_ends_the_thread_stops_the_driver(behaviour, listener, short_delays):

    def leave(device):
        behaviour.health = lambda device: Health.healthy()
        raise SystemExit(3)

    behaviour.health = leave
    async with running(polled(behaviour, listener)):
        while not isinstance(told := await listener.hear(), HealthReport):
            pass
        assert listener.reasons[-1] == "SystemExit: 3"
        assert list(told.devices.values()) == [Health.healthy()]
