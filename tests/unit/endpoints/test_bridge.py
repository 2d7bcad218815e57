from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import random
from functools import partial

import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drakit_nodeplugin.endpoints.python.bridge import (
    Bridge,
    BridgeClosedError,
    CallCancelledError,
    CallNotBegunError,
    CallOverdueError,
)

PERSON = contextvars.ContextVar("PERSON", default="nobody")


class Lab:
    """A bridge from a loop to itself: all that two loops do, at one virtual time."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.bridge = Bridge("camera", home=loop, there=loop)
        self.begun: list[str] = []
        self.ended: list[str] = []

    def call(
        self, name: str, *keys: str, seconds: float = 0.0, tail: float = 0.0, key: str = "cam-0"
    ) -> asyncio.Task:
        """Begin a call that works for some seconds, and for some more when it is cancelled."""

        async def work() -> str:
            self.begun.append(name)
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                await asyncio.sleep(tail)
                raise
            finally:
                self.ended.append(name)
            return name

        return asyncio.create_task(self.bridge.call(work, keys=keys or [key], timeout_seconds=300))

    async def ask(self, function, *keys: str, key: str = "cam-0"):
        return await self.bridge.call(function, keys=keys or [key], timeout_seconds=300)


@pytest.fixture
async def lab() -> Lab:
    return Lab()


async def outcome(call: asyncio.Task) -> object:
    """What became of a call: its result, or the class of its error."""
    await asyncio.wait({call})
    if call.cancelled():
        return asyncio.CancelledError
    return type(call.exception()) if call.exception() is not None else call.result()


@pytest.mark.looptime
async def test_an_async_and_a_plain_function_are_answered_and_errors_are_passed_on(lab):
    async def double() -> int:
        return 4

    def fail() -> int:
        raise ValueError("a bug")

    assert await lab.ask(double) == 4
    assert await lab.ask(lambda: 5) == 5
    with pytest.raises(ValueError, match="a bug"):
        await lab.ask(fail)


@pytest.mark.looptime
async def test_calls_of_one_turn_cost_one_wake_up_there_and_one_back(lab, monkeypatch):
    loop = asyncio.get_running_loop()
    woken: list[object] = []
    wake = loop.call_soon_threadsafe

    def count(callback, *arguments, **options):
        woken.append(callback)
        return wake(callback, *arguments, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    calls = [lab.call(f"call-{index}", key=f"cam-{index}") for index in range(64)]
    assert [await call for call in calls] == [f"call-{index}" for index in range(64)]
    assert len(woken) == 2


@pytest.mark.looptime
async def test_a_function_runs_in_the_context_of_its_caller(lab):
    async def who() -> str:
        return PERSON.get()

    async def ask_as(name: str) -> str:
        PERSON.set(name)
        return await lab.ask(who, key=name)

    assert await asyncio.gather(ask_as("ada"), ask_as("bob")) == ["ada", "bob"]


@pytest.mark.looptime
async def test_calls_of_one_key_run_one_after_the_other_and_others_beside_them(lab, looptime):
    calls = [lab.call(name, seconds=10) for name in ("first", "second", "third")]
    other = lab.call("other", seconds=10, key="cam-1")
    assert await other == "other"
    assert looptime == 10
    assert [await call for call in calls] == ["first", "second", "third"]
    assert looptime == 30


@pytest.mark.looptime
async def test_a_cancelled_call_is_cancelled_there_and_the_next_waits_for_its_tail(lab, looptime):
    cancelled = lab.call("cancelled", seconds=100, tail=20)
    following = lab.call("following", seconds=1)
    await asyncio.sleep(10)
    cancelled.cancel()

    assert await outcome(cancelled) is asyncio.CancelledError
    assert looptime == 10, "who gives up does not wait"
    assert await following == "following"
    assert looptime == 31
    assert lab.ended == ["cancelled", "following"]


@pytest.mark.looptime
async def test_a_call_without_an_answer_is_given_up_and_the_next_waits_for_its_tail(lab, looptime):
    hanging = lab.call("hanging", seconds=1000, tail=20)
    following = lab.call("following", seconds=290)

    assert await outcome(hanging) is CallOverdueError
    assert looptime == 300
    assert await outcome(following) is CallNotBegunError
    assert looptime == 300
    await asyncio.sleep(100)
    assert lab.begun == lab.ended == ["hanging"]
    assert await lab.call("later") == "later"


@pytest.mark.looptime
async def test_the_time_of_a_call_begins_when_it_begins(lab, looptime):
    lab.call("first", seconds=200)
    second = lab.call("second", seconds=299)
    third = lab.call("third", seconds=301)
    assert await second == "second"
    assert looptime == 499
    assert await outcome(third) is CallNotBegunError

    assert await outcome(lab.call("slow", seconds=301)) is CallOverdueError
    assert looptime == 799


@pytest.mark.looptime
async def test_a_call_that_stands_in_line_and_is_cancelled_leaves_it(lab):
    first = lab.call("first", seconds=10)
    second = lab.call("second", seconds=10)
    third = lab.call("third", seconds=10)
    await asyncio.sleep(1)
    second.cancel()
    await asyncio.wait({first, second, third})
    assert lab.begun == ["first", "third"]


@pytest.mark.looptime
async def test_a_call_that_is_cancelled_before_it_arrives_never_begins(lab):
    call = lab.call("early")
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.sleep(1)
    assert (await outcome(call), lab.begun) == (asyncio.CancelledError, [])


@pytest.mark.looptime
async def test_a_cancellation_that_the_function_makes_itself_is_no_cancellation_of_its_caller(lab):
    async def confused() -> None:
        raise asyncio.CancelledError

    with pytest.raises(CallCancelledError):
        await lab.ask(confused)


@pytest.mark.looptime
async def test_what_a_call_raises_after_it_was_given_up_is_logged(lab, caplog):
    async def unlucky() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            raise ValueError("cannot undo it")

    call = asyncio.create_task(lab.ask(unlucky))
    await asyncio.sleep(1)
    call.cancel()
    await asyncio.sleep(1)
    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.ERROR, None)
    assert record.exception.endswith("cannot undo it\n")


@pytest.mark.looptime
async def test_a_key_is_busy_until_the_call_that_was_made_with_it_has_ended_there(lab):
    call = lab.call("call", "cam-0", "cam-1", seconds=10, tail=100)
    await asyncio.sleep(0)
    assert lab.bridge.busy(["cam-1", "cam-2"]), "it is on its way"
    assert not lab.bridge.busy(["cam-2"])
    await asyncio.sleep(1)
    call.cancel()
    await asyncio.sleep(98)
    assert call.cancelled()
    assert lab.bridge.busy(["cam-0"]), "it still undoes what it did"
    await asyncio.sleep(3)
    assert not lab.bridge.busy(["cam-0", "cam-1"])


@pytest.mark.looptime
async def test_a_loop_that_ends_begins_nothing_and_its_calls_hear_of_it(lab):
    running = lab.call("running", seconds=10)
    waiting = lab.call("waiting", seconds=10)
    cancelled = lab.call("cancelled", seconds=10)
    await asyncio.sleep(1)
    late = lab.call("late", key="cam-1")  # on its way while the loop ends
    await asyncio.sleep(0)
    lab.bridge.end()
    cancelled.cancel()

    assert await outcome(waiting) is BridgeClosedError
    assert await outcome(late) is BridgeClosedError
    assert lab.bridge.stop_reason == "it ended meanwhile"
    assert not running.done()
    lab.bridge.close("the bus is gone")
    with pytest.raises(BridgeClosedError, match="the bus is gone"):
        await running
    with pytest.raises(BridgeClosedError, match="the bus is gone"):
        await lab.ask(lambda: 1)
    await asyncio.sleep(20)
    assert lab.begun == ["running"]


async def test_an_answer_that_was_on_its_way_when_the_loop_ended_is_taken():
    home, there = asyncio.get_running_loop(), asyncio.new_event_loop()
    bridge = Bridge("camera", home=home, there=there)
    call = asyncio.create_task(bridge.call(lambda: 7, keys=["cam-0"], timeout_seconds=300))
    for _ in range(3):
        await asyncio.sleep(0)

    def run() -> None:
        for _ in range(3):  # its arrival, its run, its end; the answer is put, and never sent
            there.call_soon(there.stop)
            there.run_forever()
        there.close()

    await asyncio.to_thread(run)
    bridge.close("its stream ended")
    assert await call == 7


async def test_a_loop_that_is_closed_between_two_turns_stops_the_calls_on_their_way():
    home, there = asyncio.get_running_loop(), asyncio.new_event_loop()
    bridge = Bridge("camera", home=home, there=there)
    call = asyncio.create_task(bridge.call(lambda: 7, keys=["cam-0"], timeout_seconds=300))
    await asyncio.sleep(0)
    there.close()
    with pytest.raises(BridgeClosedError, match="it ended meanwhile"):
        await call


@pytest.mark.looptime
async def test_a_call_of_several_keys_waits_for_each_of_them_and_holds_up_those_after_it(
    lab, looptime
):
    lab.call("a", "cam-0", seconds=10)
    lab.call("b", "cam-1", seconds=20)
    lab.call("both", "cam-0", "cam-1", seconds=5)
    lab.call("a-again", "cam-0", seconds=1)
    last = lab.call("b-again", "cam-1", seconds=1)
    beside = lab.call("beside", "cam-2", seconds=7)
    await beside
    assert looptime == 7
    await last
    assert looptime == 26
    assert lab.begun == ["a", "b", "beside", "both", "a-again", "b-again"]


@pytest.mark.looptime
async def test_a_call_that_names_a_key_twice_does_not_wait_for_itself(lab, looptime):
    assert await lab.call("twice", "cam-0", "cam-0", seconds=1) == "twice"
    assert await lab.call("next", "cam-0", seconds=1) == "next"
    assert looptime == 2


@pytest.mark.looptime
async def test_a_call_without_a_key_waits_for_none(lab, looptime):
    lab.call("first", "cam-0", seconds=10)
    free = asyncio.create_task(
        lab.bridge.call(lambda: asyncio.sleep(1, "free"), keys=[], timeout_seconds=300)
    )
    assert await free == "free"
    assert looptime == 1


@pytest.mark.looptime
async def test_a_call_of_several_keys_that_is_cancelled_in_line_lets_those_after_it_begin(
    lab, looptime
):
    lab.call("a", "cam-0", seconds=10)
    both = lab.call("both", "cam-0", "cam-1", seconds=10)
    after = lab.call("after", "cam-1", seconds=1)
    await asyncio.sleep(2)
    assert lab.begun == ["a"], "it is the first in the second line, and keeps it"
    both.cancel()
    await after
    assert looptime == 3
    assert lab.begun == ["a", "after"]


@pytest.mark.looptime
async def test_a_call_of_several_keys_that_cannot_begin_says_so_and_frees_its_keys(lab, looptime):
    lab.call("hanging", "cam-0", seconds=1000, tail=1000)
    both = lab.call("both", "cam-0", "cam-1")
    assert await outcome(both) is CallNotBegunError
    assert looptime == 300
    assert await lab.call("after", "cam-1") == "after"
    assert looptime == 300


@pytest.mark.looptime
async def test_a_loop_that_ends_answers_calls_that_stand_in_several_lines_once(lab):
    running = lab.call("running", "cam-0", seconds=10)
    both = lab.call("both", "cam-0", "cam-1")
    behind = lab.call("behind", "cam-1")
    await asyncio.sleep(1)
    lab.bridge.end()
    assert [await outcome(call) for call in (both, behind)] == [BridgeClosedError] * 2
    assert await outcome(running) == "running"
    assert lab.begun == ["running"]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_calls_that_have_a_key_in_common_never_overlap_keep_their_order_and_all_end(data):
    """Any sequence of calls, pauses and cancellations, in a loop of its own."""
    keys = st.sets(st.integers(0, 3), max_size=3)
    seconds = st.sampled_from([0, 0, 1, 7, 400])
    steps = data.draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("call"), keys, seconds, st.sampled_from([0, 3])),
                st.tuples(st.just("pause"), st.sampled_from([0, 1, 2])),
                st.tuples(st.just("cancel"), st.integers(0, 30)),
            ),
            max_size=30,
        )
    )

    async def play() -> None:
        loop = asyncio.get_running_loop()
        bridge = Bridge("camera", home=loop, there=loop)
        running: dict[int, frozenset[int]] = {}
        begun: list[int] = []
        calls: list[tuple[frozenset[int], asyncio.Task]] = []

        async def work(number: int, keys: frozenset[int], seconds: float, tail: float) -> None:
            assert not [other for other in running.values() if other & keys]
            running[number] = keys
            begun.append(number)
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                await asyncio.sleep(tail)
                raise
            finally:
                del running[number]

        for step in steps:
            match step:
                case ("call", keys, seconds, tail):
                    function = partial(work, len(calls), frozenset(keys), seconds, tail)
                    call = bridge.call(function, keys=keys, timeout_seconds=300)
                    calls.append((frozenset(keys), asyncio.create_task(call)))
                case ("pause", seconds):
                    await asyncio.sleep(seconds)
                case ("cancel", number) if number < len(calls):
                    calls[number][1].cancel()
        ends = {await outcome(call) for _, call in calls}
        assert ends <= {None, asyncio.CancelledError, CallOverdueError, CallNotBegunError}

        await asyncio.sleep(10)
        assert running == {}
        for earlier, later in itertools.combinations(begun, 2):
            if calls[earlier][0] & calls[later][0]:
                assert earlier < later, "calls of a key begin in the order in which they were made"
        for key in range(4):
            answer = await bridge.call(lambda: "free", keys=[key], timeout_seconds=1)
            assert answer == "free"

    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(play())


@pytest.mark.looptime
@pytest.mark.parametrize("seed", range(10))
async def test_whatever_is_cancelled_calls_of_one_key_do_not_overlap_and_all_end(lab, seed):
    chance = random.Random(seed)
    running: dict[str, int] = {}

    async def work(key: str) -> None:
        running[key] = running.get(key, 0) + 1
        assert running[key] == 1
        try:
            await asyncio.sleep(chance.choice([0, 1, 5, 400]))
        except asyncio.CancelledError:
            await asyncio.sleep(chance.choice([0, 2]))
            raise
        finally:
            running[key] -= 1

    calls: list[asyncio.Task] = []
    for _ in range(60):
        key = f"cam-{chance.randrange(3)}"
        calls.append(asyncio.create_task(lab.ask(lambda key=key: work(key), key=key)))
        if chance.random() < 0.5:
            await asyncio.sleep(chance.choice([0, 0, 1, 3]))
        if chance.random() < 0.5:
            chance.choice(calls).cancel()
    ends = {await outcome(call) for call in calls}

    assert ends <= {None, asyncio.CancelledError, CallOverdueError, CallNotBegunError}
    await asyncio.sleep(10)
    assert set(running.values()) == {0}
    assert await lab.ask(lambda: "free", key="cam-0") == "free"
