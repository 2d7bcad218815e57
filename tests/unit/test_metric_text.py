"""Metrics are served in Prometheus' text format, without the client's HTTP servers in memory."""

import json
import subprocess
import sys

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from drakit_daemon.metrics import CollectorRegistry, Counter, Gauge, Histogram, text_of
from drakit_daemon.probes import CONTENT_TYPE


def test_the_text_is_the_clients():
    registry = CollectorRegistry()
    Gauge("plain", 'A "text"\nwith a \\', registry=registry).set(float("inf"))
    gauge = Gauge("labelled", "Text", ("zone", "driver"), registry=registry)
    gauge.labels('a "b"\\\nc', "d").set(float("nan"))
    gauge.labels("", "e").set(-0.5)
    Counter("calls", "Calls", ("result",), registry=registry).labels("error").inc()
    Counter("no_series", "Has labels, but no values", ("result",), registry=registry)
    Histogram("seconds", "Time", buckets=(0.1, 2), registry=registry).observe(0.3)

    def without_times(text):  # the client writes times of creation with an exponent
        return [
            line.split()[0] if "_created" in line and line[0] != "#" else line
            for line in text.decode().splitlines()
        ]

    assert without_times(text_of(registry)) == without_times(generate_latest(registry))
    assert CONTENT_TYPE == CONTENT_TYPE_PLAIN_0_0_4


PROGRAM = """
import json, sys
import drakit_daemon.metrics
ours = [name for name in sys.modules if name.startswith(("prometheus_client", "http.server"))]
import prometheus_client, prometheus_client.metrics
counter = prometheus_client.metrics.Counter("a", "A", registry=None)
print(json.dumps([ours, isinstance(counter, prometheus_client.Counter)]))
"""


def test_a_vendors_driver_can_import_the_whole_client():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[], True]
