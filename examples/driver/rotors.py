"""Rotors: each folder below a configured one is a rotor; claims share it by its revolutions."""

import asyncio
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from drakit import (
    Capacity,
    CapacityRange,
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


class RotorsConfig(DriverConfig):
    directory: Path = Path("/run/rotors")


class RotorParameters(DeviceParameters):
    speed: Annotated[int, Field(ge=0, le=3000)] = 0


class Rotors(Driver[RotorsConfig]):
    name = "rotors.example.com"
    config_type = RotorsConfig
    parameters_type = RotorParameters
    rpm = Capacity(value="3000", default="100", valid_range=CapacityRange(min="100", step="100"))

    async def devices(self):
        while True:
            yield [self._device(d) for d in sorted(self.config.directory.glob("*")) if d.is_dir()]
            await asyncio.sleep(2)

    def prepare(self, claim, device):
        rotor, speed = self.config.directory / device.name, device.parameters.speed
        rpm = device.consumed_capacity.get("rpm", self.rpm.value)  # all, if it is not shared
        if not rotor.is_dir():
            raise DriverError(f"rotor {device.name} was taken away; put it back")
        if speed > parse_quantity(rpm):
            raise DriverError(f"speed {speed} is more than the claim's {rpm} rpm; claim more")
        self._turn(device, speed)
        which = re.sub(r"\W", "_", f"ROTOR_SPEED_{device.request}__{device.name}").upper()
        mount = Mount(host_path=str(rotor), container_path=f"/rotors/{device.name}")
        return Edits(env={which: str(speed)}, mounts=(mount,))

    def unprepare(self, claim, device):
        self._turn(device, None)

    def health(self, device):
        why = [f.read_text().strip() for f in self.config.directory.glob(f"{device.name}/fault")]
        return Health.bad(why[0], broken=why[0].startswith("fatal")) if why else Health.ok()

    def _device(self, rotor):
        about = {file.name: file.read_text().strip() for file in rotor.glob("model")}
        shared = {"capacity": {"rpm": self.rpm}, "allow_multiple_allocations": True}
        return Device(name=rotor.name, attributes=about, **shared)

    def _turn(self, device, speed):
        # A file for each share: the rotor turns as fast as the fastest of them asks for.
        share = self.config.directory / device.name / f"speed.{device.share_id or 'whole'}"
        if share.parent.is_dir() and not device.admin_access:
            share.unlink(missing_ok=True) if speed is None else share.write_text(str(speed))
            speeds = [int(file.read_text() or 0) for file in share.parent.glob("speed.*")]
            share.with_name("speed").write_text(str(max(speeds, default=0)))
