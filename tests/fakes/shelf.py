"""A driver for processes that tests start: devices are the files of a directory."""

from __future__ import annotations

import asyncio
from pathlib import Path

from drakit import Device, Driver, DriverConfig, DriverError, Edits


class ShelfConfig(DriverConfig):
    directory: Path


class Shelf(Driver[ShelfConfig]):
    """Preparing takes a file that is named ``slow-…`` a second, and one that is named ``held-…``
    until it is not empty."""

    name = "shelf.example.com"
    config_type = ShelfConfig

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        if not config.directory.is_dir():
            raise DriverError(f"directory: {config.directory} is not a directory")

    async def devices(self):
        while True:
            yield [Device(name=path.name) for path in sorted(self.config.directory.iterdir())]
            await asyncio.sleep(0.05)

    async def prepare(self, claim, device):
        if device.name.startswith("slow"):
            await asyncio.sleep(1)
        file = self.config.directory / device.name
        while device.name.startswith("held") and not file.stat().st_size:
            await asyncio.sleep(0.02)
        return Edits(env={"BOOK": device.name})
