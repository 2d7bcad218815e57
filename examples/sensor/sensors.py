"""Serial sensors, each of which writes one reading per line. A sensor's link in /dev/serial/by-id
contains its serial number. The number of its device node can change whenever it is plugged in."""

import asyncio
import os
import re
import select
from pathlib import Path

from drakit import Device, DeviceNode, Driver, DriverConfig, Edits, Health, NoParameters


class SensorsConfig(DriverConfig):
    directory: Path = Path("/dev/serial/by-id")
    state: Path = Path("/run/sensors")  # a reboot clears the directory, but also ends all pods


class Sensors(Driver[SensorsConfig, NoParameters]):
    name = "sensors.example.com"

    async def devices(self):
        while True:
            links = sorted(self.config.directory.glob("usb-*"))
            yield [self._device(link) for link in links if link.exists()]
            await asyncio.sleep(2)

    def _device(self, link: Path) -> Device:
        name = re.sub("[^a-z0-9]+", "-", link.name.lower()).strip("-")
        model, _, serial = re.sub("-if.*", "", link.name[len("usb-") :]).rpartition("_")
        major, minor = os.major(link.stat().st_rdev), os.minor(link.stat().st_rdev)
        hardware = {"type": "c", "major": major, "minor": minor, "identity": link.name}
        node = DeviceNode(path=f"/dev/{name}", host_path=str(link.resolve()), **hardware)
        prepared = self.config.state.glob(f"{name}@*")
        return Device(
            name=name,
            attributes={"model": model, "serial": serial},
            edits=Edits(device_nodes=(node,)),
            prepare_again=any(file.read_text() != str(minor) for file in prepared),
        )

    async def prepare(self, claim, device):
        edits = await super().prepare(claim, device)  # raises if the sensor is unplugged
        file = self.config.state / f"{device.name}@{claim.uid}"
        file.write_text(str(edits.device_nodes[0].minor))
        return edits

    def unprepare(self, claim, device):
        (self.config.state / f"{device.name}@{claim.uid}").unlink(missing_ok=True)

    async def health(self, device):
        if any(self.config.state.glob(f"{device.name}@*")):
            return Health.unknown("a pod reads it, and each reading has only one reader")
        return await asyncio.to_thread(_read, device.edits.device_nodes[0].host_path)


def _read(path: str) -> Health:
    with open(os.open(path, os.O_NOCTTY | os.O_NONBLOCK), "rb", buffering=0) as port:
        if select.select([port], [], [], 3)[0] and port.read(64):
            return Health.healthy()
    return Health.unhealthy(f"{path} has no reading for 3 s; check the sensor's cable")
