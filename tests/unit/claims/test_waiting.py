"""Waiting for drivers and for answers; in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from drakit.device import ClaimReference
from drakit_nodeplugin.claims.work import (
    ClaimAnswer,
    ClaimWork,
    all_answered,
    raised_by,
    waves,
)

pytestmark = pytest.mark.looptime

DONE = ClaimAnswer()


async def collect(futures):
    async with aclosing(waves(futures)) as groups:
        return [dict(group) async for group in groups]


def futures_of(*names):
    loop = asyncio.get_running_loop()
    return {name: loop.create_future() for name in names}


@pytest.fixture(params=[1, 2], ids=["one", "two"])
def names(request):
    return "ab"[: request.param]


# ---------------------------------------------------------------- waves


async def test_a_call_that_another_caller_cancels_ends_like_others(names):
    futures = futures_of(*names)
    waiting = asyncio.create_task(collect(futures))
    await asyncio.sleep(0)
    for future in futures.values():
        future.cancel()
    assert await waiting == [futures]
    assert {type(raised_by(future)) for future in futures.values()} == {asyncio.CancelledError}


async def test_a_call_that_fails_has_ended_like_others(names):
    futures = futures_of(*names)
    waiting = asyncio.create_task(collect(futures))
    await asyncio.sleep(0)
    for future in futures.values():
        future.set_exception(OSError("broken"))
    assert await waiting == [futures]
    assert {str(raised_by(future)) for future in futures.values()} == {"broken"}


async def test_a_cancelled_caller_gives_up_all_calls(names):
    futures = futures_of(*names)
    waiting = asyncio.create_task(collect(futures))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert all(future.cancelled() for future in futures.values())


async def test_a_caller_is_cancelled_even_if_the_last_call_has_just_ended():
    futures = futures_of("a")
    waiting = asyncio.create_task(collect(futures))
    await asyncio.sleep(0)
    futures["a"].set_result(None)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_slow_call_delays_others_by_a_moment(looptime):
    futures = futures_of("fast", "slow")
    loop = asyncio.get_running_loop()
    loop.call_later(0.001, futures["fast"].set_result, None)
    loop.call_later(100, futures["slow"].set_result, None)
    async with aclosing(waves(futures)) as groups:
        assert [*await anext(groups)] == ["fast"]
        assert looptime < 0.1
        assert [*await anext(groups)] == ["slow"]
        assert looptime == 100


# ---------------------------------------------------------------- answers


def work() -> ClaimWork:
    claim = ClaimReference(namespace="lab", name="claim", uid="a")
    return ClaimWork(operation="prepare", claim=claim)


async def test_a_caller_resumes_one_turn_after_the_last_answer():
    works = [work(), work()]
    waiting = asyncio.create_task(all_answered(works, timeout_seconds=10))
    await asyncio.sleep(0)
    works[0].finish(DONE)
    await asyncio.sleep(0)
    assert not waiting.done()
    works[1].finish(DONE)
    await asyncio.sleep(0)
    assert waiting.done()


async def test_work_outlives_its_callers(looptime):
    outliving, answers = work(), []
    outliving.callbacks.append(answers.append)
    impatient = asyncio.create_task(all_answered([outliving], timeout_seconds=1))
    cancelled = asyncio.create_task(all_answered([outliving], timeout_seconds=10))
    await impatient
    assert looptime == 1
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert outliving.answer is None
    outliving.finish(DONE)
    assert answers == [DONE]
    assert outliving.answer is DONE


async def test_work_is_answered_once():
    answered = work()
    answered.finish(DONE)
    with pytest.raises(asyncio.InvalidStateError):
        answered.finish(DONE)
