"""The client of drakit-cel, with programs that misbehave in every possible way."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from drakit_daemon.backoff import Backoff
from drakit_explain.cel.helper import (
    Helper,
    HelperError,
    LateError,
    QueryError,
    find_helper,
    find_release,
)
from drakit_explain.selectors import FeatureGates, SelectorResult

PROGRAM = """#!{python} -ISu
import json, os, signal, sys, time
folder = {folder!r}
with open(folder + "/starts", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + chr(10))
def say(text):
    sys.stdout.write(text)
    sys.stdout.flush()
def good(question):
    if "reads" in question:
        return dict(reads=[dict(attributes=["a/model"]) for _ in question["reads"]["expressions"]])
    if "verdict" in question:
        return dict(verdicts=[dict(outcome="allocated") for _ in question["verdict"]["nodes"]])
    count = len(question["select"]["devices"])
    return dict(selections=[dict(outcomes="t" * count)])
{preamble}
for line in sys.stdin:
    question = json.loads(line)
    poisoned = "poison" in line
    answer = json.dumps(good(question)) + chr(10)
{behavior}
    say(answer)
"""

GOOD = "    pass"
DEVICES = [{"driver": "a"}] * 3
SELECTED = [SelectorResult(selected=True)] * 3


class Place:
    """A program that can be replaced, and a helper that starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "drakit-cel"
        self.helper = Helper(
            self.program,
            response_seconds=1.0,
            backoff=Backoff(first_seconds=0.2, limit_seconds=0.2, jitter=0),
        )

    def install(self, behavior: str = GOOD, *, preamble: str = "") -> None:
        text = PROGRAM.format(
            python=sys.executable, folder=str(self.folder), behavior=behavior, preamble=preamble
        )
        self.program.write_text(text)
        self.program.chmod(0o755)

    @property
    def starts(self) -> list[str]:
        log = self.folder / "starts"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    place.helper.close()


def test_one_process_answers_all_questions(place):
    place.install()
    assert place.helper.select("true", DEVICES) == SELECTED
    (reads,) = place.helper.reads(["true"])
    assert reads.attributes == {"a/model"}
    assert len(place.starts) == 1


def test_more_expressions_than_one_question_may_have_are_asked_in_parts(place):
    place.install(
        "    asked = question.get('reads', {}).get('expressions', [])\n"
        "    if len(asked) > 100: time.sleep(9)\n"
        "    answer = json.dumps(dict(reads=[dict(attributes=[each]) for each in asked])) + chr(10)"
    )
    expressions = [f"e{number}" for number in range(250)]
    found = place.helper.reads(expressions)
    assert [each.attributes for each in found] == [{each} for each in expressions]


def test_a_process_that_died_since_the_last_question_is_replaced(place):
    place.install()
    assert place.helper.select("true", DEVICES) == SELECTED
    process = place.helper._process
    process.kill()
    process.wait()
    assert place.helper.select("true", DEVICES) == SELECTED
    assert len(place.starts) == 2


@pytest.mark.parametrize(
    "behavior",
    [
        pytest.param("    if poisoned: os._exit(1)", id="dies-before-its-answer"),
        pytest.param("    if poisoned: say(answer[:9]); os._exit(1)", id="dies-in-its-answer"),
        pytest.param("    if poisoned: time.sleep(9)", id="hangs"),
        pytest.param("    if poisoned: os.kill(os.getpid(), signal.SIGSTOP)", id="is-frozen"),
        pytest.param("    if poisoned: answer = 'nonsense' + chr(10)", id="answers-no-JSON"),
        pytest.param("    if poisoned: answer = '{}' + chr(10)", id="answers-nothing"),
        pytest.param("    if poisoned: answer = '[' * 99999 + chr(10)", id="answers-nested-JSON"),
        pytest.param("    if poisoned: answer += answer", id="answers-twice"),
        pytest.param("    if poisoned: answer = answer.replace('t', '', 3)", id="breaks-names"),
        pytest.param(
            "    if poisoned: answer = answer.replace('ttt', 'tt')",
            id="answers-for-too-few-devices",
        ),
        pytest.param(
            "    if poisoned: answer = answer.replace('ttt', 'tex')", id="unknown-outcomes"
        ),
        pytest.param("    if poisoned: answer = answer.replace('ttt', 'tet')", id="lacks-an-error"),
        pytest.param('    if poisoned: answer = \'{"error": "no"}\' + chr(10)', id="refuses"),
    ],
)
def test_a_question_that_gets_no_answer_costs_itself_only(place, behavior):
    place.install(behavior)
    with pytest.raises(QueryError, match="drakit-cel"):
        place.helper.select("poison", DEVICES)
    assert len(place.starts) <= 2
    assert place.helper.select("true", DEVICES) == SELECTED


def test_a_question_without_an_answer_in_time_is_not_asked_again(place):
    """All other questions wait meanwhile, and ten tenants can each have such a selector."""
    place.install("    if poisoned: time.sleep(9)")
    with pytest.raises(LateError, match="did not respond in time"):
        place.helper.select("poison", DEVICES)
    assert len(place.starts) == 2, "the next question waits for no start"


