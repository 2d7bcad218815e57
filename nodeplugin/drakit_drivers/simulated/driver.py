"""
The driver: publishes the profiles' devices as the control file changes them, and prepares claims.

A container gets only environment variables and metadata files. ``SIMULATED_<REQUEST>`` contains the
name of a device of the request, which is sufficient for an application that requests a single
device. ``SIMULATED_<REQUEST>__<DEVICE>`` describes each device as JSON. The variable name for a
share ends in the share ID, and the name for a device with admin access ends in ``ADMIN``, because a
container may also have the device itself.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, ClassVar

from drakit import (
    AllocatedDevice,
    Capacity,
    ClaimReference,
    Device,
    Driver,
    DriverError,
    Edits,
    Inventory,
    Node,
)
from drakit_drivers.simulated.config import (
    DRIVER_NAME,
    OUR_VARIABLES,
    SimulatedConfig,
    SimulatedParameters,
)
from drakit_drivers.simulated.control import Control, ControlFile, matches
from drakit_drivers.simulated.inventory import all_devices, commanded, names_of, without_device

Allocated = AllocatedDevice[SimulatedParameters]

logger = logging.getLogger(__name__)


class Simulated(Driver[SimulatedConfig, SimulatedParameters]):
    """Publishes simulated GPUs, NICs and CPUs; see ``docs/start/simulated-devices.md``."""

    name: ClassVar[str] = DRIVER_NAME
    side_effects: ClassVar[bool] = False
    metadata_files: ClassVar[bool] = True
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
        has_listed = False
        async with aclosing(self._file.follow()) as controls:
            async for control in controls:
                if not control.stop:
                    self._name_unknown(control)
                    yield commanded(self._all, control, driver=self.config.driver_name)
                    has_listed = True
                elif has_listed:
                    raise DriverError(control.stop)
                # If the driver restarts while it is still stopped, do not raise again: the backoff
                # after another failure would delay the next start by up to a minute.

    def prepare(self, claim: ClaimReference, device: AllocatedDevice[SimulatedParameters]) -> Edits:
        control = self._file.last
        found = self._devices.get((device.pool, device.name))
        where = f"on node {self.node.name}"
        if control.stop:
            raise DriverError(
                f"the device cannot be prepared {where}, because the driver is stopped: "
                f"{control.stop}"
            )
        if found is None or _any(control.missing, found):
            raise DriverError(f"the device is gone {where}; delete the pod to get another device")
        for pattern, text in control.fail_prepare.items():
            if matches(pattern, names_of(found)):
                raise DriverError(f"the device cannot be prepared {where}: {text}")
        return Edits(env=_environment(claim, device, found, driver=self.config.driver_name))

    def _name_unknown(self, control: Control) -> None:
        if unknown := without_device(self._all, control):
            logger.warning(
                "control file names devices that do not exist", extra={"devices": unknown}
            )


def _any(patterns: tuple[str, ...], device: Device) -> bool:
    return any(matches(pattern, names_of(device)) for pattern in patterns)


# ------------------------------------------------------------ environment variables


def _environment(
    claim: ClaimReference, allocated: Allocated, device: Device, *, driver: str
) -> dict[str, str]:
    """Return the environment variables for one device of a claim, including the user's
    variables."""
    # Use the request name without the subrequest name. The JSON contains the allocated alternative.
    request = OUR_VARIABLES + _variable(allocated.request.partition("/")[0])
    parts = [request, _variable(device.name)]
    if allocated.share_id:
        parts.append(_variable(allocated.share_id))
    if allocated.admin_access:
        parts.append("ADMIN")
    facts = _facts(claim, allocated, device, driver=driver)
    text = json.dumps(facts, separators=(",", ":"))
    return {**allocated.parameters.env, request: device.name, "__".join(parts): text}


def _facts(
    claim: ClaimReference, allocated: Allocated, device: Device, *, driver: str
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "driver": driver,
        "device": device.name,
        "pool": device.pool,
        "claim": str(claim),
        "request": allocated.request,
        "type": device.attributes.get("type"),
        "parent": device.attributes.get("parent"),
        "profile": device.attributes.get("profile"),
        "numaNode": device.topology.numa_node,
        "capacity": _capacity(allocated, device),
        "shareID": allocated.share_id,
        "adminAccess": allocated.admin_access or None,
        "parameters": allocated.parameters.model_dump(
            mode="json", by_alias=True, exclude_none=True
        ),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _capacity(allocated: Allocated, device: Device) -> dict[str, str]:
    """Return the claim's part of each capacity: its share, or the whole capacity."""
    whole = {
        name: amount.value if isinstance(amount, Capacity) else amount
        for name, amount in device.capacity.items()
    }
    return {**whole, **allocated.consumed_capacity}


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", name.upper())
