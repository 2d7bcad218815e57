from __future__ import annotations

import asyncio
import logging

import pytest

from drakit import Device, DriverError
from drakit.device import Health, Inventory
from drakit_driver.runtime.contract import ConnectionEndedError, DeviceKey, HealthReport
from drakit_driver.runtime.endpoint import Lifecycle

pytestmark = pytest.mark.looptime

CAM = Inventory(devices=(Device(name="cam-0"),))
MIC = Inventory(devices=(Device(name="mic-0"),))
SICK = HealthReport(devices={DeviceKey("", "cam-0"): Health.unhealthy("the lens is dirty")})


class FakeConnection:
    """Reports the test's updates at the given times, and then ends as requested."""

    def __init__(self, *updates, seconds: float = 0.0, end: BaseException | None = None) -> None:
        self.told = updates
        self.seconds = seconds
        self.end = end
        ready = updates and isinstance(updates[0], Inventory)
        self.unavailable: str | None = None if ready else "it has not listed anything"
        self.closed = 0

    async def inventories(self):
        for update in self.told:
            if isinstance(update, int | float):
                await asyncio.sleep(update)
            else:
                self.unavailable = None
                yield update
        await asyncio.sleep(self.seconds)
        self.unavailable = "it is over"
        if self.end is not None:
            raise self.end

    async def close(self) -> None:
        self.closed += 1


class Listener:
    """The notifications and their times."""

    def __init__(self) -> None:
        self.told: list[tuple[float, object]] = []

    def _tell(self, endpoint: str, what: object) -> None:
        assert endpoint == "camera"
        self.told.append((asyncio.get_running_loop().time(), what))

    replaced = reported = stopped = _tell


class Source:
    """Makes the connections of a test in order; repeats the last one."""

    def __init__(self, *connections: FakeConnection | Exception) -> None:
        self.connections = list(connections)
        self.connected_at: list[float] = []
        self.made: list[FakeConnection] = []

    async def connect(self) -> FakeConnection:
        self.connected_at.append(asyncio.get_running_loop().time())
        first = self.connections[0]
        if len(self.connections) > 1:
            self.connections.pop(0)
        if isinstance(first, Exception):
            raise first
        again = FakeConnection(*first.told, seconds=first.seconds, end=first.end)
        self.made.append(again)
        return again


async def live(
    source: Source, *, seconds: float, listener: Listener | None = None
) -> tuple[Listener, Lifecycle]:
    """Run a life cycle for some time, and then stop it."""
    listener = listener or Listener()
    lifecycle = Lifecycle("camera", source.connect, listener=listener)
    await lifecycle.start()
    task = asyncio.create_task(lifecycle.run())
    await asyncio.wait({task}, timeout=seconds)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    return listener, lifecycle


async def test_updates_of_a_connection_are_passed_on_and_its_end_as_well():
    source = Source(
        FakeConnection(CAM, 5, SICK, 5, MIC, seconds=5), FakeConnection(CAM, seconds=1e6)
    )
    listener, lifecycle = await live(source, seconds=100)
    assert listener.told == [(0, CAM), (5, SICK), (10, MIC), (15, "its stream ended"), (16, CAM)]
    assert [connection.closed for connection in source.made] == [1, 0]
    assert lifecycle.stop_reason is None, "our own stop is none of the endpoint"
    await lifecycle.close()
    assert source.made[1].closed == 1
    assert lifecycle.stop_reason == "the node plugin is stopping"


ENDS = {
    "says-why": (ConnectionEndedError("the bus is gone"), "the bus is gone"),
    "fails-in-our-own-code": (OSError("reset"), "its stream failed: OSError: reset"),
    "is-cancelled-by-a-library": (asyncio.CancelledError(), "its connection was closed"),
}


@pytest.mark.parametrize(("end", "reason"), ENDS.values(), ids=ENDS)
async def test_however_a_connection_ends_it_is_made_again(end, reason):
    source = Source(FakeConnection(CAM, end=end), FakeConnection(CAM, seconds=1e6))
    listener, _ = await live(source, seconds=10)
    assert listener.told == [(0, CAM), (0, reason), (1, CAM)]


async def test_an_endpoint_that_lists_and_dies_at_once_is_connected_ever_more_slowly():
    source = Source(FakeConnection(CAM))
    listener, _ = await live(source, seconds=250)
    assert source.connected_at == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    assert [what for _, what in listener.told] == [CAM, "its stream ended"] * 10


@pytest.mark.parametrize(
    ("seconds", "delay"),
    [
        pytest.param(59, 4, id="short-lives-keep-the-delay"),
        pytest.param(60, 1, id="a-long-life-begins-again"),
    ],
)
async def test_the_age_of_a_connection_decides_the_delay_before_the_next_one(seconds, delay):
    source = Source(
        FakeConnection(CAM),
        FakeConnection(CAM),
        FakeConnection(CAM, seconds=seconds),
        FakeConnection(CAM, seconds=1e6),
    )
    await live(source, seconds=200)
    assert source.connected_at == [0, 1, 3, 3 + seconds + delay]


