"""Rows of vendors' endpoints: which of them miss their budgets."""

import pytest

from bench.endpointrows import Endpoints, Overhead


def overhead(p50_ms: float) -> Overhead:
    return Overhead.of(
        endpoint="backend", batch=8, seconds=[p50_ms / 1000] * 3, in_process=[0.008] * 3
    )


def many(**fields) -> Endpoints:
    values = {"rss_mib": 100.0, "cpu_share": 0.005} | fields
    return Endpoints(device_plugins=50, backends=0, published_seconds=3.0, threads=20, **values)


@pytest.mark.parametrize(
    ("row", "keeps"),
    [
        pytest.param(overhead(10.9), True, id="within-3-ms-of-a-driver-in-the-process"),
        pytest.param(overhead(11.1), False, id="more-than-that"),
        pytest.param(overhead(7), True, id="faster"),
        pytest.param(many(), True, id="at-rest"),
        pytest.param(many(rss_mib=128.1), False, id="too-much-memory"),
        pytest.param(many(cpu_share=0.011), False, id="too-much-of-a-core"),
    ],
)
def test_the_budgets_of_endpoints(row, keeps):
    assert (list(row.missed()) == []) is keeps


def test_the_lines():
    assert overhead(11).line() == (
        "overhead endpoint=backend batch=8 p50_ms=11.00 p99_ms=11.00 in_process_ms=8.00 "
        "overhead_ms=3.00"
    )
    assert many().line() == (
        "endpoints device_plugins=50 backends=0 published_seconds=3.0 rss_mib=100.0 "
        "idle_cpu_percent=0.50 threads=20"
    )
