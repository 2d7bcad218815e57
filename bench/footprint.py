"""
The node plugin's cost at rest, and its start time.

With hostdev, its predefined policies enabled, and no claims. :mod:`.claims` measures the cost of
claims. The skeleton starts beside it, as a measure of the machine.
"""

from __future__ import annotations

import time
from pathlib import Path

from bench.machine import folders
from bench.plugin import HOSTDEV, running, running_skeleton
from bench.rows import Row, compared, median_ms

__all__ = ("footprint",)

START_BUDGET = 3.0
"""Budget of the start, as a multiple of the skeleton's."""

IDLE_BUDGET_MIB = 72.0
STARTS = 5


def footprint(kubeconfig: Path, *, idle_seconds: float) -> Row:
    """Return the median time to a served registration socket, and VmRSS after a time at rest."""
    times: list[float] = []
    skeletons: list[float] = []
    rss_mib = 0.0
    with folders() as places:
        for number in range(STARTS):
            with running_skeleton(kubeconfig) as skeleton:
                skeletons.append(skeleton.served_seconds)
            with running([HOSTDEV], kubeconfig=kubeconfig, folders=places) as plugin:
                times.append(plugin.served_seconds)
                if number == STARTS - 1:
                    time.sleep(idle_seconds)
                    rss_mib = plugin.resident_mib()
    figures = {"served_ms": median_ms(times), **compared(times, skeletons), "rss_mib": rss_mib}
    return Row(
        "idle resident=0",
        figures,
        at_most={"multiple": START_BUDGET, "rss_mib": IDLE_BUDGET_MIB},
    )
