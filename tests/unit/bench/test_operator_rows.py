"""Rows of the operator: their lines, and the budgets that they miss."""

import pytest

from bench.operator_rows import ClaimChanges, Command, OperatorMemory, Quiet, SliceChange, Synced


def changed(**numbers):
    facts = {
        "changes": 3000,
        "per_second": 100.0,
        "wanted_per_second": 100,
        "unanswered": 0,
        "p50_ms": 120.0,
        "p99_ms": 1000.0,
        "cpu_percent": 60.0,
        "peak_mib": 200.0,
    }
    return ClaimChanges(**facts | numbers)


@pytest.mark.parametrize(
    ("row", "missed"),
    [
        pytest.param(
            Synced(facts="pods=1", seconds=30.0, cpu_seconds=1, rss_mib=1, peak_mib=1),
            [],
            id="synced-in-time",
        ),
        pytest.param(
            Synced(facts="pods=1", seconds=None, cpu_seconds=1, rss_mib=1, peak_mib=1),
            ["operator-sync: not every pod had its Event in time"],
            id="a-pod-without-event",
        ),
        pytest.param(changed(), [], id="changes-in-time"),
        pytest.param(
            changed(unanswered=2, per_second=90.0, p99_ms=1001.0),
            [
                "operator-claims: 2 changed claims had no Event",
                "operator-claims: 90 changes a second were made, 100 must be",
                "operator-claims: p99 is 1001 ms, at most 1000",
            ],
            id="changes-too-late-too-few-and-unanswered",
        ),
        pytest.param(
            Quiet(seconds=20, changes=200, writes=1, cpu_percent=1),
            ["operator-quiet: 1 writes without anything to report, at most 0"],
            id="a-write-without-reason",
        ),
        pytest.param(
            SliceChange(pods=500, seconds=None),
            ["operator-slice-change: was not finished in time, at most 10 s"],
            id="pods-that-were-not-evaluated-again",
        ),
        pytest.param(
            OperatorMemory(
                phase="relist", seconds=9.0, rss_mib=300, peak_mib=320.5, helper_peak_mib=20
            ),
            ["operator-relist: the peak is 320.5 MiB, at most 320"],
            id="too-much-memory",
        ),
        pytest.param(
            Command(command="devices", seconds=1, peak_mib=1, code=3),
            ["kubectl-drakit devices: it ended with 3"],
            id="a-command-that-failed",
        ),
    ],
)
def test_a_row_names_the_budgets_that_it_misses(row, missed):
    assert list(row.missed()) == missed


def test_a_line_has_all_numbers():
    assert changed().line() == (
        "operator-claims changes=3000 changes_per_second=100 p50_ms=120 p99_ms=1000 unanswered=0 "
        "cpu_percent=60 rss_peak_mib=200.0"
    )
