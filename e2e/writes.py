"""
Writes of ResourceSlices, as the API server counts them.

Dry runs are no writes. The counters are of all clients; a test that compares two readings has to be
the only one that causes writes meanwhile. It must not know who writes, or why.
"""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from e2e.cluster.api import Cluster
from e2e.kit import holds_for, wait_for

__all__ = ("SliceWrites", "slice_writes", "written")

QUIET_SECONDS = 1.5
"""Time without a write before the count is final: longer than the time between two writes of a
slice."""

_LINE = re.compile(r"^apiserver_request_total\{(?P<labels>[^}]*)\} (?P<count>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_VERBS = {"POST": "creates", "PUT": "updates", "PATCH": "updates", "DELETE": "deletes"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceWrites:
    """Writes that succeeded."""

    creates: int = 0
    updates: int = 0
    deletes: int = 0

    def __sub__(self, earlier: SliceWrites) -> SliceWrites:
        return SliceWrites(
            creates=self.creates - earlier.creates,
            updates=self.updates - earlier.updates,
            deletes=self.deletes - earlier.deletes,
        )


def slice_writes(cluster: Cluster) -> SliceWrites:
    """Read the counters."""
    counts = {"creates": 0, "updates": 0, "deletes": 0}
    for line in _LINE.finditer(cluster.kubectl("get", "--raw", "/metrics").stdout):
        labels = dict(_LABEL.findall(line["labels"]))
        verb = _VERBS.get(labels.get("verb", ""))
        if labels.get("resource") != "resourceslices" or labels.get("dry_run"):
            continue
        if verb and labels["code"].startswith("2"):
            counts[verb] += int(float(line["count"]))
    return SliceWrites(**counts)


@contextmanager
def written(
    cluster: Cluster, *, creates: int = 0, updates: int = 0, deletes: int = 0, seconds: float = 30
) -> Generator[None]:
    """Check the number of writes that the block causes, at its end or within some seconds after
    it. Late writes of an earlier test, such as those after a reboot, are waited for first."""
    expected = SliceWrites(creates=creates, updates=updates, deletes=deletes)
    before = _settled(cluster)
    yield
    what = f"the API server to have counted {expected}"
    wait_for(what, lambda: slice_writes(cluster) - before == expected, seconds=seconds)
    holds_for(what, lambda: slice_writes(cluster) - before == expected, seconds=QUIET_SECONDS)


def _settled(cluster: Cluster) -> SliceWrites:
    """Return the counters once nothing has been written for the quiet time."""
    last = slice_writes(cluster)

    def unchanged() -> bool:
        nonlocal last
        before, last = last, slice_writes(cluster)
        return before == last

    time.sleep(QUIET_SECONDS)
    wait_for("the writes of slices to end", unchanged, period=QUIET_SECONDS)
    return last
