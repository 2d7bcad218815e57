"""
Counts writes of ResourceSlices.

The API server's counters include all successful writes of all clients, so a test that reads them
must be the only one that causes writes at that time. If other drivers can write, the slices of the
test's drivers are compared instead. Dry runs are not counted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from e2e.cluster.api import Cluster, ClusterError
from e2e.kit import holds_for, wait_for

__all__ = ("SliceWrites", "slice_writes", "written")

QUIET_SECONDS = 1.5
"""Time without a write before the count is final. It is longer than the time between two writes of
a slice."""

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
    """Read the API server's counters."""
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
    cluster: Cluster,
    *drivers: str,
    creates: int = 0,
    updates: int = 0,
    deletes: int = 0,
    seconds: float = 30,
) -> Generator[None]:
    """
    Check the number of writes that the block causes, at its end or within a few seconds.

    With drivers, only their slices are checked, because other drivers, and the kubelet for them,
    can write at the same time. For example, the kubelet writes 30 s after an earlier test has
    killed a node plugin. Without drivers, the API server's counters decide. The check first waits
    for late writes of an earlier test.
    """
    expected = SliceWrites(creates=creates, updates=updates, deletes=deletes)
    count = wait_for("the writes of slices to end", lambda: _after_quiet(cluster, drivers))
    assert count is not None
    yield
    found: list[SliceWrites] = []

    def as_expected() -> bool:
        found[:] = [count()]
        return found == [expected]

    try:
        wait_for("the expected writes", as_expected, seconds=seconds)
        holds_for("the expected writes", as_expected, seconds=QUIET_SECONDS)
    except (AssertionError, ClusterError) as error:
        raise AssertionError(f"expected {expected}, but counted {found}") from error


def _after_quiet(cluster: Cluster, drivers: Collection[str]) -> Callable[[], SliceWrites] | None:
    """Return a count that starts now, after waiting until no writes occur in the quiet time."""
    count = _count(cluster, drivers)
    time.sleep(QUIET_SECONDS)
    return count if count() == SliceWrites() else None


def _count(cluster: Cluster, drivers: Collection[str]) -> Callable[[], SliceWrites]:
    if not drivers:
        before = slice_writes(cluster)
        return lambda: slice_writes(cluster) - before
    earlier = _generations(cluster, drivers)
    return lambda: _between(earlier, _generations(cluster, drivers))


def _generations(cluster: Cluster, drivers: Collection[str]) -> Mapping[str, int]:
    """Return the generation of each slice of some drivers, keyed by UID."""
    return {
        body["metadata"]["uid"]: body["metadata"]["generation"]
        for body in cluster.get("resourceslices")["items"]
        if body["spec"]["driver"] in drivers
    }


def _between(earlier: Mapping[str, int], later: Mapping[str, int]) -> SliceWrites:
    return SliceWrites(
        creates=len(later.keys() - earlier.keys()),
        # The API server gives a new slice generation 1.
        updates=sum(number - earlier.get(uid, 1) for uid, number in later.items()),
        deletes=len(earlier.keys() - later.keys()),
    )
