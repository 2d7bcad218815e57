"""Explanations of random pods, compared with Kubernetes' scheduler."""

import pytest

from tests.oracle.fold import MINORS, Kind, compare
from tests.programs import needs_go


@needs_go
@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)  # the first run builds the scheduler
@pytest.mark.parametrize("minor", MINORS)
def test_both_agree_over_1_000_pods(minor):
    tally = compare(range(1_000), minor=minor)
    assert tally.good, "\n".join(tally.lines())
    # Pods of which all or none fit would show nothing.
    for kind in (Kind.FITS, Kind.NO_FIT, Kind.FATAL):
        assert tally.answers[kind, kind] >= 100
    assert tally.fatal_beside_a_fit >= 20
