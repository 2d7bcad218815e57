"""The work queue of keys, on a virtual clock."""

import asyncio

import pytest

from drakit_daemon.kube.queue import QueueFullError, WorkQueue

pytestmark = pytest.mark.looptime


async def nothing(queue):
    """Whether nobody would get a key now."""
    try:
        async with asyncio.timeout(0):
            await asyncio.sleep(0)
            return not await queue.get()
    except TimeoutError:
        return True


async def test_a_key_that_is_added_often_is_worked_on_once():
    queue = WorkQueue[str]()
    for key in ("a", "b", "a", "a"):
        queue.add(key)
    assert len(queue) == 2
    assert [await queue.get(), await queue.get()] == ["a", "b"]
    queue.done("a")
    queue.done("b")
    assert await nothing(queue)


async def test_a_key_is_never_worked_on_twice_at_a_time():
    queue = WorkQueue[str]()
    queue.add("a")
    await queue.get()
    queue.add("a")
    queue.add("a")
    assert await nothing(queue)
    queue.done("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert await nothing(queue)


async def test_a_cancelled_worker_loses_no_key():
    queue = WorkQueue[str]()
    first, second = asyncio.create_task(queue.get()), asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    first.cancel()  # woken and canceled in one go
    assert await second == "a"


@pytest.mark.parametrize(("first", "second"), [(10, 3), (3, 10)])
async def test_the_earlier_of_two_times_counts(looptime, first, second):
    queue = WorkQueue[str]()
    queue.add_after("a", first)
    queue.add_after("a", second)
    assert len(queue) == 1
    assert await queue.get() == "a"
    assert looptime == 3
    queue.done("a")
    await asyncio.sleep(20)
    assert await nothing(queue)


async def test_adding_now_beats_adding_later(looptime):
    queue = WorkQueue[str]()
    queue.add_after("a", 10)
    queue.add("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert looptime == 0
    await asyncio.sleep(20)
    assert await nothing(queue)


async def test_time_that_comes_during_the_work_waits_for_its_end(looptime):
    queue = WorkQueue[str]()
    queue.add("a")
    await queue.get()
    queue.add_after("a", 1)
    await asyncio.sleep(5)
    assert await nothing(queue)
    queue.done("a")
    assert await queue.get() == "a"
    assert looptime == 5


async def test_failures_wait_longer_each_time_and_success_forgets_them():
    queue = WorkQueue[str](retry_seconds=1, retry_limit_seconds=60)
    waits = []
    for _ in range(9):
        queue.add("a")
        await queue.get()
        waits.append(queue.retry("a"))
        queue.done("a")
        await asyncio.sleep(waits[-1])
        assert await queue.get() == "a"
        queue.done("a")
    for n, seconds in enumerate(waits):
        limit = min(60, 2**n)
        assert limit / 2 <= seconds <= limit
    assert queue.failures("a") == 9
    queue.forget("a")
    assert queue.retry("a") <= 1
    assert queue.retry("another") <= 1
    queue.close()


async def test_there_is_a_bound():
    queue = WorkQueue[int](capacity=3)
    queue.add(1)
    await queue.get()
    queue.add(2)
    queue.add_after(3, 5)
    with pytest.raises(QueueFullError, match="3 keys"):
        queue.add(4)
    with pytest.raises(QueueFullError):
        queue.add_after(4, 1)
    for key in (1, 2, 3):  # what it holds may change
        queue.add(key)
    queue.done(1)
    assert len(queue) == 3


async def test_what_was_added_during_the_work_comes_again_however_full_it_is():
    queue = WorkQueue[int](capacity=3)
    for key in (1, 2):
        queue.add(key)
        await queue.get()
    queue.add_after(3, 60)  # now it is full
    queue.add_after(2, 60)  # counts twice: it is worked on and waits
    queue.add(1)
    queue.done(1)  # a worker must not die of this
    assert await queue.get() == 1
    queue.close()


async def test_a_queue_without_progress_is_stalled_however_old_its_keys_are():
    queue = WorkQueue[str]()
    assert queue.stalled_seconds() == 0
    await asyncio.sleep(100)
    for key in ("a", "b", "c", "old"):
        queue.add(key)
    await asyncio.sleep(7)
    assert queue.stalled_seconds() == 7
    for _ in range(3):
        key = await queue.get()
        assert queue.stalled_seconds() == 0
        await asyncio.sleep(5)
        assert queue.stalled_seconds() == 5
        queue.done(key)
        assert queue.stalled_seconds() == 0
    assert await queue.get() == "old"
    await asyncio.sleep(60)
    assert queue.stalled_seconds() == 0, "nothing is ready"


async def test_urgent_keys_that_come_without_end_do_not_keep_others_waiting():
    queue = WorkQueue[str](is_urgent=lambda key: key.startswith("claim"))
    queue.add("pod-1")
    queue.add("pod-2")
    found = []
    for number in range(12):
        queue.add(f"claim-{number}")
        queue.add(f"claim-{number}-again")
        found.append(await queue.get())
    assert [found.index("pod-1"), found.index("pod-2")] == [4, 9]


async def test_urgent_keys_come_before_those_that_wait_longer():
    queue = WorkQueue[str](is_urgent=lambda key: key.startswith("claim"))
    for key in ("pod-1", "pod-2", "claim-1", "pod-3", "claim-2"):
        queue.add(key)
    assert [await queue.get() for _ in range(5)] == [
        "claim-1",
        "claim-2",
        "pod-1",
        "pod-2",
        "pod-3",
    ]
    assert len(queue) == 0


async def test_an_urgent_key_that_was_added_during_its_work_is_urgent_again():
    queue = WorkQueue[str](is_urgent=lambda key: key == "claim")
    queue.add("claim")
    key = await queue.get()
    queue.add("pod")
    queue.add(key)
    queue.done(key)
    assert await queue.get() == "claim"
