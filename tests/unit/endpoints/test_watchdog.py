from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from contextlib import asynccontextmanager

import pytest

from drakit_driver.runtime.loop import Watchdog, where_is

HERE = __name__.partition(".")[0]


class FakeLoop:
    """A loop that responds when the test requests it."""

    def __init__(self) -> None:
        self.waiting: list = []
        self.blocked = False
        self.closed = False
        self.asked = 0

    def call_soon_threadsafe(self, callback) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.asked += 1
        self.waiting.append(callback)
        if not self.blocked:
            self.go_on()

    def go_on(self) -> None:
        self.blocked = False
        while self.waiting:
            self.waiting.pop()()

    def time(self) -> float:
        return asyncio.get_running_loop().time()


class Lab:
    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.dog = Watchdog("camera", loop=self.loop, thread=threading.get_ident(), package=HERE)


@asynccontextmanager
async def watching():
    """Make a watchdog. It is not a fixture, because fixtures run on the real clock."""
    lab = Lab()
    task = asyncio.create_task(lab.dog.run())
    yield lab
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})


@pytest.fixture(autouse=True)
def log_of_info(caplog):
    caplog.set_level(logging.INFO)


def logged(caplog) -> list[tuple[str, str, float]]:
    return [(record.levelname, record.msg, record.seconds) for record in caplog.records]


@pytest.mark.looptime
async def test_a_loop_that_answers_is_polled_once_a_second_and_nothing_is_logged(caplog):
    async with watching() as lab:
        await asyncio.sleep(60.5)
        assert lab.loop.asked == 61
        assert (logged(caplog), lab.dog.blocked) == ([], None)


@pytest.mark.looptime
async def test_a_blocked_loop_is_logged_ever_more_rarely_and_when_it_answers_again(caplog):
    async with watching() as lab:
        await asyncio.sleep(9.5)
        lab.loop.blocked = True  # it is asked at 10 s
        await asyncio.sleep(2.2)
        assert lab.dog.blocked is None
        await asyncio.sleep(0.5)
        assert "its event loop is blocked in " in lab.dog.blocked
        await asyncio.sleep(1000)
        assert lab.loop.asked == 11, "no question is put behind the first"
        lab.loop.go_on()
        await asyncio.sleep(1)
        assert lab.dog.blocked is None
        text = "driver blocks its event loop"
        assert logged(caplog) == [
            *(("WARNING", text, seconds) for seconds in (2, 10, 60, 300, 600, 900)),
            ("INFO", "driver responds again", 1002.2),
        ]
        lab.loop.blocked = True
        await asyncio.sleep(5)
        lab.loop.go_on()
        await asyncio.sleep(5)
        assert [level for level, _, _ in logged(caplog)[-2:]] == ["WARNING", "INFO"], "each time"


@pytest.mark.looptime
async def test_a_loop_that_is_closed_is_watched_no_more(caplog):
    lab = Lab()
    lab.loop.closed = True
    await lab.dog.run()
    assert (logged(caplog), lab.loop.asked) == ([], 0)


async def test_the_call_is_named_with_the_drivers_own_frame_before_those_of_others():
    """A driver that waits for a program: the innermost frames are those of the library, and explain
    little."""
    idents: list[int] = []

    def vendor_waits(child: subprocess.Popen) -> None:
        idents.append(threading.get_ident())
        child.wait()

    child = subprocess.Popen(  # noqa: ASYNC220 - it is waited for in a thread
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    )
    thread = threading.Thread(target=vendor_waits, args=(child,))
    thread.start()
    try:
        async with asyncio.timeout(5):
            while not idents or "_try_wait" not in where_is(idents[0], package=HERE):
                await asyncio.sleep(0.01)
        where = where_is(idents[0], package=HERE)
    finally:
        child.kill()
        thread.join()
        child.stdin.close()
    first, *others = where.split(" > ")
    assert "vendor_waits (" in first
    assert f"{__file__}, line " in first
    assert others[0].startswith("Popen.wait (")
    assert others[-1].startswith("Popen._try_wait (")
    assert "run" not in first


async def test_a_thread_that_is_gone_cannot_be_seen():
    assert where_is(0, package=HERE) == "a call without a Python stack frame"
