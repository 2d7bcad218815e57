"""The list of known differences from the tables of Kubernetes' allocator tests."""

from __future__ import annotations

import pytest

from drakit_explain.allocation import Outcome
from e2e.images.cache import ImageError
from tests.oracle.dumps import with_dump
from tests.oracle.tables import Answers, Case, judge, listed, undecided_problem

CASE = Case("1.36", "simple")
AGREE = Answers(Outcome.FITS, Outcome.FITS)
DIFFER = Answers(Outcome.FITS, Outcome.NO_FIT)
OTHER = Answers(Outcome.FAILED, Outcome.NO_FIT)
UNDECIDED = Answers(Outcome.UNDECIDED, Outcome.NO_FIT)


@pytest.mark.parametrize(
    ("answers", "known", "problem"),
    [
        pytest.param(AGREE, None, None, id="equal-answers-are-good"),
        pytest.param(UNDECIDED, None, None, id="undecided-is-good"),
        pytest.param(DIFFER, DIFFER, None, id="a-listed-difference-is-good"),
        pytest.param(DIFFER, None, "does not list it", id="another-difference-is-a-problem"),
        pytest.param(DIFFER, OTHER, "lists other answers", id="other-answers-are-a-problem"),
        pytest.param(AGREE, DIFFER, "no longer differs", id="a-listed-case-that-agrees-must-go"),
        pytest.param(UNDECIDED, DIFFER, "no longer differs", id="a-listed-undecided-case-must-go"),
        pytest.param(None, DIFFER, "no such case", id="a-listed-case-that-is-gone-must-go"),
    ],
)
def test_the_list_of_differences(
    answers: Answers | None, known: Answers | None, problem: str | None
) -> None:
    problems = list(
        judge(
            {CASE: answers} if answers is not None else {},
            {CASE: known} if known is not None else {},
        )
    )
    if problem is None:
        assert problems == []
    else:
        (found,) = problems
        assert found.startswith("1.36 simple: ")
        assert problem in found


def test_an_entry_is_for_each_of_its_minor_releases() -> None:
    entry = {"case": "simple", "ours": "fits", "upstream": "no fit", "reason": "a gate"}
    document = {"difference": [{**entry, "minors": ["1.36", "1.37"]}]}
    assert listed(document) == {CASE: DIFFER, Case("1.37", "simple"): DIFFER}


def test_an_entry_without_a_reason_is_refused() -> None:
    entry = {"case": "simple", "minors": ["1.36"], "ours": "fits", "upstream": "no fit"}
    with pytest.raises(KeyError, match="reason"):
        listed({"difference": [{**entry, "reason": ""}]})


def test_the_number_of_undecided_cases_cannot_grow() -> None:
    cases = {Case("1.34", str(number)): UNDECIDED for number in range(4)}
    assert "4 cases are undecided" in (undecided_problem("1.34", cases) or "")
    del cases[Case("1.34", "0")]
    assert undecided_problem("1.34", cases) is None


def test_each_case_of_a_table_is_dumped() -> None:
    source = "\tfor name, tc := range testcases {\n\t\tt.Run(name, nil)\n\t}\n"
    head, call, *rest = with_dump(source).splitlines()
    assert head == source.splitlines()[0]
    assert call.startswith("\t\tdump(name, tc.features, ")
    assert rest[-2:] == source.splitlines()[1:]


@pytest.mark.parametrize("source", ["", "\tfor name, tc := range testcases {\n" * 2])
def test_a_table_whose_loop_has_changed_is_refused(source: str) -> None:
    with pytest.raises(ImageError, match="has changed"):
        with_dump(source)
