"""Waiting for answers, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from drakit.device import ClaimReference
from drakit_nodeplugin.claims.work import ClaimAnswer, ClaimWork

pytestmark = pytest.mark.looptime

DONE = ClaimAnswer()


def work() -> ClaimWork:
    claim = ClaimReference(namespace="lab", name="claim", uid="a")
    return ClaimWork(operation="prepare", claim=claim)


async def test_work_outlives_its_callers(looptime):
    outliving, answers = work(), []
    outliving.on_answer = answers.append
    impatient = asyncio.create_task(asyncio.wait([outliving.answered], timeout=1))
    cancelled = asyncio.create_task(asyncio.wait([outliving.answered], timeout=10))
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
