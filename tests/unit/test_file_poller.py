"""Checks of files that change without a notification, together in one thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from drakit_nodeplugin.changes import FilePoller


@pytest.fixture
async def poller():
    poller = FilePoller(period_seconds=0.005)
    running = asyncio.create_task(poller.run())
    yield poller
    running.cancel()
    await asyncio.wait({running})


async def test_a_waiter_with_something_to_do_is_woken_and_the_others_keep_waiting(
    poller: FilePoller,
):
    seen = threading.Event()
    rounds = 0

    def never() -> bool:
        nonlocal rounds
        rounds += 1
        return False

    async with asyncio.timeout(5):
        waiting = asyncio.create_task(poller.until(seen.is_set))
        other = asyncio.create_task(poller.until(never))
        await poller.until(lambda: rounds > 2)
        assert not waiting.done()
        seen.set()
        await waiting
    assert not other.done()
    other.cancel()


async def test_the_checks_of_a_round_run_in_one_thread_and_not_in_the_loops(poller: FilePoller):
    threads: list[int] = []

    def check() -> bool:
        threads.append(threading.get_ident())
        return True

    async with asyncio.timeout(5):
        await asyncio.gather(*(poller.until(check) for _ in range(10)))
    assert len(threads) == 10
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


async def test_a_check_that_raises_wakes_only_its_waiter(poller: FilePoller):
    def fails() -> bool:
        raise OSError("the disk is gone")

    async with asyncio.timeout(5):
        other = asyncio.create_task(poller.until(lambda: False))
        await poller.until(fails)
        await poller.until(lambda: True)
    assert not other.done()
    other.cancel()


async def test_a_cancelled_waiter_is_not_checked_any_more(poller: FilePoller):
    asked = 0

    def ask() -> bool:
        nonlocal asked
        asked += 1
        return False

    async with asyncio.timeout(5):
        waiting = asyncio.create_task(poller.until(ask))
        await poller.until(lambda: asked > 0)
        waiting.cancel()
        await asyncio.wait({waiting})
        await poller.until(lambda: True)
        before = asked
        await poller.until(lambda: True)
        assert asked == before
