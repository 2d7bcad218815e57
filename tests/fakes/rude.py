"""A driver that breaks the rules for drivers, in the way that a file in its directory names."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from drakit import Device, Driver, DriverConfig, Edits


class RudeConfig(DriverConfig):
    directory: Path


class Rude(Driver[RudeConfig]):
    """Reads the file `word` repeatedly, and misbehaves in the way that it names."""

    name = "rude.example.com"
    config_type = RudeConfig

    async def devices(self):
        while True:
            yield [Device(name="boor")]
            word = self._word()
            if word == "block":
                while self._word() == "block":
                    time.sleep(0.05)  # noqa: ASYNC251  (it is what the test is about)
            elif word == "end":
                sys.exit(1)
            elif word == "raise":
                raise ValueError("no manners")
            elif word == "flood":
                number = 0
                while True:
                    number += 1
                    yield [Device(name="boor", attributes={"number": number})]
            elif word == "nonsense":
                yield [42]
            elif word == "pools":
                second = int(time.monotonic())  # other names each second
                many = [Device(name="a", pool=f"p{second}-{n}") for n in range(2500)]
                bad = (Device(name="bad", consumes=1), Device(name="c", edits=Edits(mounts=1)))
                yield [Device(name="boor"), *bad, *many]
                await asyncio.sleep(0.2)
            elif word == "linger":
                asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
                (self.config.directory / "lingers").touch()
                await asyncio.Event().wait()
            elif word == "leak":
                self._leaked = [asyncio.create_task(asyncio.sleep(3600)) for _ in range(100)]
                return
            await asyncio.sleep(0.02)

    async def prepare(self, claim, device):
        return Edits()

    def _word(self) -> str:
        try:
            return (self.config.directory / "word").read_text().strip()
        except FileNotFoundError:
            return ""
