"""The allocator over random worlds, asked with objects and with facts."""

import pytest

from drakit_explain.verdicts import VerdictOutcome
from e2e.images.go import CEL_MINORS, cel_program
from tests.oracle.run import compare_all, compare_worlds
from tests.oracle.worlds import NEWEST
from tests.programs import needs_go

pytestmark = needs_go


@pytest.mark.timeout(1200)  # the first run builds the allocators
def test_both_agree_over_500_worlds_of_the_newest_release():
    tally = compare_worlds(range(500), program=cel_program(NEWEST))
    assert tally.good, "\n".join(tally.lines())
    # Worlds of which all or none fit would show nothing.
    for outcome in (VerdictOutcome.ALLOCATED, VerdictOutcome.UNAVAILABLE, VerdictOutcome.FATAL):
        assert tally.answers[outcome] >= 10
    assert tally.shared >= 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("minor", CEL_MINORS)
def test_both_agree_over_5_000_worlds(minor):
    tally = compare_all(range(5_000), program=cel_program(minor), minor=minor)
    assert tally.good, "\n".join(tally.lines())