def test_a_process_that_dies_after_each_answer_still_answers(place):
    place.install(
        """    if "true" in line: say(answer); os._exit(0)""",
    )
    for _ in range(3):
        assert place.helper.select("true", DEVICES) == SELECTED
    assert len(place.starts) == 3


def test_output_that_nobody_asked_for_is_no_answer_to_the_next_question(place):
    place.install(
        """
    if "first" in line:
        say(answer)
        time.sleep(0.1)
        answer = json.dumps(dict(selections=[dict(outcomes="fff")])) + chr(10)
"""
    )
    assert place.helper.select("first", DEVICES) == SELECTED
    time.sleep(0.5)
    assert place.helper.select("second", DEVICES) == SELECTED
    assert len(place.starts) == 2


def test_an_answer_that_does_not_end_is_bounded(place, monkeypatch):
    monkeypatch.setattr("drakit_explain.cel.helper.MAX_ANSWER", 1 << 20)
    place.install("    while poisoned: say('x' * 65536)")
    with pytest.raises(QueryError, match="more than 1048576 bytes"):
        place.helper.select("poison", DEVICES)


@pytest.mark.parametrize(
    ("behavior", "preamble"),
    [
        pytest.param(GOOD, "os._exit(1)", id="dies-at-its-start"),
        pytest.param(GOOD, "time.sleep(9)", id="hangs-at-its-start"),
        pytest.param("    os._exit(1)", "", id="answers-no-question"),
        pytest.param("    answer = '{}' + chr(10)", "", id="answers-another-question"),
        pytest.param(None, "", id="is-missing"),
    ],
)
def test_a_program_that_does_not_work_is_started_again_after_a_pause(place, behavior, preamble):
    if behavior is not None:
        place.install(behavior, preamble=preamble)
    with pytest.raises(HelperError, match="does not work") as first:
        place.helper.select("true", DEVICES)
    assert not isinstance(first.value, QueryError)
    starts = len(place.starts)
    assert starts <= 1

    with pytest.raises(HelperError) as second:
        place.helper.select("true", DEVICES)
    assert len(place.starts) == starts, "it was started before the end of the pause"
    assert str(second.value) == str(first.value)
    assert 0 < second.value.retry_seconds <= first.value.retry_seconds

    place.install()
    time.sleep(second.value.retry_seconds)
    assert place.helper.select("true", DEVICES) == SELECTED


def test_other_feature_gates_start_another_process(place):
    place.install()
    place.helper.select("true", DEVICES)
    place.helper.use(FeatureGates())
    place.helper.select("true", DEVICES)
    assert len(place.starts) == 1
    place.helper.use(FeatureGates(list_attributes=False))
    place.helper.select("true", DEVICES)
    assert place.starts == [
        '["-consumable-capacity=true", "-list-attributes=true"]',
        '["-consumable-capacity=true", "-list-attributes=false"]',
    ]


@pytest.mark.parametrize("variable", ["DRAKIT_CEL", "PATH"])
def test_the_program_of_a_release_is_beside_the_named_one_or_on_the_path(tmp_path, variable):
    older, newest = tmp_path / "drakit-cel-1.36", tmp_path / "drakit-cel-1.37"
    for program in (older, newest):
        program.touch(mode=0o755)
    environ = {variable: str(newest if variable == "DRAKIT_CEL" else tmp_path)}
    assert find_release("1.36", environ) == find_helper("1.36", environ) == older
    assert find_release("1.35", environ) is None
    for another in ("1.35", "1.38", ""):
        assert find_helper(another, environ) == newest


def test_an_image_with_fewer_programs_than_its_variable_names_uses_those_that_it_has(tmp_path):
    environ = {"DRAKIT_CEL": str(tmp_path / "drakit-cel-1.37")}
    assert find_helper("", environ) == tmp_path / "drakit-cel-1.37"  # it names what is missing
    (tmp_path / "drakit-cel-1.36").touch(mode=0o755)
    assert find_helper("", environ) == find_helper("1.35", environ) == tmp_path / "drakit-cel-1.36"


def test_a_program_of_an_unnamed_release_is_better_than_none(tmp_path):
    program = tmp_path / "drakit-cel"
    program.touch(mode=0o755)
    (tmp_path / "drakit-cel-1.37").touch(mode=0o755)
    assert find_helper("1.36", {"PATH": str(tmp_path)}) == program
    assert find_helper("1.36", {"PATH": "/nowhere"}) is None


def test_the_programs_of_an_installation_need_no_path_and_are_of_its_version(tmp_path):
    included, path = tmp_path / "programs", tmp_path / "bin"
    for folder in (included, path):
        folder.mkdir()
        for minor in ("1.36", "1.37"):
            (folder / f"drakit-cel-{minor}").touch(mode=0o755)
    environ = {"PATH": str(path)}
    assert find_release("1.36", environ, included=included) == included / "drakit-cel-1.36"
    assert find_helper("1.35", environ, included=included) == included / "drakit-cel-1.37"
    assert find_helper("", {"PATH": ""}, included=included) == included / "drakit-cel-1.37"
