from __future__ import annotations

from typing import Any

import pytest

from drakit import Health
from drakit.device import Taint
from drakit_driver.runtime.contract import validated_health
from drakit_nodeplugin.config import DeviceHealthSettings
from drakit_nodeplugin.devices.taints import (
    UNKNOWN,
    Condition,
    next_change,
    observed,
    settled,
    taints,
)

TIMING = DeviceHealthSettings()

OK, BAD, BROKEN, NOBODY = (
    Health.healthy(),
    Health.unhealthy("too hot"),
    Health.unhealthy("off the bus", evict_pods=True),
    Health.unknown(),
)


def lived(*reports: tuple[float, Health], until: float) -> Condition:
    """Return the health of a device after these reports at these times."""
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


FREE, TAINTED, EVICTING = [], ["NoSchedule"], ["NoSchedule", "NoExecute"]

REPORTS: dict[str, tuple[list[tuple[float, Health]], float, list[str]]] = {
    "no-report-is-no-taint": ([], 100, FREE),
    "a-healthy-device-is-not-tainted": ([(0, OK)], 100, FREE),
    "unknown-is-no-taint": ([(0, NOBODY)], 100, FREE),
    "bad-is-tainted-at-once": ([(0, BAD)], 0, TAINTED),
    "bad-alone-never-evicts": ([(0, BAD)], 9999, TAINTED),
    "well-for-29s-is-not-enough": ([(0, BAD), (1, OK)], 30, TAINTED),
    "well-for-30s-is-enough": ([(0, BAD), (1, OK)], 31, FREE),
    "bad-in-between-restarts-the-recovery": ([(0, BAD), (1, OK), (30, BAD), (31, OK)], 60, TAINTED),
    "unknown-does-not-count-as-well": ([(0, BAD), (1, OK), (21, NOBODY), (100, OK)], 109, TAINTED),
    "unknown-interrupts-the-recovery-and-does-not-restart-it": (
        [(0, BAD), (1, OK), (21, NOBODY), (100, OK)],
        110,
        FREE,
    ),
    "unknown-without-end-keeps-the-taint": ([(0, BAD), (1, OK), (21, NOBODY)], 9999, TAINTED),
    "the-same-report-delays-nothing": ([(0, BAD), (1, OK), (2, OK), (30, OK)], 31, FREE),
    "broken-evicts-nobody-at-first": ([(0, BROKEN)], 9, TAINTED),
    "broken-for-10s-evicts": ([(0, BROKEN)], 10, EVICTING),
    "bad-for-long-is-not-broken-for-long": ([(0, BAD), (20, BROKEN)], 29, TAINTED),
    "a-moment-of-health-puts-the-eviction-off": ([(0, BROKEN), (5, OK), (6, BROKEN)], 15, TAINTED),
    "a-moment-in-which-nobody-knows-puts-the-eviction-off": (
        [(0, BROKEN), (5, NOBODY), (6, BROKEN)],
        15,
        TAINTED,
    ),
    "broken-no-more-is-not-evicting": ([(0, BROKEN), (5, BAD)], 9999, TAINTED),
    "what-evicts-goes-on-until-the-device-is-well": ([(0, BROKEN), (20, BAD)], 9999, EVICTING),
    "both-taints-stay-during-the-recovery": ([(0, BROKEN), (20, OK)], 49, EVICTING),
    "both-taints-go-together": ([(0, BROKEN), (20, OK)], 50, FREE),
}
"""Reports with their times, and the effects of the taints at a time."""


@pytest.mark.parametrize(("reports", "until", "effects"), REPORTS.values(), ids=REPORTS)
def test_a_device_is_tainted_by_its_health_reports(reports, until, effects):
    assert tainted(lived(*reports, until=until)) == effects


def test_delays_of_nothing_are_none():
    now = TIMING.model_copy(update={"recovery_period": 0.0, "eviction_delay": 0.0})
    broken = settled(observed(UNKNOWN, BROKEN, now=5), now, now=5)
    assert tainted(broken) == EVICTING
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
    assert validated_health(report).status == "unknown"
    assert validated_health(report).message


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
