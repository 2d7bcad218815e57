"""`helm lint`: the chart as its own tool checks it, with and without its options."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.chart.conftest import CHART, IMAGE

EVERYTHING: dict[str, Any] = {
    "simulated": {"enabled": True},
    "backends": {"enabled": True, "allowed": {"gpu": {"driver": "gpu.example.com"}}},
    "devicePlugins": {
        "enabled": True,
        "plugins": {"things": {"resources": ["vendor.example/thing"]}},
    },
    "networkPolicy": {
        "enabled": True,
        "egress": {"enabled": True, "apiServer": {"192.0.2.10/32": 6443}},
    },
    "metrics": {
        "podDevices": True,
        **{name: {"enabled": True} for name in ("podMonitor", "prometheusRule", "dashboard")},
    },
    "openShift": {"scc": {"nodeplugin": "privileged", "operator": "nonroot-v2"}},
    "image": {"digest": {"nodeplugin": "sha256:" + "1" * 64}},
}


@pytest.mark.parametrize(
    "values", [pytest.param({}, id="defaults"), pytest.param(EVERYTHING, id="everything")]
)
def test_the_chart_has_no_lint(helm, values):
    done = helm("lint", "--strict", str(CHART), "--set", IMAGE, values=values)
    assert done.returncode == 0, done.stdout + done.stderr
