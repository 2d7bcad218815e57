"""Looks at what nobody tells of, made together in a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from drakit_nodeplugin.file_poller import FilePoller


@pytest.fixture
async def looks():
    looks = FilePoller(period_seconds=0.005)
    running = asyncio.create_task(looks.run())
    yield looks
    running.cancel()
    await asyncio.wait({running})


async def test_who_has_something_to_do_is_woken_and_others_sleep_on(looks: FilePoller):
    seen = threading.Event()
    rounds = 0

    def never() -> bool:
        nonlocal rounds
        rounds += 1
        return False

    async with asyncio.timeout(5):
        waiting = asyncio.create_task(looks.until(seen.is_set))
        other = asyncio.create_task(looks.until(never))
        await looks.until(lambda: rounds > 2)
        assert not waiting.done()
        seen.set()
        await waiting
    assert not other.done()
    other.cancel()


async def test_looks_are_made_in_one_thread_a_round_and_not_in_the_loops(looks: FilePoller):
    threads: list[int] = []

    def look() -> bool:
        threads.append(threading.get_ident())
        return True

    async with asyncio.timeout(5):
        await asyncio.gather(*(looks.until(look) for _ in range(10)))
    assert len(threads) == 10
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


async def test_a_look_that_raises_wakes_only_who_waits_for_it(looks: FilePoller):
    def fails() -> bool:
        raise OSError("the disk is gone")

    async with asyncio.timeout(5):
        other = asyncio.create_task(looks.until(lambda: False))
        await looks.until(fails)
        await looks.until(lambda: True)
    assert not other.done()
    other.cancel()


async def test_who_is_cancelled_is_not_looked_for_any_more(looks: FilePoller):
    asked = 0

    def ask() -> bool:
        nonlocal asked
        asked += 1
        return False

    async with asyncio.timeout(5):
        waiting = asyncio.create_task(looks.until(ask))
        await looks.until(lambda: asked > 0)
        waiting.cancel()
        await asyncio.wait({waiting})
        await looks.until(lambda: True)
        before = asked
        await looks.until(lambda: True)
        assert asked == before


async def test_what_need_not_be_looked_at_so_often_is_not(looks: FilePoller):
    often = seldom = 0

    def look_often() -> bool:
        nonlocal often
        often += 1
        return often == 30

    def look_seldom() -> bool:
        nonlocal seldom
        seldom += 1
        return False

    async with asyncio.timeout(5):
        other = asyncio.create_task(looks.until(look_seldom, rounds=10))
        await looks.until(look_often)
    other.cancel()
    assert seldom in (2, 3, 4)
