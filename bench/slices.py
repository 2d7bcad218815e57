"""
Measures the number of slice writes, the time until slices are published, and the memory that many
devices take.

A driver with many devices runs in the real plugin, and the API server counts its writes. Each step
waits until the API server has the devices that the driver reports. If it does not, the measurement
ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.apiserver import ApiServer
from bench.claims import report
from bench.machine import Folders, folders
from bench.many import DRIVER, LEVEL, RATE, levels, names, order
from bench.plugin import Plugin, running
from bench.rows import Row

DEVICES = 1_000
SLICES_BUDGET = 18
"""Slices for that number of devices, with room in each slice and taints allowed."""

MANY_DEVICES = 12_800
MANY_BUDGET_MIB = 160.0

WRITES_PER_SLICE_AND_SECOND = 1.0

PUBLISHED_SECONDS = 120.0
"""Timeout until the API server has everything."""

QUIET_SECONDS = 3.0
"""The time in which no write may occur."""

POLL_SECONDS = 0.1


def measure_slices(api: ApiServer, kubeconfig: Path, *, changes: int) -> Iterator[Row]:
    """Return all rows."""
    report(f"slices: {DEVICES} devices")
    with folders() as places:
        stage = _Stage.of(DEVICES, places=places, api=api, kubeconfig=kubeconfig)
        yield stage.publish(at_most={"slices": SLICES_BUDGET})
        yield stage.restart()
        yield from stage.change(changes)
    api.delete_slices(DRIVER)
    report(f"slices: {MANY_DEVICES} devices")
    with folders() as places:
        stage = _Stage.of(MANY_DEVICES, places=places, api=api, kubeconfig=kubeconfig)
        yield stage.publish(at_most={"rss_mib": MANY_BUDGET_MIB})
    api.delete_slices(DRIVER)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """A plugin's folders, its driver's devices, and the API server that stores them."""

    devices: int
    places: Folders
    changes: Path
    """The file with the number of changes that the driver makes."""

    api: ApiServer
    kubeconfig: Path

    @classmethod
    def of(cls, devices: int, *, places: Folders, api: ApiServer, kubeconfig: Path) -> _Stage:
        changes = places.root / "changes"
        order(changes, 0)
        return cls(devices=devices, places=places, changes=changes, api=api, kubeconfig=kubeconfig)

    def _running(self) -> Any:
        config = {"devices": self.devices, "changes": str(self.changes)}
        entry = {"driver": "bench.many:Many", "config": config}
        return running([entry], kubeconfig=self.kubeconfig, folders=self.places)

    # ------------------------------------------------------------ the rows

    def publish(self, *, at_most: Mapping[str, float]) -> Row:
        """Measure from the start of a plugin to a pool that the scheduler can use."""
        before = self.api.slice_writes()
        with self._running() as plugin:
            began = time.monotonic() - plugin.served_seconds
            slices = self._wait_published(changes=0)
            seconds = time.monotonic() - began
            time.sleep(QUIET_SECONDS)
            figures = self._figures(plugin, before=before, slices=slices)
            return Row(
                f"slices-publish devices={self.devices}",
                {"seconds": seconds, **figures},
                at_most={"writes": slices, **at_most},
            )

    def restart(self) -> Row:
        """Measure a plugin whose slices are already published."""
        before = self.api.slice_writes()
        with self._running() as plugin:
            time.sleep(2 * QUIET_SECONDS)
            slices = self._wait_published(changes=0)
            figures = self._figures(plugin, before=before, slices=slices)
            return Row(f"slices-restart devices={self.devices}", figures, at_most={"writes": 0})

    def change(self, changes: int) -> Iterator[Row]:
        """Measure one changed device, and then many changes at a thousand per second."""
        with self._running() as plugin:
            time.sleep(QUIET_SECONDS)
            before = self.api.slice_writes()
            began = time.monotonic()
            order(self.changes, 1)
            slices = self._wait_published(changes=1)
            seconds = time.monotonic() - began
            time.sleep(QUIET_SECONDS)
            figures = self._figures(plugin, before=before, slices=slices)
            yield Row(
                f"slices-change devices={self.devices}",
                {"seconds": seconds, **figures},
                at_most={"writes": 1},
            )
            yield self._burst(plugin, changes)

    def _burst(self, plugin: Plugin, changes: int) -> Row:
        before = self._generations()
        began = time.monotonic()
        order(self.changes, 1 + changes)
        # Don't poll during the changes, because that would load the API server and this process.
        time.sleep(changes / RATE)
        self._wait_published(changes=1 + changes)
        seconds = time.monotonic() - began
        time.sleep(QUIET_SECONDS)
        after = self._generations()
        writes = [number - before.get(name, 0) for name, number in after.items()]
        return Row(
            f"slices-burst devices={self.devices}",
            {
                "changes": changes,
                "seconds": seconds,
                "slices": len(writes),
                "writes": sum(writes),
                # There is no pause before the first write of a slice.
                "writes_per_slice_and_second": max(0, max(writes) - 1) / seconds,
                "rss_mib": plugin.most_resident_mib(),
            },
            at_most={"writes_per_slice_and_second": WRITES_PER_SLICE_AND_SECOND},
        )

    def _figures(self, plugin: Plugin, *, before: int, slices: int) -> dict[str, float]:
        return {
            "slices": slices,
            "writes": self.api.slice_writes() - before,
            "rss_mib": plugin.most_resident_mib(),
        }

    # ------------------------------------------------------------ the content of the API server

    def _generations(self) -> dict[str, int]:
        """Return how often the spec of each slice has been written."""
        found = (body["metadata"] for body in self.api.slices(DRIVER))
        return {metadata["name"]: metadata["generation"] for metadata in found}

    def _wait_published(self, *, changes: int) -> int:
        """Wait until the API server has a complete pool with the devices after this number of
        changes. Return the number of its slices."""
        wanted = dict(zip(names(self.devices), levels(self.devices, changes=changes), strict=True))
        until = time.monotonic() + PUBLISHED_SECONDS
        while time.monotonic() < until:
            slices = self.api.slices(DRIVER)
            if _complete(slices) and _levels(slices) == wanted:
                return len(slices)
            time.sleep(POLL_SECONDS)
        raise SystemExit(
            f"the slices of {self.devices} devices are not what they should be after "
            f"{PUBLISHED_SECONDS:.0f} s"
        )


def _complete(slices: list[dict[str, Any]]) -> bool:
    pools = [body["spec"]["pool"] for body in slices]
    return bool(pools) and all(
        pool["generation"] == pools[0]["generation"] and pool["resourceSliceCount"] == len(slices)
        for pool in pools
    )


def _levels(slices: list[dict[str, Any]]) -> dict[str, int]:
    return {
        device["name"]: device["attributes"][LEVEL]["int"]
        for body in slices
        for device in body["spec"].get("devices", ())
    }
