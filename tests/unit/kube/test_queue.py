"""The work queue of keys, on a virtual clock."""

import asyncio
import itertools
import weakref

import pytest

from drakit_daemon.kube.queue import CREDIT_SECONDS, MANY_OWNERS, Turns, WorkQueue

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


# ---------------------------------------------------------------- whose turn it is


def owner_of(key):
    return key.partition("-")[0]


async def served(arrivals, *, costs, until=1000.0):
    """
    Return the time at which a single worker takes each key, keyed by the key.

    :param arrivals: the keys that are added at each time.
    :param costs: the seconds that the keys of each owner take; 0.1 for all others.
    """
    queue, loop, taken = WorkQueue[str](owner_of=owner_of), asyncio.get_running_loop(), {}

    async def work():
        while True:
            key = await queue.get()
            taken[key] = round(loop.time(), 1)
            cost = costs.get(owner_of(key), 0.1)
            await asyncio.sleep(cost)
            queue.charge(key, cost)
            queue.done(key)

    worker = asyncio.create_task(work())
    for at, keys in arrivals.items():
        await asyncio.sleep(at - loop.time())
        for key in keys:
            queue.add(key)
    while len(queue) and loop.time() < until:
        await asyncio.sleep(1)
    worker.cancel()
    queue.close()
    return taken


def keys(owner, number):
    return [f"{owner}-{each}" for each in range(number)]


@pytest.mark.parametrize(
    ("costs", "owners", "order"),
    [
        pytest.param(
            {},
            {"a": 3, "b": 2, "c": 1},
            "a-0 b-0 c-0 a-1 b-1 a-2",
            id="owners-take-turns-however-many-keys-one-has",
        ),
        pytest.param(
            {"slow": 0.3},
            {"slow": 3, "fast": 5},
            "slow-0 fast-0 fast-1 fast-2 slow-1 fast-3 fast-4 slow-2",
            id="the-owner-that-has-used-less-time-comes-first",
        ),
        pytest.param(
            {"free": 0.0},
            {"free": 3, "a": 2},
            "free-0 a-0 free-1 free-2 a-1",
            id="keys-that-cost-nothing-come-first",
        ),
    ],
)
async def test_the_order_of_keys(costs, owners, order):
    added = [key for owner, number in owners.items() for key in keys(owner, number)]
    taken = await served({0: added}, costs=costs)
    assert list(taken) == order.split()


