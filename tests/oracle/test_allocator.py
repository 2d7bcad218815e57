"""Our search and the scheduler's own allocator over random worlds."""

import pytest

from drakit_explain.allocation import Outcome
from e2e.images.go import CEL_MINORS, cel_program
from tests.oracle.run import compare_all, compare_worlds
from tests.oracle.worlds import NEWEST
from tests.programs import needs_go

ONCE_DIFFERENT = (1904737, 6149641, 6203923)
"""Worlds of longer runs in which the two disagreed."""


pytestmark = needs_go


@pytest.mark.timeout(1200)  # the first run builds the allocators
def test_both_agree_over_500_worlds_of_the_newest_release():
    program = cel_program(NEWEST)
    tally = compare_worlds([*range(500), *ONCE_DIFFERENT], program=program)
    assert tally.good, "\n".join(tally.lines())
    # Worlds of which all or none fit would show nothing.
    for outcome in (Outcome.FITS, Outcome.NO_FIT, Outcome.FAILED):
        assert tally.answers[outcome, outcome] >= 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("minor", CEL_MINORS)
def test_both_agree_over_5_000_worlds(minor):
    tally = compare_all(range(5_000), program=cel_program(minor), minor=minor)
    assert tally.good, "\n".join(tally.lines())
