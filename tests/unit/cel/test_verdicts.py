"""The allocator's verdicts by way of the client, beside programs that give wrong answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from drakit_daemon.backoff import Backoff
from drakit_explain import verdicts
from drakit_explain.cel.helper import Helper, QuestionError
from drakit_explain.verdicts import Verdict, VerdictOutcome, VerdictQuestion

PROGRAM = """#!{python} -ISu
import json, os, sys, time
for line in sys.stdin:
    open({folder!r} + "/question", "w").write(line)
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
            answer_seconds=1.0,
            backoff=Backoff(first_seconds=0.2, limit_seconds=0.2, jitter=0),
        )

    def answer(self, text: str) -> None:
        """Answer each question with the value of an expression in Python."""
        program = self._folder / "drakit-cel"
        program.write_text(
            PROGRAM.format(python=sys.executable, folder=str(self._folder), answer=text)
        )
        program.chmod(0o755)

    @property
    def question(self) -> Any:
        """The last question."""
        return json.loads((self._folder / "question").read_text())["verdict"]


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    place.helper.close()


def node(name: str) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"zone": "x"}, "annotations": {"secret": "1"}}
    images = [{"names": ["image"]}]
    status = {"declaredFeatures": ["DRAOptionalNodeOperations"], "images": images}
    return {"metadata": metadata, "spec": {"podCIDR": "10.0.0.0/24"}, "status": status}


def asked(*nodes: dict[str, Any], **changes: Any) -> VerdictQuestion:
    parts = {
        "nodes": nodes or (node("n1"), node("n2")),
        "claims": (),
        "classes": (),
        "slices": (),
        "in_use": (),
        "gates": {},
    }
    return VerdictQuestion(**{**parts, **changes})


def test_each_node_gets_its_verdict(place):
    place.answer('dict(verdicts=[dict(outcome="allocated"), dict(outcome="fatal", text="no key")])')
    fatal = Verdict(outcome=VerdictOutcome.FATAL, text="no key")
    assert place.helper.verdicts(asked()) == (ALLOCATED, fatal)


def test_a_question_has_what_the_allocator_reads_and_fields_that_nobody_knows(place):
    place.answer('dict(verdicts=[dict(outcome="allocated")])')
    config = [{"opaque": {"driver": "a", "parameters": {"secret": "1"}}}]
    request = {"name": "r", "new": 1}
    noise = {"managedFields": [{}], "annotations": {"secret": "1"}, "uid": "u"}
    question = asked(
        node("n1"),
        claims=[
            {
                "metadata": {"name": "claim", "namespace": "lab", **noise},
                "spec": {"devices": {"requests": [request], "config": config}, "new": 2},
                "status": {"reservedFor": [{"name": "secret"}]},
            }
        ],
        classes=[{"metadata": {"name": "c", **noise}, "spec": {"config": config, "new": 3}}],
        slices=[{"metadata": {"name": "s", **noise}, "spec": {"driver": "a", "new": 4}}],
        in_use=[{"driver": "a", "pool": "p", "device": "d"}],
        gates={"DRAAdminAccess": True},
    )
    assert place.helper.verdicts(question) == (ALLOCATED,)
    assert place.question == {
        "nodes": [
            {
                "metadata": {"name": "n1", "labels": {"zone": "x"}},
                "status": {"declaredFeatures": ["DRAOptionalNodeOperations"]},
            }
        ],
        "claims": [
            {
                "metadata": {"namespace": "lab", "name": "claim", "uid": "u"},
                "spec": {"devices": {"requests": [request]}, "new": 2},
            }
        ],
        "classes": [{"metadata": {"name": "c", "uid": "u"}, "spec": {"new": 3}}],
        "slices": [{"metadata": {"name": "s", "uid": "u"}, "spec": {"driver": "a", "new": 4}}],
        "inUse": [{"driver": "a", "pool": "p", "device": "d"}],
        "gates": {"DRAAdminAccess": True},
    }


def test_nothing_is_certain_if_the_allocator_does_not_know_a_field(place):
    place.answer('dict(verdicts=[dict(outcome="unavailable")] * 2, unknown=[\'field "new"\'])')
    doubt = Verdict(outcome=VerdictOutcome.UNDECIDED, text='the allocator has no field "new"')
    assert place.helper.verdicts(asked()) == (doubt, doubt)


def test_nodes_beyond_the_limit_are_undecided(place):
    place.answer('dict(verdicts=[dict(outcome="allocated")] * 64)')
    found = place.helper.verdicts(asked(*(node(f"n{n}") for n in range(66))))
    assert len(place.question["nodes"]) == 64
    assert found[:64] == (ALLOCATED,) * 64
    assert [each.outcome for each in found[64:]] == [VerdictOutcome.UNDECIDED] * 2


def test_a_question_that_is_too_large_is_not_asked(place, monkeypatch):
    monkeypatch.setattr("drakit_explain.cel.helper.MAX_BYTES", 1000)
    large = {"metadata": {"name": "s"}, "spec": {"driver": "a" * 1000}}
    with pytest.raises(QuestionError, match="more than 1000 bytes"):
        place.helper.verdicts(asked(slices=[large]))  # no program is installed


def test_a_nested_body_costs_its_question_only(place):
    nested: dict[str, Any] = {}
    for _ in range(sys.getrecursionlimit() * 100):
        nested = {"a": nested}
    bomb = {"metadata": {"name": "s"}, "spec": nested}
    with pytest.raises(QuestionError, match="nested too deeply"):
        place.helper.verdicts(asked(slices=[bomb]))
    place.answer('dict(verdicts=[dict(outcome="allocated")] * 2)')
    assert place.helper.verdicts(asked()) == (ALLOCATED, ALLOCATED)


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
    with pytest.raises(QuestionError, match="drakit-cel"):
        place.helper.verdicts(asked())
    place.helper.close()
    place.answer('dict(verdicts=[dict(outcome="allocated")] * 2)')
    assert place.helper.verdicts(asked()) == (ALLOCATED, ALLOCATED)


def test_the_release(place):
    place.answer('dict(kubernetes="1.37.2")')
    assert place.helper.release() == "1.37.2"


def test_both_sides_have_the_same_limits():
    source = (Path(__file__).parents[3] / "operator/cel/verdict.go").read_text()
    assert f"maxNodes = {verdicts.MAX_NODES}\n" in source
    assert f"maxVerdict = {verdicts.MAX_BYTES >> 20} << 20\n" in source
    for each in VerdictOutcome:
        assert f'outcome = "{each.value}"\n' in source
