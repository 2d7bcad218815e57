"""A benchmark that cannot fail is worth nothing: which rows miss their budgets."""

import pytest

from bench.claims import Samples, growth_mib, times_row
from bench.rows import Row


def samples(p50_ms: float, skeleton_ms: float = 10.0) -> Samples:
    return Samples(seconds=[p50_ms / 1000] * 3, skeleton=[skeleton_ms / 1000] * 3)


def times(
    p50_ms: float,
    *,
    skeleton_ms: float = 10.0,
    operation: str = "prepare",
    batch: int = 8,
    resident: int = 0,
    none_resident: Samples | None = None,
) -> Row:
    return times_row(
        samples(p50_ms, skeleton_ms),
        operation=operation,
        batch=batch,
        resident=resident,
        none_resident=none_resident,
    )


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        pytest.param({"ms": 5.0, "rate": 3}, [], id="at-the-budgets"),
        pytest.param({"ms": 5.1, "rate": 3}, ["x: ms is 5.10, at most 5"], id="too-slow"),
        pytest.param({"ms": 5.0, "rate": 2}, ["x: rate is 2, at least 3"], id="too-few"),
        pytest.param(
            {"ms": None, "rate": 3}, ["x: it was not finished in time"], id="not-finished"
        ),
        pytest.param(
            {"ms": 6.0, "rate": 2},
            ["x: ms is 6.00, at most 5", "x: rate is 2, at least 3"],
            id="each-budget-is-named",
        ),
    ],
)
def test_a_row_names_the_budgets_that_it_misses(figures, missed):
    row = Row("x", figures, at_most={"ms": 5}, at_least={"rate": 3})
    assert list(row.missed()) == missed


@pytest.mark.parametrize(
    ("row", "keeps"),
    [
        pytest.param(times(17.4), True, id="below-the-multiple-is-kept"),
        pytest.param(times(17.6), False, id="more-is-missed"),
        pytest.param(times(17.6, skeleton_ms=10.2), True, id="a-slower-machine-gets-more-time"),
        pytest.param(
            times(11.1, operation="repeat", batch=64),
            False,
            id="a-repetition-writes-less-than-the-skeleton",
        ),
        pytest.param(times(99, operation="unprepare"), True, id="no-budget-of-this-batch"),
        pytest.param(
            times(19, resident=1_000, none_resident=samples(16)),
            True,
            id="with-resident-claims-only-the-ratio-counts",
        ),
        pytest.param(
            times(19.3, resident=1_000, none_resident=samples(16)), False, id="the-ratio-is-missed"
        ),
    ],
)
def test_the_budget_of_a_time(row, keeps):
    assert (list(row.missed()) == []) is keeps


@pytest.mark.parametrize(
    ("rss_mib", "growth"),
    [
        pytest.param([70, 90, 90, 90, 90, 90, 90, 90, 90, 91], 1, id="a-warm-up-is-no-growth"),
        pytest.param([89, 90, 90, 90, 95, 90, 90, 90, 91, 91], 1, id="nor-is-a-peak-between"),
        pytest.param([90, 90, 90, 90, 90, 91, 91, 91, 91, 92], 2, id="growth"),
    ],
)
def test_the_growth_of_an_endurance_run(rss_mib, growth):
    assert growth_mib(rss_mib) == growth
