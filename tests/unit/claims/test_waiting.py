"""Waiting for answers, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from drakit.device import ClaimReference
from drakit_nodeplugin.claims.work import (
    ClaimAnswer,
    ClaimWork,
    all_answered,
)

pytestmark = pytest.mark.looptime

DONE = ClaimAnswer()


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
