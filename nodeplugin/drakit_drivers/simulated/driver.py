"""
The driver: says what the profiles have and the control file commands, and shows what a claim got.

It must not know how devices are made, or how the file is read.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import ClassVar

from drakit import (
    AllocatedDevice,
    ClaimReference,
    Device,
    Driver,
    DriverError,
    Edits,
    Inventory,
    Node,
)
from drakit_drivers.simulated.config import DRIVER_NAME, SimulatedConfig
from drakit_drivers.simulated.control import Control, ControlFile, matches
from drakit_drivers.simulated.environment import environment
from drakit_drivers.simulated.inventory import all_devices, commanded, names_of, without_device
from drakit_drivers.simulated.parameters import SimulatedParameters

__all__ = ("Simulated",)

logger = logging.getLogger(__name__)


class Simulated(Driver[SimulatedConfig, SimulatedParameters]):
    """Publishes GPUs, network interfaces and CPUs that are not there; see ``docs/simulated.md``."""

    name: ClassVar[str] = DRIVER_NAME
    side_effects: ClassVar[bool] = False
    reports_health: ClassVar[bool] = True

    def __init__(self, config: SimulatedConfig, node: Node) -> None:
        super().__init__(config, node)
        self._all = all_devices(config)
        self._devices = {
            (device.pool, device.name): device
            for device in (*(self._all.fallback or ()), *self._all.devices)
        }
        self._file = ControlFile(config.control)

    @classmethod
    def name_of(cls, config: SimulatedConfig) -> str:
        return config.driver_name

    async def devices(self) -> AsyncIterator[Inventory]:
        said = False
        async with aclosing(self._file.follow()) as controls:
            async for control in controls:
                if not control.stop:
                    self._name_unknown(control)
                    yield commanded(self._all, control, driver=self.config.driver_name)
                    said = True
                elif said:
                    raise DriverError(control.stop)
                # Started again meanwhile, we keep silent: after an end once more we would be
                # waited for up to a minute once the command is taken back.

    def prepare(self, claim: ClaimReference, device: AllocatedDevice[SimulatedParameters]) -> Edits:
        control = self._file.last
        found = self._devices.get((device.pool, device.name))
        where = f"device {device.name} on node {self.node.name}"
        if control.stop:
            raise DriverError(f"{where} cannot be prepared, its driver is stopped: {control.stop}")
        if found is None or _any(control.missing, found):
            raise DriverError(f"{where} is gone; delete the pod so that another is found for it")
        for pattern, text in control.fail_prepare.items():
            if matches(pattern, names_of(found)):
                raise DriverError(f"{where} cannot be prepared: {text}")
        return Edits(env=environment(claim, device, found, driver=self.config.driver_name))

    def _name_unknown(self, control: Control) -> None:
        if unknown := without_device(self._all, control):
            logger.warning(
                "control file names devices that are not there", extra={"devices": unknown}
            )


def _any(patterns: tuple[str, ...], device: Device) -> bool:
    return any(matches(pattern, names_of(device)) for pattern in patterns)
