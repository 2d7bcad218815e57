from __future__ import annotations

import asyncio
import random

import pytest

from drakit_driver.runtime.contract import ConnectionEndedError
from drakit_driver.runtime.failures import CallCancelledError
from drakit_driver.runtime.loop import DriverLoop


class Lab:
    def __init__(self) -> None:
        self.loop = DriverLoop(asyncio.get_running_loop())
        self.begun: list[str] = []
        self.ended: list[str] = []

    def call(self, name: str, *, seconds: float = 0.0, tail: float = 0.0) -> asyncio.Task:
        """Start a call that works for some seconds, and for some more when it is canceled."""

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

        return asyncio.create_task(self.loop.call(work))


@pytest.fixture
async def lab() -> Lab:
    return Lab()


async def outcome(call: asyncio.Task) -> object:
    """Return the outcome of a call: its result, or the class of its error."""
    await asyncio.wait({call})
    if call.cancelled():
        return asyncio.CancelledError
    return type(call.exception()) if call.exception() is not None else call.result()


async def seven() -> int:
    return 7


@pytest.mark.looptime
async def test_a_second_cancellation_ends_the_wait_and_does_not_cut_the_clean_up(lab, looptime):
    call = lab.call("cancelled", seconds=100, tail=20)
    await asyncio.sleep(10)
    for _ in range(2):
        call.cancel()
        await asyncio.sleep(1)
    assert await outcome(call) is asyncio.CancelledError
    assert (looptime, lab.ended) == (12, [])
    await asyncio.sleep(20)
    assert lab.ended == ["cancelled"]


@pytest.mark.looptime
async def test_a_call_that_is_cancelled_before_it_begins_there_never_begins(lab):
    for turns in range(2):
        call = lab.call(f"early-{turns}")
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        assert await outcome(call) is asyncio.CancelledError
    assert lab.begun == []


@pytest.mark.looptime
async def test_a_cancellation_that_the_function_makes_itself_is_no_cancellation_of_its_caller(lab):
    async def confused() -> None:
        raise asyncio.CancelledError

    with pytest.raises(CallCancelledError):
        await lab.loop.call(confused)


@pytest.mark.looptime
async def test_an_exception_of_a_cancelled_call_is_raised(lab):
    async def unlucky() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            raise ValueError("cannot undo it")

    call = asyncio.create_task(lab.loop.call(unlucky))
    await asyncio.sleep(1)
    call.cancel()
    assert await outcome(call) is ValueError


async def test_an_answer_that_was_on_its_way_when_the_loop_ended_is_taken():
    there = asyncio.new_event_loop()
    loop = DriverLoop(there)
    call = asyncio.create_task(loop.call(seven))
    await asyncio.sleep(0)

    def run() -> None:
        for _ in range(3):  # its arrival, its run, and its result
            there.call_soon(there.stop)
            there.run_forever()
        there.close()

    await asyncio.to_thread(run)
    loop.close("its stream ended")
    assert await call == 7


async def test_calls_that_a_closed_loop_never_received_get_the_reason():
    there = asyncio.new_event_loop()
    loop = DriverLoop(there)
    call = asyncio.create_task(loop.call(seven))
    await asyncio.sleep(0)
    there.close()
    late = asyncio.create_task(loop.call(seven))
    assert await outcome(late) is ConnectionEndedError
    loop.close("its stream ended")
    for each in (call, loop.call(seven)):
        with pytest.raises(ConnectionEndedError, match="its stream ended"):
            await each


@pytest.mark.looptime
@pytest.mark.parametrize("seed", range(10))
async def test_all_calls_end_after_any_cancellations(lab, seed):
    chance = random.Random(seed)
    calls: list[asyncio.Task] = []
    for number in range(60):
        seconds, tail = chance.choice([0, 1, 5, 400]), chance.choice([0, 2])
        calls.append(lab.call(f"call-{number}", seconds=seconds, tail=tail))
        if chance.random() < 0.5:
            await asyncio.sleep(chance.choice([0, 0, 1, 3]))
        if chance.random() < 0.5:
            chance.choice(calls).cancel()
    ends = [await outcome(call) for call in calls]
    assert set(ends) <= {asyncio.CancelledError, *lab.ended}
    assert sorted(lab.begun) == sorted(lab.ended)
