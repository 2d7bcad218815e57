from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from drakit import AllocatedDevice, ClaimReference, Device, Driver, DriverError, Edits, logs
from drakit.driver import DriverConfig
from drakit_nodeplugin.endpoints import python as endpoints
from drakit_nodeplugin.endpoints.errors import EndpointStoppedError
from drakit_nodeplugin.endpoints.python import PythonEndpoint
from drakit_nodeplugin.endpoints.traits import DriverTraits, traits_of
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

    async def check(self, claim, device):
        return self.behaviour.check()

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
        self.check: Callable = lambda: True

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


def new_endpoint(make: Callable[[], Camera], listener: Listener) -> PythonEndpoint:
    return PythonEndpoint(Camera.name, make, traits=traits_of(Camera), listener=listener)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour()


@pytest.fixture
async def listener() -> Listener:
    return Listener()


@pytest.fixture
async def endpoint(behaviour, listener, monkeypatch):
    monkeypatch.setattr(endpoints, "RESTART_SECONDS", (0.01, 0.02))
    endpoint = new_endpoint(lambda: Camera(behaviour), listener)
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


async def test_a_call_behind_one_that_does_not_end_says_so(endpoint, behaviour, monkeypatch):
    monkeypatch.setattr(endpoints, "CALL_SECONDS", 0.05)
    stubborn = asyncio.Event()

    async def swallow() -> Edits:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await stubborn.wait()
        return Edits()

    behaviour.prepare = swallow
    with pytest.raises(DriverError, match="gave no answer to prepare"):
        await endpoint.prepare(CLAIM, DEVICE)
    with pytest.raises(DriverError, match="an earlier call for the device does not end, and unpr"):
        await endpoint.unprepare(CLAIM, DEVICE)
    monkeypatch.setattr(endpoints, "CALL_SECONDS", 300)
    other = AllocatedDevice(name="cam-1", pool="node-1", request="main")
    await endpoint.unprepare(CLAIM, other)


async def test_a_driver_that_blocks_hurts_only_its_own_calls(endpoint, behaviour, monkeypatch):
    monkeypatch.setattr(endpoints, "CALL_SECONDS", 0.05)
    begun, go = threading.Event(), threading.Event()

    async def block() -> Edits:
        begun.set()
        while not go.is_set():
            pass
        return Edits()

    behaviour.prepare = block
    other = AllocatedDevice(name="cam-1", pool="node-1", request="main")
    first = asyncio.create_task(endpoint.prepare(CLAIM, DEVICE))
    await until(begun.is_set)
    with pytest.raises(DriverError, match="gave no answer to unprepare within"):
        await endpoint.unprepare(CLAIM, other)
    with pytest.raises(DriverError, match="gave no answer to prepare within"):
        await first
    go.set()


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
    call = asyncio.create_task(endpoint.prepare(CLAIM, DEVICE))
    await until(begun.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(cancelled.is_set)


async def test_a_cancellation_of_the_drivers_own_is_its_failure(endpoint, behaviour):
    async def confuse() -> Edits:
        raise asyncio.CancelledError

    behaviour.prepare = confuse
    with pytest.raises(DriverError, match="failed in prepare: CallCancelledError"):
        await endpoint.prepare(CLAIM, DEVICE)


async def test_a_call_that_ends_the_thread_stops_the_driver_and_not_the_daemon(
    endpoint, behaviour, listener
):
    async def leave() -> Edits:
        raise SystemExit(3)

    behaviour.prepare = leave
    waiting = asyncio.create_task(endpoint.prepare(CLAIM, DEVICE))
    behind = asyncio.create_task(endpoint.unprepare(CLAIM, DEVICE))
    for call in (waiting, behind):
        with pytest.raises(EndpointStoppedError, match="it ended meanwhile"):
            await call
    await listener.hear()
    assert listener.reasons == ["SystemExit: 3"]


async def test_a_log_line_of_the_driver_has_the_id_of_the_request_behind_it(endpoint, behaviour):
    seen: list[str] = []

    async def log() -> Edits:
        seen.append(logs.request_id.get())
        return Edits()

    behaviour.prepare = log
    with logs.request_scope("k7f3"):
        await endpoint.prepare(CLAIM, DEVICE)
    await endpoint.prepare(CLAIM, DEVICE)
    assert seen == ["k7f3", "-"]


@pytest.mark.parametrize(
    ("answer", "in_order", "logged"),
    [
        pytest.param(True, True, None, id="in-order"),
        pytest.param(False, False, None, id="not-in-order"),
        pytest.param(None, False, "with NoneType, which is no bool", id="forgets-its-answer"),
        pytest.param(DriverError("the bus is slow"), False, "the bus is slow", id="cannot-tell"),
        pytest.param(ValueError("a bug"), False, "failed in check: ValueError", id="fails"),
    ],
)
async def test_a_check_says_whether_all_is_in_order(
    endpoint, behaviour, caplog, answer, in_order, logged
):
    def check() -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    behaviour.check = check
    assert await endpoint.check(CLAIM, DEVICE) is in_order
    errors = [record.error for record in caplog.records if hasattr(record, "error")]
    assert len(errors) == (logged is not None)
    assert (logged or "") in "".join(errors)


async def test_who_asks_whether_the_driver_is_away_hears_what_a_call_would_raise(
    behaviour, listener, monkeypatch
):
    monkeypatch.setattr(endpoints, "RESTART_SECONDS", (0.01, 0.02))
    endpoint = new_endpoint(lambda: Camera(behaviour), listener)
    assert endpoint.traits == DriverTraits(side_effects=True, checks=True)
    assert endpoint.away().reason == "it is not started yet"
    await endpoint.start()
    await listener.hear()
    assert endpoint.away() is None

    behaviour.end.set()
    await until(endpoint.away)
    with pytest.raises(EndpointStoppedError) as raised:
        await endpoint.check(CLAIM, DEVICE)
    assert str(raised.value) == str(endpoint.away())
    await endpoint.close()
    assert endpoint.away().reason == "the node plugin stops"


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
    endpoint = new_endpoint(lambda: Camera(behaviour), listener)
    with pytest.raises(DriverError, match="cannot be read"):
        await endpoint.start()
    with pytest.raises(EndpointStoppedError):
        await endpoint.prepare(CLAIM, DEVICE)


async def test_closing_ends_the_thread_and_closes_the_driver(behaviour, listener):
    endpoint = new_endpoint(lambda: Camera(behaviour), listener)
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

    endpoint = new_endpoint(make, listener)
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

    endpoint = new_endpoint(make, listener)
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


async def test_plain_functions_are_called_in_the_thread_of_the_driver(
    endpoint, behaviour, monkeypatch
):
    threads: list[threading.Thread] = []

    def prepare(self, claim, device) -> Edits:
        threads.append(threading.current_thread())
        return Edits()

    def check(self, claim, device) -> bool:
        threads.append(threading.current_thread())
        return True

    monkeypatch.setattr(Camera, "prepare", prepare)
    monkeypatch.setattr(Camera, "check", check)
    assert await endpoint.prepare(CLAIM, DEVICE) == Edits()
    assert await endpoint.check(CLAIM, DEVICE) is True
    assert threads == [behaviour.thread, behaviour.thread]


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
    endpoint = new_endpoint(lambda: Camera(behaviour), listener)
    await endpoint.start()
    task = asyncio.create_task(endpoint.run())
    await listener.hear()
    assert listener.reasons == ["it listed str, which is no Device; this is a fault of the driver"]
    task.cancel()
    await asyncio.wait({task})
    await endpoint.close()
