"""One active instance per driver: hand-overs, deaths and freezes, with real processes."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import signal
import sys
from contextlib import asynccontextmanager
from operator import attrgetter
from pathlib import Path

import pytest

from drakit_nodeplugin.changes import FilePoller
from drakit_nodeplugin.state import lock
from drakit_nodeplugin.state.lock import DriverLock, is_locked, try_lock

PROGRAM = """
import asyncio, sys
from pathlib import Path
from drakit_nodeplugin.changes import FilePoller
from drakit_nodeplugin.state.lock import DriverLock

async def main(data, uid):
    own, poller = DriverLock("camera.example.com", Path(data), instance_uid=uid), FilePoller()
    polling = asyncio.create_task(poller.run())
    while True:
        await own.acquire(may_ask=lambda: True)
        print("active", flush=True)
        while await own.until_asked(poller) != "asked":
            pass
        await own.release()
        print("released", flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""

SOON_SECONDS = 3.0
"""About a second, on a machine with other work."""


class Process:
    """Another instance, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.signal = process.send_signal

    async def until(self, event: str) -> None:
        async with asyncio.timeout(10):
            line = await self._process.stdout.readline()
        assert line.decode().strip() == event

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()


@pytest.fixture
def data(tmp_path) -> Path:
    return tmp_path / "camera.example.com"


@pytest.fixture
def instance(data):
    """Create an instance in this process; its locks are released at the end of the test."""
    made: list[DriverLock] = []

    def instance(uid: str) -> DriverLock:
        made.append(DriverLock("camera.example.com", data, instance_uid=uid))
        return made[-1]

    yield instance
    for each in made:
        each._release()


@pytest.fixture
async def process(data):
    """Start an instance in another process; it is killed at the end of the test."""
    started: list[Process] = []

    async def process(uid: str) -> Process:
        command = (sys.executable, "-c", PROGRAM, str(data), uid)
        running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        started.append(Process(running))
        return started[-1]

    yield process
    for each in started:
        await each.kill()


@pytest.fixture
async def poller():
    poller = FilePoller(period_seconds=0.02)
    polling = asyncio.create_task(poller.run())
    yield poller
    polling.cancel()


async def acquire(lock: DriverLock) -> None:
    """Wait for the lock, and ask for it at once."""
    await lock.acquire(may_ask=lambda: True)


@pytest.fixture
async def first(instance) -> DriverLock:
    """The active instance."""
    first = instance("pod-1")
    await acquire(first)
    return first


@pytest.fixture
def second(instance) -> DriverLock:
    return instance("pod-2")


@asynccontextmanager
async def waiting_for(lock: DriverLock):
    """Wait for the lock in the background."""
    task = asyncio.create_task(acquire(lock))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def soon(awaited):
    async with asyncio.timeout(SOON_SECONDS):
        return await awaited


async def still(task: asyncio.Task, *, seconds: float = 0.5) -> None:
    """Check that a task does not end for a while."""
    done, _ = await asyncio.wait({task}, timeout=seconds)
    assert not done


async def asked(lock: DriverLock, poller: FilePoller) -> None:
    """Wait until another instance asks: a process has to start for that."""
    async with asyncio.timeout(10):
        assert await lock.until_asked(poller) == "asked"


# ------------------------------------------------------------ hand-over


async def test_the_first_instance_has_the_lock_at_once_and_asks_nobody(instance, data):
    first = instance("pod-1")
    assert await first.try_acquire()
    await acquire(first)
    assert (first.held, first.handed_over) == (True, False)
    assert is_locked(data)
    assert list(data.iterdir()) == []
    assert data.stat().st_mode & 0o777 == 0o700


async def test_a_second_instance_asks_and_has_the_lock_before_the_first_tries_again(
    first, second, poller, data
):
    assert not await second.try_acquire()
    async with waiting_for(second) as acquiring:
        assert await soon(first.until_asked(poller)) == "asked"
        assert (data / "waiting.lock").read_text() == "pod-2"
        await still(acquiring, seconds=0.2)
        await first.release()
        async with waiting_for(first) as standing_by:
            await soon(acquiring)
            assert (second.held, second.handed_over) == (True, False)
            assert (first.held, first.handed_over) == (False, True)
            await still(standing_by, seconds=1.5)
            assert list(data.iterdir()) == [], "neither asks any more"


async def test_nobody_asks_an_instance_whose_request_file_was_left_by_a_killed_one(
    instance, first, second, poller, data
):
    (data / "waiting.lock").write_text("the UID of an instance that was killed")
    listening = asyncio.create_task(first.until_asked(poller))
    await still(listening, seconds=0.3)
    async with waiting_for(second):
        assert await soon(listening) == "asked"
        assert (data / "waiting.lock").read_text() == "pod-2"


async def test_a_request_is_made_again_if_its_file_is_removed_and_taken_back_by_a_stop(
    first, second, poller, data
):
    async with waiting_for(second):
        for _ in range(2):
            assert await soon(first.until_asked(poller)) == "asked"
            (data / "waiting.lock").unlink()
        assert await soon(first.until_asked(poller)) == "asked"
    await second.release()
    assert list(data.iterdir()) == []


async def test_three_instances_hand_over_one_after_the_other(instance, poller, data, monkeypatch):
    """A request that a former instance overtakes is repeated; it may then be ignored for a time."""
    for constant, seconds in {"ASK": 0.02, "YIELD": 0.2, "STANDBY": 0.08, "IGNORE": 0.1}.items():
        monkeypatch.setattr(lock, f"{constant}_SECONDS", seconds)
    instances = {uid: instance(uid) for uid in ("pod-1", "pod-2", "pod-3")}
    active: list[str] = []
    changed = asyncio.Event()

    async def run(uid: str) -> None:
        own = instances[uid]
        while True:
            await acquire(own)
            assert [each.held for each in instances.values()].count(True) == 1
            active.append(uid)
            changed.set()
            while await own.until_asked(poller) == "ignored":
                pass
            await own.release()

    async def until_active(*uids: str) -> None:
        async with asyncio.timeout(20):
            while not any(instances[uid].held for uid in uids):
                changed.clear()
                await changed.wait()

    running: dict[str, asyncio.Task] = {}
    for uid in instances:
        running[uid] = asyncio.create_task(run(uid))
        await until_active(uid)
    await still(running["pod-3"])
    assert active[-1] == "pod-3"

    running.pop("pod-3").cancel()
    await instances["pod-3"].release()
    await until_active("pod-1", "pod-2")
    for task in running.values():
        assert not task.done()
        task.cancel()


@pytest.mark.parametrize("then", ["it-may-ask", "the-lock-is-free"])
async def test_a_new_instance_that_may_not_ask_waits_until(first, second, poller, then):
    may_ask = asyncio.Event()
    acquiring = asyncio.create_task(second.acquire(may_ask=may_ask.is_set))
    listening = asyncio.create_task(first.until_asked(poller))
    await still(listening)
    if then == "it-may-ask":
        may_ask.set()
        assert await soon(listening) == "asked"
    await first.release()
    await soon(acquiring)
    listening.cancel()


# ------------------------------------------------------------ forks


@pytest.fixture
def fork():
    """Fork a child that inherits all descriptors, as a driver may do; it is killed at the end."""
    children: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                signal.pause()
            finally:
                os._exit(1)
        children.append(child)

    yield fork
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_forked_child_keeps_neither_the_lock_nor_a_request(
    first, second, poller, data, fork
):
    async with waiting_for(second):
        await asked(first, poller)
        request = os.open(data / "waiting.lock", os.O_RDONLY)
        fork()
    await second.release()
    try:
        fcntl.flock(request, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises while it is locked
    finally:
        os.close(request)
    await first.release()
    assert not is_locked(data)
    assert await second.try_acquire()


# ------------------------------------------------------------ failures


def failing(monkeypatch, name: str, *, times: int) -> list[OSError]:
    """Let a function that the module calls fail at first; return the errors that it has raised."""
    works, raised = attrgetter(name)(lock), list[OSError]()

    def fail_at_first(*arguments):
        if len(raised) < times:
            raised.append(OSError(errno.EIO, "Input/output error"))
            raise raised[-1]
        return works(*arguments)

    monkeypatch.setattr(f"{lock.__name__}.{name}", fail_at_first)
    return raised


async def test_an_attempt_that_fails_is_logged_and_the_next_one_made(instance, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    raised = failing(monkeypatch, "_lock", times=2)
    first = instance("pod-1")
    await soon(acquire(first))
    assert (first.held, len(raised)) == (True, 2)
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.ERROR, "other instances cannot be found"),
        (logging.INFO, "other instances can be found again"),
    ]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param("_is_at", id="checked"),
        # For example, because the disk is full. An empty request is treated as no request.
        pytest.param("os.pwrite", id="written"),
    ],
)
async def test_a_request_is_made_again_if_it_cannot_be(
    first, second, poller, monkeypatch, function
):
    before = len(os.listdir("/proc/self/fd"))
    raised = failing(monkeypatch, function, times=2)
    async with waiting_for(second) as acquiring:
        assert await soon(first.until_asked(poller)) == "asked"
        assert len(raised) == 2
        await first.release()
        await soon(acquiring)
    assert len(os.listdir("/proc/self/fd")) == before, "failed attempts leave nothing open"


async def test_a_release_that_fails_is_logged_and_the_lock_is_free(
    first, monkeypatch, data, caplog
):

    def fail() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(first, "_stop_asking", fail)
    await first.release()
    monkeypatch.undo()
    assert not is_locked(data)
    (record,) = caplog.records
    assert (record.message, record.driver) == (
        "other instances cannot be found",
        "camera.example.com",
    )


# ------------------------------------------------------------ deaths


@pytest.mark.parametrize("in_its_turn", [False, True], ids=["before-its-turn", "in-its-turn"])
async def test_when_the_instance_that_asked_is_killed_the_former_one_goes_on(
    first, process, poller, in_its_turn
):
    second = await process("pod-2")
    await asked(first, poller)
    if not in_its_turn:
        await second.kill()
    await first.release()
    async with waiting_for(first) as standing_by:
        if in_its_turn:
            await second.until("active")
            await still(standing_by, seconds=1.5)
            await second.kill()
        await soon(standing_by)
    assert first.held


async def test_an_instance_that_crashes_again_and_again_interrupts_only_once(
    instance, process, poller
):
    first, last = instance("pod-1"), instance("pod-3")
    await acquire(first)
    crashing = await process("pod-2")
    await asked(first, poller)
    await first.release()
    await crashing.until("active")
    await crashing.kill()
    await soon(acquire(first))

    for _ in range(2):
        crashing = await process("pod-2")
        async with asyncio.timeout(10):
            assert await first.until_asked(poller) == "ignored"
        listening = asyncio.create_task(first.until_asked(poller))
        await still(listening)  # each request is reported once
        await crashing.kill()
        listening.cancel()
    async with waiting_for(last) as acquiring:
        assert await soon(first.until_asked(poller)) == "asked"
        await first.release()
        await soon(acquiring)


# ------------------------------------------------------------ freezes


@pytest.mark.parametrize("then", [signal.SIGKILL, signal.SIGCONT], ids=["is-killed", "continues"])
async def test_a_frozen_instance_keeps_the_lock_until_it(instance, process, then):
    frozen = await process("pod-1")
    await frozen.until("active")
    frozen.signal(signal.SIGSTOP)
    async with waiting_for(instance("pod-2")) as acquiring:
        await still(acquiring, seconds=1.5)
        frozen.signal(then)
        if then is signal.SIGCONT:
            await frozen.until("released")
        await soon(acquiring)


async def test_a_frozen_instance_that_asked_is_ignored_for_a_time(
    first, process, poller, monkeypatch
):
    monkeypatch.setattr(lock, "IGNORE_SECONDS", 1.5)
    clock = asyncio.get_running_loop().time
    frozen = await process("pod-2")
    await asked(first, poller)
    frozen.signal(signal.SIGSTOP)
    await first.release()
    began = clock()
    await soon(acquire(first))
    assert await soon(first.until_asked(poller)) == "ignored"
    assert await soon(first.until_asked(poller)) == "asked"
    assert clock() - began >= lock.YIELD_SECONDS + 1.5

    await first.release()
    async with waiting_for(first) as standing_by:
        frozen.signal(signal.SIGCONT)
        await frozen.until("active")
        await still(standing_by)


# ------------------------------------------------------------ data directory


@pytest.mark.parametrize("instead", [True, False], ids=["replaced", "removed"])
async def test_the_hold_ends_when_the_data_directory_is(first, poller, data, instead):
    listening = asyncio.create_task(first.until_asked(poller))
    await still(listening, seconds=0.2)
    data.rename(data.with_name("away"))
    if instead:
        data.mkdir()
    assert await soon(listening) == "lost"
    await first.release()
    await soon(acquire(first))
    assert is_locked(data)
    assert not is_locked(data.with_name("away"))


# ------------------------------------------------------------ checks by others


def test_a_missing_directory_is_not_locked(data):
    assert not is_locked(data)
    with pytest.raises(FileNotFoundError), try_lock(data):
        pass


def test_a_lock_that_is_free_can_be_held_for_a_moment(data):
    data.mkdir()
    with try_lock(data) as held, try_lock(data) as another:
        assert (held, another) == (True, False)
        assert is_locked(data)
    assert not is_locked(data)


async def test_the_lock_of_an_active_instance_cannot_be_held(instance, data):
    await acquire(instance("pod-1"))
    with try_lock(data) as held:
        assert not held
    assert is_locked(data)


def test_two_checks_at_the_same_time_do_not_see_each_other(data):
    data.mkdir()
    descriptor = os.open(data, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        assert not is_locked(data)
    finally:
        os.close(descriptor)
