"""The operator asks Kubernetes' allocator: in turns, for a short time, and what it reports."""

from __future__ import annotations

import logging
import time

import pytest

from drakit_explain.queries import Query, Verdicts
from drakit_explain.verdicts import Verdict, VerdictOutcome
from drakit_explain.world import World
from drakit_operator import allocating
from drakit_operator.allocating import AllocatorQueries
from drakit_operator.metrics import Metrics

QUESTIONS = [Query(key=key, claims=1, body=b"{}", minor=36) for key in range(8)]


class Program:
    """An allocator that needs some time for each result."""

    def __init__(self, seconds=0.0, problem=""):
        self.seconds = seconds
        self.problem = problem
        self.asked = []

    def answer(self, question):
        time.sleep(self.seconds)
        self.asked.append(question.key)
        return Verdict(outcome=VerdictOutcome.UNDECIDED if self.problem else VerdictOutcome.FATAL)


class Kept(Verdicts):
    def __init__(self):
        super().__init__(World())
        self.keys = []

    def keep(self, question, verdict):
        self.keys.append(question.key)


def asking(program):
    metrics = Metrics()
    return AllocatorQueries(program, metrics), metrics


async def test_each_answer_is_kept_and_counted():
    program, kept = Program(), Kept()
    questions, metrics = asking(program)
    assert (await questions.ask(QUESTIONS, kept, "lab")) is not None
    assert kept.keys == program.asked == list(range(8))
    name = "drakit_operator_allocator_queries_total"
    assert metrics.registry.get_sample_value(name, {"result": "fatal"}) == 8


async def test_after_some_questions_it_is_the_turn_of_another_object(monkeypatch):
    monkeypatch.setattr(allocating, "TURN_SECONDS", 0.01)
    kept = Kept()
    seconds = await asking(Program(0.02))[0].ask(QUESTIONS, kept, "lab")
    assert kept.keys == [0]
    assert seconds is not None
    assert seconds >= 0.02


async def test_a_namespace_without_a_turn_asks_later(monkeypatch):
    monkeypatch.setattr(allocating, "WAIT_SECONDS", 0.01)
    questions, _ = asking(Program())
    async with questions._turns.turn("other"):
        assert await questions.ask(QUESTIONS, Kept(), "lab") is None


async def test_an_allocator_without_answers_is_logged_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    program = Program(problem="it is not installed")
    questions, _ = asking(program)
    for _ in range(3):
        await questions.ask(QUESTIONS, Kept(), "lab")
    program.problem = ""
    await questions.ask(QUESTIONS, Kept(), "lab")
    assert [each.getMessage() for each in caplog.records] == [
        "Kubernetes' allocator does not respond, so some reasons are not reported",
        "Kubernetes' allocator responds again",
    ]