@pytest.mark.parametrize(
    "connection",
    [
        pytest.param(FakeConnection(seconds=100), id="that-never-listed-anything"),
        pytest.param(
            FakeConnection(CAM, seconds=100, end=ConnectionEndedError("a flood", disorderly=True)),
            id="with-a-disorderly-end",
        ),
    ],
)
async def test_a_connection_keeps_the_delay_however_long_it_lived(connection):
    source = Source(connection)
    await live(source, seconds=350)
    assert source.connected_at == [0, 101, 203, 307]


async def test_a_connection_that_cannot_be_made_is_a_stop_and_is_tried_again():
    source = Source(
        OSError("refused"),
        DriverError("the bus is gone"),
        ConnectionEndedError("ValueError: a bug"),
        FakeConnection(CAM, seconds=1e6),
    )
    listener, lifecycle = await live(source, seconds=20)
    assert listener.told == [
        (0, "it could not be started: OSError: refused"),
        (1, "the bus is gone"),
        (3, "it could not be started: ValueError: a bug"),
        (7, CAM),
    ]
    assert lifecycle.stop_reason is None


async def test_at_the_first_start_a_configuration_that_is_refused_is_raised():
    listener = Listener()
    source = Source(DriverError("lens is not a known key"))
    lifecycle = Lifecycle("camera", source.connect, listener=listener)
    assert lifecycle.stop_reason == "it has not started yet"
    with pytest.raises(DriverError, match="lens is not a known key"):
        await lifecycle.start()
    assert (lifecycle.stop_reason, listener.told) == ("lens is not a known key", [])


async def test_a_silent_connection_is_reported_and_used_once_it_lists_devices(caplog):
    source = Source(FakeConnection(CAM), FakeConnection(30, CAM, seconds=1e6))
    listener, _ = await live(source, seconds=100)
    assert listener.told == [
        (0, CAM),
        (0, "its stream ended"),
        (11, "it has not listed anything (before that: its stream ended)"),
        (31, CAM),
    ]
    silent = [r.reason for r in caplog.records if r.msg == "endpoint is silent"]
    assert silent == ["it has not listed anything (before that: its stream ended)"]


async def test_a_new_connection_that_is_silent_does_not_hide_why_the_one_before_ended():
    gone = ConnectionEndedError("the bus is gone")
    source = Source(FakeConnection(CAM, end=gone), FakeConnection(30, CAM, seconds=5))
    _, lifecycle = await live(source, seconds=5)
    assert lifecycle.stop_reason == "it has not listed anything (before that: the bus is gone)"

    source = Source(FakeConnection(CAM, end=gone), FakeConnection(3, CAM, 1, seconds=1e6))
    _, lifecycle = await live(source, seconds=10)
    source.made[1].unavailable = "it is over"
    assert lifecycle.stop_reason == "it is over", "what came before has passed"


class Failing(Listener):
    """Fails in the first call of one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()
        setattr(self, method, self._fail)
        self.method = method

    def _fail(self, endpoint: str, what: object) -> None:
        delattr(self, self.method)
        raise TypeError("not text")


@pytest.mark.parametrize(
    ("method", "updates"),
    [
        pytest.param("replaced", [CAM], id="an-inventory"),
        pytest.param("reported", [CAM, SICK], id="a-report-of-health"),
    ],
)
async def test_a_failure_of_the_listener_ends_the_connection_and_not_the_daemon(
    method, updates, caplog
):
    source = Source(FakeConnection(*updates, seconds=1e6), FakeConnection(CAM, seconds=1e6))
    listener, _ = await live(source, seconds=100, listener=Failing(method))
    reason = (
        "an internal error prevented the node plugin from processing its report; see the log of "
        "the node plugin on this node"
    )
    assert listener.told[-2:] == [(0, reason), (1, CAM)]
    assert source.made[0].closed == 1
    (record,) = [r for r in caplog.records if r.msg == "endpoint's update failed"]
    assert isinstance(record.exc_info[1], TypeError)


async def test_a_listener_that_fails_at_a_stop_does_not_end_the_daemon():
    source = Source(OSError("refused"), OSError("refused"), FakeConnection(CAM, seconds=1e6))
    listener, _ = await live(source, seconds=100, listener=Failing("stopped"))
    told = (1, "it could not be started: OSError: refused")
    assert listener.told == [told, (3, CAM)], "what was not heard is told again"


async def test_an_endpoint_that_waits_for_a_connection_keeps_its_last_reason_and_has_logged_it(
    caplog,
):
    source = Source(FakeConnection(CAM, end=ConnectionEndedError("the bus is gone")))
    _, lifecycle = await live(source, seconds=0.5)
    assert lifecycle.stop_reason == "the bus is gone"
    assert lifecycle.connection is None
    (record,) = [r for r in caplog.records if r.msg == "endpoint stopped"]
    assert (record.levelno, record.endpoint, record.reason) == (
        logging.ERROR,
        "camera",
        "the bus is gone",
    )