@pytest.mark.parametrize(
    ("others", "number", "seconds"),
    [
        pytest.param(1, 1, 1.0, id="one-key-waits-for-the-one-in-progress"),
        pytest.param(200, 1, 1.0, id="however-many-others-there-are"),
        pytest.param(200, 10, 2.0, id="with-a-burst-of-keys"),
        pytest.param(20, 20, 40.0, id="a-larger-burst-shares-the-time-with-the-others"),
    ],
)
async def test_an_owner_that_was_idle_waits_for_no_more_than_one_key_of_others(
    others, number, seconds
):
    busy = [key for other in range(others) for key in keys(f"busy{other}", 600 // others)]
    mine = keys("mine", number)
    taken = await served(
        {0: busy, 300.5: mine},
        costs={owner_of(key): 1.0 for key in busy},
        until=300.5 + seconds + 1,
    )
    assert max(taken.get(key, 1e9) for key in mine) <= 300.5 + seconds


async def test_an_owner_with_little_work_does_not_save_time_for_later():
    quiet = {at: [f"quiet-early{at}"] for at in range(1, 100, 10)}
    others = {0: keys("a", 90) + keys("b", 90)}
    burst = {100: keys("quiet", 60)}
    taken = await served(others | quiet | burst, costs=dict.fromkeys("ab", 1.0), until=115)
    late = list(itertools.dropwhile(lambda key: key != "quiet-0", taken))
    first = list(itertools.takewhile(lambda key: owner_of(key) == "quiet", late))
    assert len(first) == pytest.approx(CREDIT_SECONDS / 0.1, abs=1)


async def test_keys_in_another_lane_do_not_wait_for_those_of_the_first():
    queue = WorkQueue[str](lanes=("", "urgent"), lane_of=lambda key: key.partition("-")[2])
    workers = [asyncio.create_task(queue.get("urgent")) for _ in range(2)]
    await asyncio.sleep(0)
    queue.add("a-")
    await asyncio.sleep(10)
    assert not any(each.done() for each in workers)
    queue.add("a-urgent")
    assert await workers[0] == "a-urgent"
    assert queue.is_busy("urgent")
    assert await queue.get() == "a-"
    queue.done("a-urgent")
    assert not queue.is_busy("urgent")
    queue.add("b-urgent")
    assert await workers[1] == "b-urgent"


@pytest.mark.parametrize("changed", [False, True])
async def test_a_key_that_moves_to_another_lane_is_in_one_lane_only(changed):
    queue = WorkQueue[str](lanes=("", "other"))
    queue.add("a")
    await queue.get()
    queue.move("a", "other")
    if changed:
        queue.add("a")
    queue.done("a")
    queue.add("a")
    assert len(queue) == 1
    assert not queue.is_busy("")
    assert await queue.get("other") == "a"
    queue.add("a")
    queue.done("a")
    assert await queue.get() == "a"


async def test_a_key_that_goes_on_in_another_lane_stays_the_first():
    queue = WorkQueue[str](lanes=("", "other"))
    for key in ("a", "b"):
        queue.add(key)
        await queue.get()
        queue.move(key, "other")
        queue.done(key)
    for _ in range(3):
        assert await queue.get("other") == "a"
        queue.move("a", "other")
        queue.done("a")
    assert await queue.get("other") == "a"
    queue.add("a")
    queue.done("a")
    assert [await queue.get("other"), await queue.get()] == ["b", "a"]
    queue.add("c")
    queue.add("a")
    queue.done("a")
    assert await queue.get() == "c", "a key that has changed meanwhile comes last"


async def test_owners_without_work_have_no_account():
    queue = WorkQueue[str](owner_of=owner_of)
    for number in range(3 * MANY_OWNERS):
        queue.add(f"{number}-")
        key = await queue.get()
        queue.charge(key, CREDIT_SECONDS)
        queue.done(key)
        queue.add("busy-")
        key = await queue.get()
        queue.charge(key, 2 * CREDIT_SECONDS)
        queue.done(key)
    assert len(queue._lanes[""].share._used) <= 2 * MANY_OWNERS


async def take(turns, owner, log):
    async with turns.turn(owner):
        log.append(owner)
        await asyncio.sleep(1)


async def test_the_next_turn_is_for_the_owner_that_has_used_least():
    turns, log = Turns(clock=asyncio.get_running_loop().time), []
    async with asyncio.TaskGroup() as group:
        for owner in ("hostile", "hostile", "hostile", "innocent"):
            group.create_task(take(turns, owner, log))
    assert log == ["hostile", "innocent", "hostile", "hostile"]


@pytest.mark.parametrize("at", ["before-its-turn", "with-its-turn"])
async def test_a_turn_that_is_canceled_goes_to_the_next(at):
    turns, log = Turns(), []
    async with turns.turn("a"):
        second = asyncio.create_task(take(turns, "b", log))
        third = asyncio.create_task(take(turns, "c", log))
        await asyncio.sleep(1)
        if at == "before-its-turn":
            second.cancel()
            await asyncio.sleep(1)
    second.cancel()
    await asyncio.wait({second, third})
    assert log == ["c"]
    await take(turns, "d", log)
    assert log == ["c", "d"]


# ---------------------------------------------------------------- many keys


KINDS = {"claim": 100_000, "pod": 35_000, "node": 5_000, "slice": 5_000, "template": 4_000}
FEW = {"class": 900, "policy": 100}


async def test_a_sweep_of_150000_keys_reaches_every_kind_while_new_ones_keep_coming():
    queue = WorkQueue[str](owner_of=owner_of)
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
        first.setdefault(owner_of(key), worked)
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
