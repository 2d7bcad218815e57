from __future__ import annotations

import pytest

from drakit_nodeplugin.devices.endpoint_state import (
    GracePeriods,
    Life,
    Phase,
    are_pools_known,
    phase,
    phase_ends,
)

GRACES = GracePeriods(start_until=30, stop_seconds=300)


@pytest.mark.parametrize(
    ("life", "now", "expected"),
    [
        pytest.param(
            Life(stopped_since=None, listed=True),
            10,
            Phase.PRESENT,
            id="listed-is-present",
        ),
        pytest.param(
            Life(stopped_since=-50, known=True), 29, Phase.AWAITED, id="known-is-awaited-at-first"
        ),
        pytest.param(
            Life(stopped_since=-50, known=True),
            30,
            Phase.STOPPED,
            id="known-is-stopped-after-the-start-grace",
        ),
        pytest.param(
            Life(stopped_since=5, listed=True),
            6,
            Phase.STOPPED,
            id="listed-is-not-awaited",
        ),
        pytest.param(
            Life(stopped_since=-50, known=True, removing=True),
            1,
            Phase.REMOVING,
            id="a-removal-that-was-begun-goes-on-at-once",
        ),
    ],
)
def test_phases(life: Life, now: float, expected: Phase):
    assert phase(life, GRACES, now=now) is expected


@pytest.mark.parametrize(
    ("life", "ends"),
    [
        pytest.param(Life(stopped_since=None, listed=True), None, id="one-that-is-there-never"),
        pytest.param(Life(stopped_since=100, listed=True), 400, id="after-the-grace-period"),
        pytest.param(
            Life(stopped_since=-200, known=True), 100, id="the-time-before-a-restart-counts"
        ),
        pytest.param(
            Life(stopped_since=-9000, known=True),
            30,
            id="unavailable-for-long-before-the-restart-may-return-in-the-start-grace",
        ),
        pytest.param(
            Life(stopped_since=-9000, known=True, removing=True), None, id="a-removal-has-no-end"
        ),
    ],
)
def test_the_end_of_a_grace_period(life: Life, ends: float | None):
    assert phase_ends(life, GRACES) == ends


@pytest.mark.parametrize(
    ("life", "since"),
    [
        pytest.param(Life(stopped_since=None, listed=True), 0, id="one-that-is-there-at-once"),
        pytest.param(Life(stopped_since=3, listed=True), 0, id="one-that-was-there-at-once"),
        pytest.param(Life(stopped_since=0, known=True), 30, id="a-known-one-after-the-start-grace"),
        pytest.param(
            Life(stopped_since=0), 300, id="one-of-which-nothing-is-known-after-the-stop-grace"
        ),
        pytest.param(
            Life(stopped_since=-99, known=True, removing=True),
            30,
            id="one-that-is-being-removed-after-the-start-grace",
        ),
    ],
)
def test_when_other_pools_can_be_deleted(life: Life, since: float):
    assert are_pools_known(life, GRACES, now=since)
    assert since == 0 or not are_pools_known(life, GRACES, now=since - 1)
