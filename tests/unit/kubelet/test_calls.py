from __future__ import annotations

from drakit_nodeplugin.claims.answers import PrepareAnswer
from drakit_nodeplugin.kubelet.calls import ClaimCalls
from tests.fakes.kubelet import reference


class Failing:
    def __init__(self, error: str) -> None:
        self.error = error

    async def prepare(self, claims, answer):
        for claim in claims:
            answer(claim.uid, PrepareAnswer(error=self.error))

    unprepare = prepare


async def test_a_text_that_grpc_would_refuse_is_sent_all_the_same():
    calls = ClaimCalls("camera.example.com", Failing("/mnt/\udce9 is gone"), answer_seconds=1)
    for operation in ("prepare", "unprepare"):
        answers = await calls.answer(operation, [reference("a")], method="test")
        assert answers["a"].error == "/mnt/\\udce9 is gone"


async def test_a_text_without_end_is_cut():
    calls = ClaimCalls("camera.example.com", Failing("x" * 5_000_000), answer_seconds=1)
    answers = await calls.answer("prepare", [reference("a")], method="test")
    assert answers["a"].error is not None
    assert len(answers["a"].error) < 5000
