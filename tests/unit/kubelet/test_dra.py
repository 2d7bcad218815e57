from __future__ import annotations

from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.kubelet.dra import ClaimCalls
from tests.fakes.kubelet import HeldClaims, reference


def calls_that_fail(error: str) -> ClaimCalls:
    claims = HeldClaims()
    claims.errors = {"a": error}
    queue = ClaimQueue("camera.example.com", claims)
    return ClaimCalls("camera.example.com", queue, answer_seconds=1)


async def test_a_text_that_grpc_would_refuse_is_sent_all_the_same():
    calls = calls_that_fail("/mnt/\udce9 is gone")
    for operation in ("prepare", "unprepare"):
        answers = await calls.answer(operation, [reference("a")], method="test")
        assert answers["a"].error == "/mnt/\\udce9 is gone"


async def test_a_text_without_end_is_cut():
    calls = calls_that_fail("x" * 5_000_000)
    answers = await calls.answer("prepare", [reference("a")], method="test")
    assert answers["a"].error is not None
    assert len(answers["a"].error) < 5000
