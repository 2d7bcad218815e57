"""
Rotors: each folder below a configured directory is a rotor, and claims share its revolutions.

A rotor turns at the speed in its file ``speed``, which is the highest speed of all shares. Each
share has a separate file (``speed.<share ID>``), so that it can be released separately.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from drakit import (
    AllocatedDevice,
    Capacity,
    CapacityRange,
    ClaimReference,
    Device,
    DeviceParameters,
    Driver,
    DriverConfig,
    DriverError,
    Edits,
    Health,
    Mount,
    parse_quantity,
)

RPM = Capacity(value="3000", default="100", valid_range=CapacityRange(min="100", step="100"))


class RotorsConfig(DriverConfig):
    directory: Path = Path("/run/rotors")


class RotorParameters(DeviceParameters):
    speed: Annotated[int, Field(ge=0, le=3000)] = 0


class Rotors(Driver[RotorsConfig, RotorParameters]):
    name = "rotors.example.com"

    async def devices(self) -> AsyncIterator[list[Device]]:
        while True:
            folders = sorted(self.config.directory.glob("*"))
            yield [self._device(folder) for folder in folders if folder.is_dir()]
            await asyncio.sleep(2)

    def _device(self, rotor: Path) -> Device:
        model = rotor / "model"
        return Device(
            name=rotor.name,
            attributes={"model": model.read_text().strip()} if model.exists() else {},
            capacity={"rpm": RPM},
            allow_multiple_allocations=True,
        )

    def prepare(self, claim: ClaimReference, device: AllocatedDevice[RotorParameters]) -> Edits:
        rotor = self.config.directory / device.name
        if not rotor.is_dir():
            raise DriverError(f"rotor {device.name} no longer exists; create its folder again")
        speed = device.parameters.speed
        # if the device is not shared, the claim gets its whole capacity
        claimed = device.consumed_capacity.get("rpm", RPM.value)
        if speed > parse_quantity(claimed):
            raise DriverError(f"speed {speed} is more than the claim's {claimed} rpm; claim more")
        if not device.admin_access:  # claims with admin access only monitor the rotor
            self._share(device).write_text(str(speed))
            self._turn(rotor)
        # A container may have several devices, so the variable contains the request and the device.
        variable = re.sub(r"\W", "_", f"ROTOR_SPEED_{device.request}__{device.name}").upper()
        return Edits(
            env={variable: str(speed)},
            mounts=(Mount(host_path=str(rotor), container_path=f"/rotors/{device.name}"),),
        )

    def unprepare(
        self, claim: ClaimReference, device: AllocatedDevice[RotorParameters | None]
    ) -> None:
        rotor = self.config.directory / device.name
        if rotor.is_dir() and not device.admin_access:
            self._share(device).unlink(missing_ok=True)  # the device may never have been prepared
            self._turn(rotor)

    def health(self, device: Device) -> Health:
        fault = self.config.directory / device.name / "fault"
        if not fault.exists():
            return Health.healthy()
        text = fault.read_text().strip()
        return Health.unhealthy(text, evict_pods=text.startswith("fatal"))

    def _share(self, device: AllocatedDevice[RotorParameters | None]) -> Path:
        """Return the file with the speed of one share of a rotor."""
        return self.config.directory / device.name / f"speed.{device.share_id or 'whole'}"

    def _turn(self, rotor: Path) -> None:
        """Turn a rotor as fast as its fastest share."""
        # A file can be empty after a crash between its creation and the write.
        speeds = [int(share.read_text() or 0) for share in rotor.glob("speed.*")]
        (rotor / "speed").write_text(str(max(speeds, default=0)))
