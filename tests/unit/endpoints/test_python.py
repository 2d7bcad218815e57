from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from drakit import AllocatedDevice, ClaimReference, Device, Driver, DriverError, Edits
from drakit.driver import DriverConfig
from drakit_nodeplugin.endpoints import python as endpoints
from drakit_nodeplugin.endpoints.errors import EndpointStoppedError
from drakit_nodeplugin.endpoints.python import PythonEndpoint
from tests.fakes.node import StaticNode

CLAIM = ClaimReference(namespace="lab", name="cam", uid="uid-a")
DEVICE = AllocatedDevice(name="cam-0", pool="node-1", request="main")


class Camera(Driver[DriverConfig]):
    """A driver whose devices and calls a test decides."""

    name = "camera.example.com"

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(DriverConfig(), StaticNode(name="node-1"))
        self.behaviour = behaviour
        behaviour.made += 1
        if behaviour.refuse is not None:
            raise behaviour.refuse

    async def devices(self):
        self.behaviour.thread = threading.current_thread()
        yield [Device(name="cam-0")]
        while not self.behaviour.end.is_set():
            await asyncio.sleep(0.01)
        if self.behaviour.failure is not None:
            raise self.behaviour.failure

    async def prepare(self, claim, device):
        return await self.behaviour.prepare()

    def close(self):
        self.behaviour.closed += 1


class Behaviour:
    def __init__(self) -> None:
        self.made = 0
        self.closed = 0
        self.end = threading.Event()
        self.failure: BaseException | None = None
        self.refuse: Exception | None = None
        self.thread: threading.Thread | None = None
        self.prepare: Callable = self._prepare

    async def _prepare(self) -> Edits:
        return Edits(env={"CAMERA": "0"})


class Listener:
    def __init__(self) -> None:
        self.inventories: list[tuple[Device, ...]] = []
        self.reasons: list[str] = []
        self.news = asyncio.Event()

    def replaced(self, inventory) -> None:
        self.inventories.append(inventory)
        self.news.set()

    def stopped(self, reason) -> None:
        self.reasons.append(reason)
        self.news.set()

    async def hear(self) -> None:
        async with asyncio.timeout(5):
            await self.news.wait()
        self.news.clear()


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour()


@pytest.fixture
async def listener() -> Listener:
    return Listener()


@pytest.fixture
async def endpoint(behaviour, listener, monkeypatch):
    monkeypatch.setattr(endpoints, "RESTART_SECONDS", (0.01, 0.02))
    endpoint = PythonEndpoint(Camera.name, lambda: Camera(behaviour), listener=listener)
    await endpoint.start()
    await listener.hear()
    task = asyncio.create_task(endpoint.run())
    yield endpoint
    behaviour.end.set()
    task.cancel()
    await asyncio.wait({task})
    await endpoint.close()


async def test_a_driver_runs_in_a_thread_of_its_own(endpoint, behaviour, listener):
    assert listener.inventories == [(Device(name="cam-0"),)]
    assert behaviour.thread is not threading.current_thread()
    assert await endpoint.prepare(CLAIM, DEVICE) == Edits(env={"CAMERA": "0"})
    await endpoint.unprepare(CLAIM, DEVICE)


async def test_a_driver_error_is_passed_on_and_any_other_is_named(endpoint, behaviour):
    async def refuse() -> Edits:
        raise DriverError("the lens is dirty; clean it")

    async def fail() -> Edits:
        raise ValueError("a bug")

    behaviour.prepare = refuse
    with pytest.raises(DriverError, match=r"^the lens is dirty; clean it$"):
        await endpoint.prepare(CLAIM, DEVICE)
    behaviour.prepare = fail
    with pytest.raises(DriverError, match="failed in prepare: ValueError: a bug"):
        await endpoint.prepare(CLAIM, DEVICE)


