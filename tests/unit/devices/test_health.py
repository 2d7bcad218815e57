from __future__ import annotations

from typing import Any

import pytest

from drakit import Health
from drakit.device import Taint
from drakit_nodeplugin.devices.model import StampedTaint
from drakit_nodeplugin.devices.taints import (
    UNKNOWN,
    Condition,
    HealthTiming,
    adopted,
    next_change,
    observed,
    settled,
    stamped,
    taints,
    validated,
)

TIMING = HealthTiming(recovery_seconds=30.0, eviction_seconds=10.0)

OK, BAD, BROKEN, NOBODY = (
    Health.healthy(),
    Health.unhealthy("too hot"),
    Health.unhealthy("off the bus", evict_pods=True),
    Health.unknown(),
)


def lived(*reports: tuple[float, Health], until: float) -> Condition:
    """Return the taints of a device after these reports at these times."""
    condition = UNKNOWN
    moments = [*reports, (until, None)]
    for now, report in moments:
        # Time is applied when it is due, not at the next report.
        while (due := next_change(condition, TIMING)) is not None and due <= now:
            condition = settled(condition, TIMING, now=due)
        if report is not None:
            condition = settled(observed(condition, report, now=now), TIMING, now=now)
    return condition


def tainted(condition: Condition) -> list[str]:
    return [taint.effect for taint in taints((), condition, stopped=False, unpreparing=False)]


@pytest.mark.parametrize(
    ("reports", "until", "effects"),
    [
        pytest.param([], 100, [], id="no-report-is-no-taint"),
        pytest.param([(0, OK)], 100, [], id="a-healthy-device-is-not-tainted"),
        pytest.param([(0, NOBODY)], 100, [], id="unknown-is-no-taint"),
        pytest.param([(0, BAD)], 0, ["NoSchedule"], id="bad-is-tainted-at-once"),
        pytest.param([(0, BAD)], 9999, ["NoSchedule"], id="bad-alone-never-evicts"),
        pytest.param([(0, BAD), (1, OK)], 30, ["NoSchedule"], id="well-for-29s-is-not-enough"),
        pytest.param([(0, BAD), (1, OK)], 31, [], id="well-for-30s-is-enough"),
        pytest.param(
            [(0, BAD), (1, OK), (30, BAD), (31, OK)],
            60,
            ["NoSchedule"],
            id="bad-in-between-restarts-the-recovery",
        ),
        pytest.param(
            [(0, BAD), (1, OK), (21, NOBODY), (100, OK)],
            109,
            ["NoSchedule"],
            id="unknown-does-not-count-as-well",
        ),
        pytest.param(
            [(0, BAD), (1, OK), (21, NOBODY), (100, OK)],
            110,
            [],
            id="unknown-interrupts-the-recovery-and-does-not-restart-it",
        ),
        pytest.param(
            [(0, BAD), (1, OK), (21, NOBODY)],
            9999,
            ["NoSchedule"],
            id="unknown-without-end-keeps-the-taint",
        ),
        pytest.param(
            [(0, BAD), (1, OK), (2, OK), (30, OK)],
            31,
            [],
            id="the-same-report-delays-nothing",
        ),
        pytest.param([(0, BROKEN)], 9, ["NoSchedule"], id="broken-evicts-nobody-at-first"),
        pytest.param([(0, BROKEN)], 10, ["NoSchedule", "NoExecute"], id="broken-for-10s-evicts"),
        pytest.param(
            [(0, BAD), (20, BROKEN)], 29, ["NoSchedule"], id="bad-for-long-is-not-broken-for-long"
        ),
        pytest.param(
            [(0, BROKEN), (5, OK), (6, BROKEN)],
            15,
            ["NoSchedule"],
            id="a-moment-of-health-puts-the-eviction-off",
        ),
        pytest.param(
            [(0, BROKEN), (5, NOBODY), (6, BROKEN)],
            15,
            ["NoSchedule"],
            id="a-moment-in-which-nobody-knows-puts-the-eviction-off",
        ),
        pytest.param(
            [(0, BROKEN), (5, BAD)], 9999, ["NoSchedule"], id="broken-no-more-is-not-evicting"
        ),
        pytest.param(
            [(0, BROKEN), (20, BAD)],
            9999,
            ["NoSchedule", "NoExecute"],
            id="what-evicts-goes-on-until-the-device-is-well",
        ),
        pytest.param(
            [(0, BROKEN), (20, OK)],
            49,
            ["NoSchedule", "NoExecute"],
            id="both-taints-stay-during-the-recovery",
        ),
        pytest.param([(0, BROKEN), (20, OK)], 50, [], id="both-taints-go-together"),
    ],
)
def test_a_device_is_tainted_by_its_health_reports(reports: Any, until: float, effects: list[str]):
    assert tainted(lived(*reports, until=until)) == effects


