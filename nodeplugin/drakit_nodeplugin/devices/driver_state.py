"""
What the endpoints and pools of one driver share: settings, clocks, holds, and what has changed.

Endpoints and pools note their changes here; the manager reads and resets them when it notifies. It
must not know endpoints, pools, or who is notified.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from drakit_nodeplugin.devices.hardware import HeldDevice
from drakit_nodeplugin.devices.taints import HealthTiming

__all__ = ("DriverState",)


class DriverState:
    """What the endpoints of one driver share: settings, time, claims, and pending notifications."""

    def __init__(
        self,
        *,
        node: str,
        open_ended: bool,
        timing: HealthTiming,
        now: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`open_ended`: the number of endpoints is unknown. `now` returns the loop's time,
        `wall_clock` seconds since 1970."""
        self.node = node
        self.open_ended = open_ended
        self.timing = timing
        self.now = now
        self.wall = wall_clock
        self.held: Mapping[str, Collection[HeldDevice]] = {}
        """The holds of claims, in pools where a claim is still being unprepared. The same object
        while nothing changes."""
        self.published_changed = False
        """Whether the publication has changed since the last notification."""
        self.health_changed = False
        """The same of the health that is reported to the kubelet."""
        self.stored_changed = False
        """The same of the rows of the store: names, and whether endpoints are available."""
        self.vanished = False
        """Whether there may be other devices that are gone since the last notification."""

    def changed(self) -> None:
        """Everything may have changed."""
        self.published_changed = self.health_changed = self.stored_changed = True
        self.vanished = True
