"""A benchmark that cannot fail is worth nothing: which rows miss their budgets."""

import pytest

from bench.rows import Burst, Endurance, Memory, Pods, Samples, Slices, Times, percentile


def times(
    p50_ms: float,
    *,
    floor_ms: float | None = 10.0,
    operation: str = "prepare",
    batch: int = 8,
    resident: int = 0,
    none_resident: Times | None = None,
) -> Times:
    samples = Samples(
        seconds=[p50_ms / 1000] * 3,
        floors=[] if floor_ms is None else [floor_ms / 1000] * 3,
    )
    return Times.of(
        samples,
        operation=operation,
        batch=batch,
        resident=resident,
        driver="effects",
        rss_mib=80.0,
        none_resident=none_resident,
    )


@pytest.mark.parametrize(
    ("share", "value"),
    [
        pytest.param(0.5, 2, id="the-median-of-four-is-the-second"),
        pytest.param(0.99, 4, id="p99-of-few-is-the-highest"),
        pytest.param(0.0, 1, id="no-share-is-the-lowest"),
    ],
)
def test_a_percentile(share, value):
    assert percentile([4, 2, 1, 3], share) == value


def test_a_row_has_the_words_that_tools_look_for():
    assert (
        times(16.5)
        .line()
        .startswith(
            "prepare batch=8 resident=0 p50_ms=16.50 p99_ms=16.50 floor_ms=10.00 rss_mib=80.0 "
        )
    )


@pytest.mark.parametrize(
    ("row", "keeps"),
    [
        pytest.param(times(16.9), True, id="floor-and-budget-is-kept"),
        pytest.param(times(17.1), False, id="above-floor-and-budget-is-missed"),
        pytest.param(times(17.1, floor_ms=10.2), True, id="a-higher-floor-gives-more-time"),
        pytest.param(
            times(7.9, operation="unprepare", batch=64, floor_ms=None), True, id="unprepare-is-kept"
        ),
        pytest.param(
            times(8.1, operation="unprepare", batch=64, floor_ms=None),
            False,
            id="unprepare-has-no-floor",
        ),
        pytest.param(
            times(19, resident=1_000, none_resident=times(16)),
            True,
            id="with-resident-claims-only-the-ratio-counts",
        ),
        pytest.param(
            times(19.3, resident=1_000, none_resident=times(16)), False, id="the-ratio-is-missed"
        ),
    ],
)
def test_the_budget_of_a_time(row, keeps):
    assert (list(row.missed()) == []) is keeps


def test_variation_of_the_floor_is_not_in_the_part_above_it():
    row = times(32, floor_ms=24, resident=1_000, none_resident=times(16, floor_ms=8))
    assert "ratio=2.00 ratio_above_floor=1.00" in row.line()


@pytest.mark.parametrize(
    ("parallel_ms", "base_ms", "missed"),
    [
        pytest.param(50.0, None, 0, id="four-times-as-fast"),
        pytest.param(50.1, None, 1, id="not-four-times-as-fast"),
        pytest.param(50.0, 41.0, 1, id="slower-than-without-resident-claims"),
    ],
)
def test_the_budget_of_pods_at_once(parallel_ms, base_ms, missed):
    def row(parallel_ms: float, *, resident: int = 0, base: Pods | None = None) -> Pods:
        return Pods(
            pods=8,
            claims=1,
            resident=resident,
            sequential_ms=200.0,
            parallel_ms=parallel_ms,
            rss_mib=80.0,
            none_resident=base,
        )

    pods = row(parallel_ms) if base_ms is None else row(parallel_ms, resident=9, base=row(base_ms))
    assert len(list(pods.missed())) == missed


@pytest.mark.parametrize(
    ("rss_mib", "served_ms", "missed"),
    [
        pytest.param(72.0, 1000.0, 0, id="at-the-budgets"),
        pytest.param(72.1, 1000.0, 1, id="too-much-memory"),
        pytest.param(72.0, 1001.0, 1, id="served-too-late"),
        pytest.param(72.0, None, 0, id="not-asked-when-it-served"),
    ],
)
def test_the_budget_of_memory(rss_mib, served_ms, missed):
    row = Memory(
        name="idle", rss_mib=rss_mib, rss_budget_mib=72, served_ms=served_ms, served_budget_ms=1000
    )
    assert len(list(row.missed())) == missed


@pytest.mark.parametrize(
    ("rss_mib", "missed"),
    [
        pytest.param([70, 90, 90, 90, 90, 90, 90, 90, 90, 91], 0, id="a-warm-up-is-no-growth"),
        pytest.param([89, 90, 90, 90, 95, 90, 90, 90, 91, 91], 0, id="nor-is-a-peak-between"),
        pytest.param([90, 90, 90, 90, 90, 91, 91, 91, 91, 92], 1, id="growth-is-missed"),
    ],
)
def test_the_budget_of_growth(rss_mib, missed):
    assert len(list(Endurance(driver="effects", pairs=100, rss_mib=rss_mib).missed())) == missed


@pytest.mark.parametrize(
    ("slices", "writes", "rss_mib", "missed"),
    [
        pytest.param(18, 18, 160.0, 0, id="as-many-as-allowed"),
        pytest.param(19, 18, 160.0, 1, id="a-slice-too-many"),
        pytest.param(18, 19, 160.0, 1, id="a-write-too-many"),
        pytest.param(18, 18, 160.1, 1, id="too-much-memory"),
    ],
)
def test_the_budgets_of_slices(slices, writes, rss_mib, missed):
    row = Slices(
        name="publish",
        devices=1_000,
        slices=slices,
        writes=writes,
        seconds=None,
        rss_mib=rss_mib,
        slices_budget=18,
        writes_budget=18,
        rss_budget_mib=160.0,
    )
    assert len(list(row.missed())) == missed


@pytest.mark.parametrize(
    ("most", "changes_seconds", "missed"),
    [
        pytest.param(11, 10.1, 0, id="a-write-at-each-end-of-ten-seconds"),
        pytest.param(12, 10.1, 1, id="more-than-one-a-second"),
        pytest.param(11, 11.0, 1, id="changes-too-slow"),
    ],
)
def test_the_budget_of_a_burst_is_that_of_the_slice_that_was_written_most(
    most, changes_seconds, missed
):
    row = Burst(
        devices=1_000,
        changes=10_000,
        changes_seconds=changes_seconds,
        seconds=10.0,
        writes={"a": 3, "b": most},
        rss_mib=80.0,
    )
    assert len(list(row.missed())) == missed
