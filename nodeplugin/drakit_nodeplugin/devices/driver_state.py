"""
The state that the endpoints and pools of one driver share: settings, clocks, holds, pending
changes.

Endpoints and pools note their changes here; the manager reads and resets them when it notifies. It
must not know endpoints, pools, or the listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from drakit_nodeplugin.devices.taints import HealthTiming
from drakit_nodeplugin.state.holds import HeldDevice

__all__ = ("DriverState",)


class DriverState:
    """The shared state of one driver's endpoints: settings, clocks, holds of claims, pending
    notifications."""

    def __init__(
        self,
        *,
        node: str,
        open_ended: bool,
        timing: HealthTiming,
        gone_eviction_seconds: float,
        now: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`open_ended`: the number of endpoints is unknown. Pods are evicted from devices that have
        been gone for `gone_eviction_seconds`. `now` returns the loop's time, `wall_clock` seconds
        since 1970."""
        self.node = node
        self.open_ended = open_ended
        self.timing = timing
        self.gone_eviction_seconds = gone_eviction_seconds
        self.now = now
        self.wall = wall_clock
        self.held: Mapping[str, Collection[HeldDevice]] = {}
        """The holds of claims, in pools where a claim is still being unprepared. The same object
        while nothing changes."""
        self.published_changed = False
        """Whether the publication has changed since the last notification."""
        self.health_changed = False
        """Whether the health that the kubelet gets has changed since the last notification."""
        self.stored_changed = False
        """Whether the rows for the store have changed since the last notification."""
        self.vanished = False
        """Whether there may be other devices that are gone since the last notification."""

    def changed(self) -> None:
        """Note that everything may have changed."""
        self.published_changed = self.health_changed = self.stored_changed = True
        self.vanished = True
