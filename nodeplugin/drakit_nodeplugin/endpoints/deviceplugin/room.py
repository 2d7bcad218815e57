"""
How many devices all device plugins of a node may list together, and who has how many of them.

It must not know devices, connections, or what happens to who lists too many.
"""

from __future__ import annotations

import asyncio

__all__ = ("MAX_DEVICES", "Room", "TooManyDevicesError")

MAX_DEVICES = 16_384
"""Of a resource on one node, and of all of them together: as many as a driver may have."""


class TooManyDevicesError(Exception):
    """A device plugin lists more devices than can be published."""

    def __init__(self, *, others: int = 0) -> None:
        text = f"it listed more than {MAX_DEVICES:,} devices"
        if others:
            text += f", together with the {others:,} of other device plugins on this node"
        super().__init__(text)


class Room:
    """Shared by the connections of all resources."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

        self.reading = asyncio.Lock()
        """Held while a large list is read: all at once would take memory together."""

    def take(self, resource: str, devices: int) -> None:
        """A resource has so many devices now; raises :class:`TooManyDevicesError`."""
        others = sum(self._taken.values()) - self._taken.get(resource, 0)
        if others + devices > MAX_DEVICES:
            raise TooManyDevicesError(others=others)
        self._taken[resource] = devices

    def leave(self, resource: str) -> None:
        """A resource has no devices any more."""
        self._taken.pop(resource, None)