async def test_a_driver_that_hangs_is_cut_off(endpoint, behaviour, monkeypatch):
    monkeypatch.setattr(endpoints, "CALL_SECONDS", 0.05)

    async def hang() -> Edits:
        await asyncio.Event().wait()
        raise AssertionError

    behaviour.prepare = hang
    with pytest.raises(DriverError, match="gave no answer to prepare within"):
        await endpoint.prepare(CLAIM, DEVICE)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        pytest.param(None, "its stream ended", id="returns"),
        pytest.param(ValueError("a bug"), "ValueError: a bug", id="raises"),
        pytest.param(DriverError("the bus is gone"), "the bus is gone", id="says-why"),
        pytest.param(SystemExit(3), "SystemExit: 3", id="ends-its-thread"),
    ],
)
async def test_a_driver_whose_stream_ends_is_stopped_and_started_again(
    endpoint, behaviour, listener, failure, reason
):
    behaviour.failure = failure
    behaviour.end.set()
    await listener.hear()
    assert listener.reasons == [reason]
    behaviour.end.clear()
    await listener.hear()
    assert behaviour.made == 2
    assert await endpoint.prepare(CLAIM, DEVICE) == Edits(env={"CAMERA": "0"})


async def test_a_call_that_runs_while_the_driver_ends_is_no_cancellation_of_ours(
    endpoint, behaviour
):
    begun = threading.Event()

    async def wait() -> Edits:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    behaviour.prepare = wait
    call = asyncio.create_task(endpoint.prepare(CLAIM, DEVICE))
    while not begun.is_set():
        await asyncio.sleep(0.01)
    behaviour.end.set()
    with pytest.raises(EndpointStoppedError, match="is stopped: it ended meanwhile"):
        await call


async def test_a_driver_that_refuses_its_configuration_is_not_started(behaviour, listener):
    behaviour.refuse = DriverError("policies[0].paths[0]: /dev/kvm cannot be read")
    endpoint = PythonEndpoint(Camera.name, lambda: Camera(behaviour), listener=listener)
    with pytest.raises(DriverError, match="cannot be read"):
        await endpoint.start()
    with pytest.raises(EndpointStoppedError):
        await endpoint.prepare(CLAIM, DEVICE)


async def test_closing_ends_the_thread_and_closes_the_driver(behaviour, listener):
    endpoint = PythonEndpoint(Camera.name, lambda: Camera(behaviour), listener=listener)
    await endpoint.start()
    await listener.hear()
    await endpoint.close()
    assert behaviour.closed == 1
    with pytest.raises(EndpointStoppedError, match="the node plugin stops"):
        await endpoint.prepare(CLAIM, DEVICE)


async def test_a_driver_that_starts_slowly_is_taken_once_it_is_there(
    behaviour, listener, monkeypatch
):
    monkeypatch.setattr(endpoints, "START_SECONDS", 0.05)
    monkeypatch.setattr(endpoints, "RESTART_SECONDS", (0.01, 0.02))
    go = threading.Event()
    threads: list[threading.Thread] = []

    def make() -> Camera:
        threads.append(threading.current_thread())
        go.wait(5)
        return Camera(behaviour)

    endpoint = PythonEndpoint(Camera.name, make, listener=listener)
    await endpoint.start()
    await listener.hear()
    assert listener.reasons == ["it is still starting after 0 s"]
    with pytest.raises(EndpointStoppedError, match="it is still starting"):
        await endpoint.prepare(CLAIM, DEVICE)
    task = asyncio.create_task(endpoint.run())
    await asyncio.sleep(0.2)
    assert len(threads) == 1, "no second thread hangs beside the first"

    go.set()
    await listener.hear()
    assert listener.inventories == [(Device(name="cam-0"),)]
    assert await endpoint.prepare(CLAIM, DEVICE) == Edits(env={"CAMERA": "0"})
    task.cancel()
    await asyncio.wait({task})
    await endpoint.close()
    assert behaviour.closed == 1


