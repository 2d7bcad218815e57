"""The output of a driver's thread: snapshots and strings, and no vendor code."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from drakit import DriverError, Edits, PreparedDevice
from drakit_daemon import logs
from drakit_driver.runtime.failures import DeviceFailedError, traceback_of
from tests.unit.endpoints.camera import CLAIM, DEVICE, Camera, new_endpoint, running, until

THREAD = "driver-camera.example.com"


class Watching:
    """Records the threads that read its text."""

    def __init__(self) -> None:
        self.readers: list[str] = []

    def text(self) -> str:
        self.readers.append(threading.current_thread().name)
        return "it is dirty"


class Watched(Exception):
    def __init__(self, watching: Watching) -> None:
        super().__init__()
        self.watching = watching

    def __str__(self) -> str:
        return self.watching.text()

    __repr__ = __str__


class Refusal(Watched, DriverError):
    pass


class Bug(Watched):
    pass


class PerBatch(Camera):
    async def prepare_claims(self, claims):
        results = {}
        for item in claims:
            try:
                results[item.claim.uid] = [self.behaviour.prepare() for _ in item.devices]
            except Exception as error:
                results[item.claim.uid] = error
        return results


class Unreadable(Mapping[str, Any]):
    """Results of claims that fail when they are read."""

    def __init__(self, fail: Callable[[], Any]) -> None:
        self._fail = fail

    def __getitem__(self, uid: str) -> Any:
        return self._fail()

    def __iter__(self) -> Iterator[str]:
        return self._fail()

    def __len__(self) -> int:
        return 1


class PerMapping(Camera):
    async def prepare_claims(self, claims):
        return Unreadable(self.behaviour.prepare)


@pytest.fixture
def written() -> Iterator[list[str]]:
    """Lines of the log as a daemon writes them."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Lines()
    handler.setFormatter(logs.JsonFormatter())
    logging.getLogger().addHandler(handler)
    yield lines
    logging.getLogger().removeHandler(handler)


def raising(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


@pytest.mark.parametrize("kind", [Camera, PerBatch, PerMapping])
@pytest.mark.parametrize("raised", [Refusal, Bug])
async def test_the_text_of_what_a_driver_raises_is_made_in_its_thread(
    kind, raised, behaviour, listener, written
):
    watching = Watching()
    behaviour.prepare = raising(raised(watching))

    async with running(new_endpoint(lambda: kind(behaviour), listener, kind)) as endpoint:
        with pytest.raises(DeviceFailedError, match="it is dirty") as failed:
            await endpoint.prepare(CLAIM, [DEVICE])
        logging.getLogger(__name__).error("claim failed", exc_info=failed.value)
    assert set(watching.readers) == {THREAD}
    assert (failed.value.__cause__, failed.value.__context__) == (None, None)
    if raised is Bug:
        (line,) = [line for line in written if '"driver failed"' in line]
        assert "in fail" in line, "the log has the traceback"


async def test_the_reason_why_a_driver_ends_or_does_not_start_is_worded_in_its_thread(
    behaviour, listener, written
):
    watching = Watching()
    behaviour.refuse = Refusal(watching)
    endpoint = new_endpoint(lambda: Camera(behaviour), listener)
    with pytest.raises(DriverError, match="it is dirty") as refused:
        await endpoint.start()
    assert type(refused.value) is DriverError
    await endpoint.close()

    behaviour.refuse, behaviour.failure = None, Bug(watching)
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        behaviour.end.set()
        await until(lambda: "Bug: it is dirty" in listener.reasons)
    assert [line for line in written if '"driver ended"' in line]
    assert set(watching.readers) == {THREAD}


@pytest.mark.parametrize("kind", [Camera, PerBatch])
async def test_edits_are_copied_in_the_drivers_thread(kind, behaviour, listener):
    class Lazy(Mapping[str, str]):
        def __getitem__(self, key: str) -> str:
            assert threading.current_thread().name == THREAD
            return "0"

        def __iter__(self) -> Iterator[str]:
            return iter(["CAMERA"])

        def __len__(self) -> int:
            return 1

    behaviour.prepare = lambda: Edits(env=Lazy())
    async with running(new_endpoint(lambda: kind(behaviour), listener, kind)) as endpoint:
        (prepared,) = await endpoint.prepare(CLAIM, [DEVICE])
    assert prepared == PreparedDevice(edits=Edits(env={"CAMERA": "0"}))


def test_tracebacks_have_an_end():
    assert len(traceback_of(ValueError("x" * 1_000_000))) < 21_000
    assert traceback_of(ValueError("\udcff")).endswith("ValueError: \\udcff\n")

    def fall(depth: int) -> None:
        fall(depth + 1)

    with pytest.raises(RecursionError) as raised:
        fall(0)
    assert len(traceback_of(raised.value)) < 21_000
