"""Our search and the scheduler's own allocator over random worlds."""

import shutil
from pathlib import Path

import pytest

from drakit_explain.allocation import Outcome
from e2e.images.go import CEL_MINORS, cel_program
from tests.oracle.run import compare_all, compare_worlds

NEWEST = CEL_MINORS[-1]

ONCE_DIFFERENT = (1904737, 6149641, 6203923)
"""Worlds of longer runs in which the two disagreed."""


@pytest.fixture(scope="module")
def program() -> Path:
    if shutil.which("go") is None:
        pytest.skip("Go is not installed: the scheduler's allocator cannot be built")
    return cel_program(NEWEST)


@pytest.mark.timeout(600)  # the first run builds the allocator
def test_both_agree_over_500_worlds(program):
    tally = compare_worlds([*range(500), *ONCE_DIFFERENT], program=program, minor=NEWEST)
    assert tally.good, "\n".join(tally.lines())
    # Worlds of which all or none fit would show nothing.
    for outcome in (Outcome.FITS, Outcome.NO_FIT, Outcome.FAILED):
        assert tally.answers[outcome, outcome] >= 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_both_agree_over_20_000_worlds(program):
    tally = compare_all(range(20_000), program=program, minor=NEWEST)
    assert tally.good, "\n".join(tally.lines())
