"""The client's verdicts of the allocator, with programs that return wrong responses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from drakit_daemon.backoff import Backoff
from drakit_explain import verdicts
from drakit_explain.cel.helper import Helper, QueryError
from drakit_explain.verdicts import Verdict, VerdictOutcome

PROGRAM = """#!{python} -ISu
import json, os, sys, time
for line in sys.stdin:
    answer = dict(reads=[]) if "reads" in json.loads(line) else {answer}
    print(json.dumps(answer))
"""

ALLOCATED = Verdict(outcome=VerdictOutcome.ALLOCATED)


class Place:
    """A program with a given answer, and a helper that starts it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.helper = Helper(
            folder / "drakit-cel",
            response_seconds=1.0,
            backoff=Backoff(first_seconds=0.2, limit_seconds=0.2, jitter=0),
        )

    def answer(self, text: str) -> None:
        """Answer each question with the value of an expression in Python."""
        program = self._folder / "drakit-cel"
        program.write_text(PROGRAM.format(python=sys.executable, answer=text))
        program.chmod(0o755)


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    place.helper.close()


ASKED = b'{"nodes":[{},{}]}'


def ask(place: Place) -> tuple[Verdict, ...]:
    return place.helper.verdicts(ASKED, nodes=2)


def test_each_node_gets_its_verdict(place):
    place.answer('dict(verdicts=[dict(outcome="allocated"), dict(outcome="fatal", text="no key")])')
    fatal = Verdict(outcome=VerdictOutcome.FATAL, text="no key")
    assert ask(place) == (ALLOCATED, fatal)


def test_nothing_is_certain_if_the_allocator_does_not_know_a_field(place):
    place.answer('dict(verdicts=[dict(outcome="unavailable")] * 2, unknown=[\'field "new"\'])')
    doubt = Verdict(outcome=VerdictOutcome.UNDECIDED, text='the allocator has no field "new"')
    assert ask(place) == (doubt, doubt)


def test_a_question_that_is_too_large_is_not_asked(place, monkeypatch):
    monkeypatch.setattr("drakit_explain.cel.helper.MAX_BYTES", 10)
    with pytest.raises(QueryError, match="more than 10 bytes"):
        ask(place)  # no program is installed


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param("dict(verdicts=[])", id="too-few"),
        pytest.param('dict(verdicts=[dict(outcome="allocated")] * 3)', id="too-many"),
        pytest.param('dict(verdicts=[dict(outcome="maybe")] * 2)', id="unknown-outcome"),
        pytest.param("dict(verdicts=[dict()] * 2)", id="no-outcome"),
        pytest.param('dict(verdicts=["allocated"] * 2)', id="no-object"),
        pytest.param('dict(verdicts=[dict(outcome="fatal", text=[])] * 2)', id="text-is-a-list"),
        pytest.param(
            'dict(verdicts=[dict(outcome="fatal")] * 2, unknown=[3])', id="unknown-is-a-number"
        ),
        pytest.param('dict(error="it panicked")', id="refused"),
        pytest.param("time.sleep(9)", id="hangs"),
        pytest.param("os._exit(1)", id="ends"),
    ],
)
def test_a_wrong_answer_costs_its_question_only(place, answer):
    place.answer(answer)
    with pytest.raises(QueryError, match="drakit-cel"):
        ask(place)
    place.helper.close()
    place.answer('dict(verdicts=[dict(outcome="allocated")] * 2)')
    assert ask(place) == (ALLOCATED, ALLOCATED)


def test_the_release(place):
    place.answer('dict(kubernetes="1.37.2")')
    assert place.helper.release() == "1.37.2"


def test_both_sides_have_the_same_limits():
    source = (Path(__file__).parents[3] / "operator/cel/verdict.go").read_text()
    assert f"maxVerdict = {verdicts.MAX_BYTES >> 20} << 20\n" in source
    for each in VerdictOutcome:
        assert f'outcome = "{each.value}"\n' in source
