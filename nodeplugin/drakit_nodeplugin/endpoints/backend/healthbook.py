"""
What a backend has said of its devices' health, beside their list: two streams, in no order.

Health of a device that is not listed yet is kept until it is, and told then. How much is kept is
bounded by what is listed.

It must not know gRPC, or what health leads to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from drakit.device import Device, Health
from drakit.resource.limits import MAX_POOL_NAME_LENGTH
from drakit_nodeplugin.endpoints.endpoint import DeviceKey

__all__ = ("HealthBook",)

MAX_EARLY = 1024
"""Devices that are not listed and of which something is kept; of more the oldest is forgotten."""

MAX_NAME = 63


class HealthBook:
    """The health of one connection's devices, as it was told beside their list."""

    def __init__(self) -> None:
        # Plain tuples, which are made faster: thousands of them may be made at each change.
        self._listed: set[tuple[str, str]] = set()
        self._early: dict[DeviceKey, Health] = {}
        self._news: dict[DeviceKey, Health] = {}

    def tell(self, key: DeviceKey, health: Health) -> None:
        """A device is like this."""
        if key in self._listed:
            self._news[key] = health
        elif len(key.name) <= MAX_NAME and len(key.pool) <= MAX_POOL_NAME_LENGTH:
            self._early.pop(key, None)
            self._early[key] = health
            if len(self._early) > MAX_EARLY:
                del self._early[next(iter(self._early))]

    def list(self, devices: Iterable[Device]) -> None:
        """There are these devices now."""
        self._listed = {(device.pool, device.name) for device in devices}
        self._news = {key: health for key, health in self._news.items() if key in self._listed}
        for key in [key for key in self._early if key in self._listed]:
            self._news[key] = self._early.pop(key)

    def take(self) -> Mapping[DeviceKey, Health]:
        """Give what is new of listed devices."""
        news, self._news = self._news, {}
        return news
