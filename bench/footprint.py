"""
The node plugin's cost at rest, and its start time.

With hostdev, its predefined policies enabled, and no claims. :mod:`.claims` measures the cost of
claims.
"""

from __future__ import annotations

import time
from pathlib import Path

from bench.machine import folders
from bench.plugin import HOSTDEV, running
from bench.rows import Row, median_ms

__all__ = ("footprint",)

SERVED_BUDGET_MS = 1000.0
IDLE_BUDGET_MIB = 72.0
STARTS = 5


def footprint(kubeconfig: Path, *, idle_seconds: float) -> Row:
    """Return the median time to a served registration socket, and VmRSS after a time at rest."""
    times: list[float] = []
    rss_mib = 0.0
    with folders() as places:
        for number in range(STARTS):
            with running([HOSTDEV], kubeconfig=kubeconfig, folders=places) as plugin:
                times.append(plugin.served_seconds)
                if number == STARTS - 1:
                    time.sleep(idle_seconds)
                    rss_mib = plugin.resident_mib()
    return Row(
        "idle resident=0",
        {"served_ms": median_ms(times), "rss_mib": rss_mib},
        at_most={"served_ms": SERVED_BUDGET_MS, "rss_mib": IDLE_BUDGET_MIB},
    )
