"""
The device manager of one driver: what its endpoint has, as far as it can be published.

It keeps the last inventory, leaves out devices that the API would refuse, and tells who listens
that something changed. The endpoint is the source of truth; nothing between it and the manager
caches devices. Grace periods, health and taints are to come here.

It must not know the API server, slices, claims beyond their identity, or gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from drakit.device import Device
from drakit.resource.device import device_problems

__all__ = ("DeviceManager",)

logger = logging.getLogger(__name__)


class DeviceManager:
    """An :class:`~drakit_nodeplugin.endpoints.python.InventoryListener` that others can ask."""

    def __init__(self, driver: str) -> None:
        self.driver = driver
        self.changed = asyncio.Event()
        """Set at each change; who waits for it clears it."""

        self.devices: tuple[Device, ...] | None = None
        """The devices to publish, in the endpoint's order; None until it has spoken once, and
        then what is published from an earlier time stays as it is."""

        self.stop_reason: str | None = None
        """Why the endpoint is away; None while it is there. Its devices stay as they were."""

        self._reported: dict[str, str] = {}

    def replaced(self, inventory: Collection[Device]) -> None:
        """The endpoint has these devices, all of them."""
        self.stop_reason = None
        devices = self._publishable(inventory)
        if devices != self.devices:
            logger.info("devices changed", extra={"driver": self.driver, "devices": len(devices)})
            self.devices = devices
            self.changed.set()

    def stopped(self, reason: str) -> None:
        """The endpoint is away."""
        self.stop_reason = reason

    def _publishable(self, inventory: Collection[Device]) -> tuple[Device, ...]:
        devices: dict[str, Device] = {}
        reported: dict[str, str] = {}
        for device in inventory:
            problems = device_problems(device)
            if device.name in devices:
                problems = ["another device has the same name"]
            if not problems:
                devices[device.name] = device
                continue
            reported[device.name] = "; ".join(problems)
            if self._reported.get(device.name) != reported[device.name]:
                logger.error(
                    "device is left out",
                    extra={
                        "driver": self.driver,
                        "device": device.name,
                        "error": reported[device.name],
                    },
                )
        self._reported = reported
        return tuple(devices.values())
