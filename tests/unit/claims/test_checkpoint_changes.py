"""Changes of the rows wake those that wait for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from tests.fakes.checkpoints import delete, stored_claim

A, B = stored_claim("a"), stored_claim("b")


@pytest.fixture
async def checkpoint(tmp_path):
    opened = Checkpoint(tmp_path / "checkpoint.db")
    await opened.open()
    yield opened
    await opened.close()


async def within(work):
    async with asyncio.timeout(5):
        return await work


async def test_a_write_wakes_all_that_wait(checkpoint):
    seen = checkpoint.revision.number
    waiting = [asyncio.create_task(checkpoint.revision.after(seen)) for _ in range(3)]
    await checkpoint.uids()
    assert not any(task.done() for task in waiting), "a read is no change"

    await checkpoint.write([A])

    assert await within(asyncio.gather(*waiting)) == [checkpoint.revision.number] * 3
    assert checkpoint.revision.number > seen


async def test_a_change_before_the_wait_is_not_missed(checkpoint):
    seen = checkpoint.revision.number
    await checkpoint.write([A])
    later = await within(checkpoint.revision.after(seen))
    waiting = asyncio.create_task(checkpoint.revision.after(later))
    await checkpoint.find([A.uid])
    assert not waiting.done(), "it was seen"
    await checkpoint.write([B])
    assert await within(waiting) > later


async def test_each_way_to_change_a_row_counts(checkpoint):
    numbers = [checkpoint.revision.number]
    (row,) = (await checkpoint.write([A])).written.values()
    numbers.append(checkpoint.revision.number)
    (row,) = (await checkpoint.write([replace(row, state="prepared")])).written.values()
    numbers.append(checkpoint.revision.number)
    await delete(checkpoint, [row])
    numbers.append(checkpoint.revision.number)
    (row,) = (await checkpoint.write([A])).written.values()
    numbers.append(checkpoint.revision.number)
    assert await checkpoint.forget(A.uid, row.generation)
    numbers.append(checkpoint.revision.number)
    assert numbers == sorted(set(numbers))


async def test_what_changes_no_row_does_not_count(checkpoint):
    (row,) = (await checkpoint.write([A])).written.values()
    seen = checkpoint.revision.number
    await checkpoint.write([])
    await delete(checkpoint, [])
    assert await checkpoint.confirm([row])
    assert await checkpoint.clear([B.uid]) == ({}, {})
    assert not await checkpoint.forget(A.uid, row.generation - 1)
    assert await checkpoint.held_beside_unpreparing() == []
    with pytest.raises(CheckpointError, match="appears twice"):
        await checkpoint.write([B, B])
    assert checkpoint.revision.number == seen


async def test_writes_at_the_same_time_wake_a_waiter_once(checkpoint):
    waiting = asyncio.create_task(checkpoint.revision.after(checkpoint.revision.number))
    await asyncio.gather(*(checkpoint.write([stored_claim(f"{n}")]) for n in range(20)))
    seen = await within(waiting)
    if seen != checkpoint.revision.number:
        seen = await within(checkpoint.revision.after(seen))
    assert seen == checkpoint.revision.number


async def test_a_waiter_that_is_canceled_leaves_the_others(checkpoint):
    seen = checkpoint.revision.number
    first, second = (asyncio.create_task(checkpoint.revision.after(seen)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await checkpoint.write([A])
    assert await within(second) == checkpoint.revision.number
    assert first.cancelled()
