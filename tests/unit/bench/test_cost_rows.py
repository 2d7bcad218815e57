"""Rows of processor time, hops and throughput: their lines, and the budgets that they miss."""

import pytest

from bench.costrows import Cost, Hops, Throughput


@pytest.mark.parametrize(
    ("row", "line", "missed"),
    [
        pytest.param(
            Cost(operation="prepare", batch=1, driver="effects", cpu_ms=2.5, client_cpu_ms=0.85),
            "cost prepare batch=1 cpu_ms=2.50 client_cpu_ms=0.85 driver=effects",
            [],
            id="a-prepare-within-its-budget",
        ),
        pytest.param(
            Cost(operation="unprepare", batch=1, driver="plain", cpu_ms=1.21, client_cpu_ms=None),
            "cost unprepare batch=1 cpu_ms=1.21 driver=plain",
            [
                "cost unprepare batch=1 driver=plain: 1.21 ms of processor time, at most 1.2",
            ],
            id="an-unprepare-above-its-budget",
        ),
        pytest.param(
            Cost(operation="prepare", batch=64, driver="plain", cpu_ms=40.0, client_cpu_ms=14.0),
            "cost prepare batch=64 cpu_ms=40.00 client_cpu_ms=14.00 driver=plain",
            [
                "cost prepare batch=64 driver=plain: 26.00 ms of processor time beyond the API "
                "client's, at most 25",
            ],
            id="64-claims-are-judged-beyond-the-client",
        ),
        pytest.param(
            Hops(driver="plain", main_iterations=25.0, other_iterations=4.0, round_trips=3.0),
            "hops pair batch=1 loop_iterations=25.0 driver_loop_iterations=4.0 "
            "thread_round_trips=3.0 driver=plain",
            ["hops driver=plain: 3.0 thread round trips a pair, at most 2"],
            id="a-driver-without-side-effects-has-fewer-round-trips",
        ),
        pytest.param(
            Hops(driver="effects", main_iterations=26.0, other_iterations=4.0, round_trips=6.0),
            "hops pair batch=1 loop_iterations=26.0 driver_loop_iterations=4.0 "
            "thread_round_trips=6.0 driver=effects",
            ["hops driver=effects: 26.0 loop iterations a pair, at most 25"],
            id="iterations-above-the-budget",
        ),
        pytest.param(
            Throughput(
                pods=8,
                resident=0,
                driver="effects",
                cores=4,
                pods_per_second=299.0,
                client_pods_per_second=1400.0,
            ),
            "throughput pods=8 claims=1 resident=0 pods_per_second=299 "
            "client_alone_per_second=1400 driver=effects",
            ["throughput resident=0 driver=effects: 299 pods a second, at least 300"],
            id="too-few-pods-a-second",
        ),
        pytest.param(
            Throughput(
                pods=8,
                resident=0,
                driver="effects",
                cores=2,
                pods_per_second=200.0,
                client_pods_per_second=700.0,
            ),
            "throughput pods=8 claims=1 resident=0 pods_per_second=200 "
            "client_alone_per_second=700 driver=effects",
            [],
            id="with-two-cores-the-rate-is-reported-only",
        ),
    ],
)
def test_a_row_prints_a_line_and_names_the_budgets_that_it_misses(row, line, missed):
    assert row.line() == line
    assert list(row.missed()) == missed