async def test_a_driver_that_hangs_in_its_start_does_not_hold_up_the_stop(
    behaviour, listener, monkeypatch
):
    monkeypatch.setattr(endpoints, "START_SECONDS", 0.05)
    monkeypatch.setattr(endpoints, "CLOSE_SECONDS", 0.05)
    go = threading.Event()

    def make() -> Camera:
        go.wait(5)
        return Camera(behaviour)

    endpoint = PythonEndpoint(Camera.name, make, listener=listener)
    await endpoint.start()
    async with asyncio.timeout(2):
        await endpoint.close()

    go.set()
    async with asyncio.timeout(5):
        while not behaviour.closed:
            await asyncio.sleep(0.01)


async def test_edits_that_are_none_are_the_drivers_fault(endpoint, behaviour):
    async def forget() -> None:
        return None

    behaviour.prepare = forget
    with pytest.raises(DriverError, match="answered prepare with NoneType, which is no Edits"):
        await endpoint.prepare(CLAIM, DEVICE)


async def test_a_plain_function_does_not_run_in_the_loop_of_the_daemon(
    endpoint, behaviour, monkeypatch
):
    threads: list[threading.Thread] = []

    def prepare(self, claim, device) -> Edits:
        threads.append(threading.current_thread())
        return Edits()

    monkeypatch.setattr(Camera, "prepare", prepare)
    with pytest.raises(DriverError, match="failed in prepare: TypeError"):
        await endpoint.prepare(CLAIM, DEVICE)
    assert threads == [behaviour.thread]


async def test_a_timeout_of_the_drivers_own_is_not_told_as_ours(endpoint, behaviour):
    async def fail() -> Edits:
        raise TimeoutError("the bus is slow")

    behaviour.prepare = fail
    with pytest.raises(DriverError, match="failed in prepare: TimeoutError: the bus is slow"):
        await endpoint.prepare(CLAIM, DEVICE)


async def test_a_call_while_the_driver_is_being_closed_finds_it_stopped(
    endpoint, behaviour, listener, monkeypatch
):
    closing, go = threading.Event(), threading.Event()

    def close(self) -> None:
        closing.set()
        go.wait(5)

    monkeypatch.setattr(Camera, "close", close)
    behaviour.end.set()
    async with asyncio.timeout(5):
        while not closing.is_set():
            await asyncio.sleep(0.01)
    with pytest.raises(EndpointStoppedError):
        await endpoint.unprepare(CLAIM, DEVICE)
    go.set()


async def test_a_call_that_its_loop_never_begins_ends_with_the_driver(
    endpoint, behaviour, listener
):
    async def linger() -> Edits:
        try:
            await asyncio.Event().wait()
        finally:
            # Keeps the loop in its last round, in which no new task is cancelled any more.
            await asyncio.get_running_loop().run_in_executor(None, go.wait, 5)
        raise AssertionError

    go = threading.Event()
    behaviour.prepare = linger
    first = asyncio.create_task(endpoint.prepare(CLAIM, DEVICE))
    await asyncio.sleep(0.05)
    behaviour.end.set()
    await asyncio.sleep(0.1)
    behaviour.prepare = asyncio.Event().wait
    late = asyncio.create_task(endpoint.prepare(CLAIM, DEVICE))
    await asyncio.sleep(0.05)
    go.set()
    async with asyncio.timeout(5):
        for call in (first, late):
            with pytest.raises(EndpointStoppedError):
                await call


async def test_an_inventory_of_something_else_stops_the_driver_with_a_reason(
    listener, behaviour, monkeypatch
):
    async def devices(self):
        yield ["cam-0"]

    monkeypatch.setattr(Camera, "devices", devices)
    endpoint = PythonEndpoint(Camera.name, lambda: Camera(behaviour), listener=listener)
    await endpoint.start()
    task = asyncio.create_task(endpoint.run())
    await listener.hear()
    assert listener.reasons == ["it listed str, which is no Device; this is a fault of the driver"]
    task.cancel()
    await asyncio.wait({task})
    await endpoint.close()
