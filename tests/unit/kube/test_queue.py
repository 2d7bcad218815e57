"""The work queue of keys, on a virtual clock."""

import asyncio
import weakref

import pytest

from drakit_daemon.kube.queue import WorkQueue

pytestmark = pytest.mark.looptime


def kind_of(key):
    return key.partition("-")[0]


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


@pytest.mark.parametrize(("first", "second"), [(10, 3), (3, 10), (10, 0)])
async def test_the_earlier_of_two_times_counts(looptime, first, second):
    queue = WorkQueue[str]()
    queue.add_after("a", first)
    queue.add_after("a", second) if second else queue.add("a")
    assert len(queue) == 1
    assert await queue.get() == "a"
    assert looptime == min(first, second)
    queue.done("a")
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
    queue = WorkQueue[str](group_of=kind_of, urgent="claim")
    queue.add("pod-1")
    queue.add("pod-2")
    found = []
    for number in range(12):
        queue.add(f"claim-{number}")
        queue.add(f"claim-{number}-again")
        found.append(await queue.get())
    assert [found.index("pod-1"), found.index("pod-2")] == [4, 9]


@pytest.mark.parametrize(
    ("added", "got"),
    [
        pytest.param(
            "pod-1 pod-2 claim-1 claim-2", "claim-1 claim-2 pod-1 pod-2", id="urgent-first"
        ),
        pytest.param(
            "pod-1 pod-2 pod-3 node-1 node-2 slice-1",
            "pod-1 node-1 slice-1 pod-2 node-2 pod-3",
            id="groups-take-turns",
        ),
    ],
)
async def test_the_order_of_keys(added, got):
    queue = WorkQueue[str](group_of=kind_of, urgent="claim")
    for key in added.split():
        queue.add(key)
    assert [await queue.get() for _ in added.split()] == got.split()
    assert len(queue) == 0


async def test_an_urgent_key_that_was_added_during_its_work_is_urgent_again():
    queue = WorkQueue[str](group_of=kind_of, urgent="claim")
    queue.add("claim")
    key = await queue.get()
    queue.add("pod")
    queue.add(key)
    queue.done(key)
    assert await queue.get() == "claim"


async def test_an_urgent_worker_gets_no_other_keys():
    queue = WorkQueue[str](group_of=kind_of, urgent="claim")
    workers = [asyncio.create_task(queue.get(urgent=True)) for _ in range(2)]
    await asyncio.sleep(0)
    queue.add("pod-1")
    queue.defer("pod-2", 5)
    await asyncio.sleep(10)
    assert not any(each.done() for each in workers)
    queue.add("claim-1")
    assert await workers[0] == "claim-1"
    assert queue.is_urgent()
    assert [await queue.get(), await queue.get()] == ["pod-1", "pod-2"]
    queue.done("claim-1")
    assert not queue.is_urgent()
    queue.add("claim-2")
    assert await workers[1] == "claim-2"


async def test_a_deferred_key_comes_behind_all_others_or_when_its_time_has_come():
    queue = WorkQueue[str](group_of=kind_of)
    queue.defer("pod-late", 60)
    queue.defer("pod-soon", 5)
    queue.add("pod-1")
    queue.add("node-1")
    await asyncio.sleep(10)
    assert [await queue.get() for _ in range(4)] == ["pod-1", "node-1", "pod-soon", "pod-late"]
    assert [queue.is_spare(each) for each in ("pod-soon", "pod-late")] == [False, True]
    queue.done("pod-late")
    assert not queue.is_spare("pod-late")
    assert len(queue) == 0


async def test_an_idle_worker_gets_a_key_that_is_deferred_while_another_has_it():
    queue = WorkQueue[str]()
    queue.add("a")
    key = await queue.get()
    idle = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.defer(key, 60)
    await asyncio.sleep(0)
    assert not idle.done(), "no two workers have a key"
    queue.done(key)
    await asyncio.sleep(1)
    assert idle.done()


async def test_owners_take_turns_within_a_group_however_many_keys_one_has():
    queue = WorkQueue[str](group_of=kind_of, owner_of=lambda key: key.split("-")[1])
    for key in ("pod-a-1", "pod-a-2", "pod-a-3", "pod-b-1", "pod-b-2", "node--1", "node--2"):
        queue.add(key)
    found = [await queue.get() for _ in range(3)]
    queue.add("pod-c-1")
    found += [await queue.get() for _ in range(5)]
    assert [each for each in found if each.startswith("pod")] == [
        "pod-a-1",
        "pod-b-1",
        "pod-a-2",
        "pod-b-2",
        "pod-c-1",
        "pod-a-3",
    ]
    assert [found.index("node--1"), found.index("node--2")] == [1, 3]
    assert len(queue) == 0


KINDS = {"claim": 100_000, "pod": 35_000, "node": 5_000, "slice": 5_000, "template": 4_000}
FEW = {"class": 900, "policy": 100}


async def test_a_sweep_of_150000_keys_reaches_every_kind_while_new_ones_keep_coming():
    queue = WorkQueue[str](group_of=kind_of, urgent="claim")
    kinds = KINDS | FEW
    for kind, number in kinds.items():
        for each in range(number):
            queue.add_after(f"{kind}-{each}", 1.0)
    left = {f"{kind}-{each}" for kind, number in kinds.items() for each in range(number)}
    assert len(queue) == len(left) == 150_000
    await asyncio.sleep(2)  # all are due
    first, worked = {}, 0
    while left:
        key = await queue.get()
        queue.done(key)
        left.discard(key)
        worked += 1
        if worked % 100 == 0:
            await asyncio.sleep(0)  # as workers do after each key
        first.setdefault(kind_of(key), worked)
        queue.add(key if key.startswith("pod") else f"claim-{worked % 100_000}")
    assert max(first.values()) < 100, "no kind waits for the many keys of another"
    assert worked < 400_000
    assert 0 < len(queue) <= 150_000


async def test_many_keys_that_are_due_at_once_do_not_keep_the_loop():
    queue = WorkQueue[int]()
    for key in range(10_000):
        queue.add_after(key, 1.0)
    assert await queue.get() == 0
    assert len(queue._ready_keys) < 10_000, "the others follow in later turns of the loop"
    assert [await queue.get() for _ in range(9_999)] == list(range(1, 10_000))
    queue.close()


async def test_a_key_that_is_checked_again_and_again_before_its_time_needs_no_more_room():
    class Key(str):
        __slots__ = ("__weakref__",)

    queue = WorkQueue[str]()
    refs: list[weakref.ref[Key]] = []
    for number in range(10_000):
        key = Key(f"a-{number % 2}")
        refs.append(weakref.ref(key))
        queue.add_after(key, 1800)
        queue.add(key)
        del key
        queue.done(await queue.get())
    assert sum(ref() is not None for ref in refs) < 2_000


@pytest.mark.looptime(False)
async def test_a_key_that_is_due_at_once_has_no_timer_in_the_loop_of_daemons():
    queue = WorkQueue[str]()
    for number, seconds in enumerate((0.01, 1e-4, 2e-4, 0.0, -1.0)):
        queue.add_after(str(number), seconds)
    assert sorted([await queue.get() for _ in range(5)]) == ["0", "1", "2", "3", "4"]
    queue.close()