def test_a_device_that_flaps_is_tainted_once():
    reports = [(float(second), BAD if second % 2 else OK) for second in range(1, 600)]
    seen = [tainted(lived(*reports[:count], until=count)) for count in range(1, 600, 50)]
    assert seen == [["NoSchedule"]] * len(seen)


def test_delays_of_nothing_are_none():
    now = HealthTiming(recovery_seconds=0, eviction_seconds=0)
    broken = settled(observed(UNKNOWN, BROKEN, now=5), now, now=5)
    assert tainted(broken) == ["NoSchedule", "NoExecute"]
    assert not settled(observed(broken, OK, now=6), now, now=6).tainted


@pytest.mark.parametrize(
    "report",
    [
        pytest.param("healthy", id="a-report-of-another-type"),
        pytest.param(Health("fine"), id="a-status-that-is-none"),  # type: ignore[arg-type]
        pytest.param(Health("unhealthy", None), id="a-message-that-is-no-text"),  # type: ignore[arg-type]
        pytest.param(Health(["unhealthy"]), id="a-status-that-is-a-list"),  # type: ignore[arg-type]
    ],
)
def test_a_malformed_report_is_unknown(report: Any):
    assert validated(report).status == "unknown"
    assert validated(report).message


@pytest.mark.parametrize(
    ("report", "effects", "recovered_after"),
    [
        pytest.param(NOBODY, ["NoSchedule"], None, id="unknown-stays-tainted"),
        pytest.param(OK, ["NoSchedule"], 30, id="well-recovers-as-without-a-restart"),
        pytest.param(BAD, ["NoSchedule"], None, id="bad-is-bad"),
    ],
)
def test_a_taint_from_before_a_restart(
    report: Health, effects: list[str], recovered_after: float | None
):
    condition = adopted(lived((0, report), until=0), evicting=False, now=0)
    assert tainted(condition) == effects
    assert next_change(condition, TIMING) == recovered_after
    assert condition.message


def test_a_device_that_evicted_before_a_restart_does_so_still():
    condition = adopted(lived((0, BROKEN), until=0), evicting=True, now=0)
    assert tainted(condition) == ["NoSchedule", "NoExecute"]


def test_own_taints_come_first_and_each_reason_is_there():
    own = (Taint(key="camera.example.com/lens", effect="NoExecute", value="dirty"),)
    condition = lived((0, BROKEN), until=10)
    found = taints(own, condition, stopped=True, unpreparing=True)
    assert [(taint.key, taint.effect) for taint in found] == [
        ("camera.example.com/lens", "NoExecute"),
        ("drakit.dev/stopped", "NoSchedule"),
        ("drakit.dev/unhealthy", "NoSchedule"),
        ("drakit.dev/unhealthy", "NoExecute"),
        ("drakit.dev/unpreparing", "NoSchedule"),
    ]


LENS = Taint(key="camera.example.com/lens", effect="NoSchedule", value="dirty")
LENS_SINCE_5 = StampedTaint(
    key="camera.example.com/lens", value="dirty", effect="NoSchedule", added_at=5
)


def test_a_taint_keeps_its_time_while_it_is_there():
    old = stamped([LENS], (), now=5)
    assert old == (LENS_SINCE_5,)
    assert stamped([LENS], old, now=9) is old


def test_a_taint_that_returns_is_new():
    assert [taint.added_at for taint in stamped([LENS], (), now=9)] == [9]


def test_a_new_value_is_no_new_taint():
    worse = Taint(key=LENS.key, effect=LENS.effect, value="broken")
    (taint,) = stamped([worse], (LENS_SINCE_5,), now=9)
    assert (taint.value, taint.added_at) == ("broken", 5)


def test_another_effect_is_another_taint():
    worse = Taint(key=LENS.key, effect="NoExecute", value=LENS.value)
    found = stamped([LENS, worse], (LENS_SINCE_5,), now=9)
    assert [(taint.effect, taint.added_at) for taint in found] == [
        ("NoSchedule", 5),
        ("NoExecute", 9),
    ]
