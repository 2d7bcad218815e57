"""A marking driver for a process of its own, which stops at the step that a test names."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.crash.drivers import Marking

NAME = "apart.example.com"


class Stop:
    """The step at which the driver is killed, or waits: a file below the hardware's directory."""

    def __init__(self, directory: Path) -> None:
        self._file, self._reached = directory / "stop", directory / "stopped"

    def at(self, label: str, *, kill: bool) -> None:
        """Name the next step to stop at."""
        self._reached.unlink(missing_ok=True)
        temporary = self._file.with_name("stop new")
        temporary.write_text(f"{label}|{'kill' if kill else 'wait'}")
        temporary.rename(self._file)

    def go_on(self) -> None:
        """Let a driver that waits continue."""
        self._reached.unlink()

    @property
    def reached(self) -> bool:
        return self._reached.exists()

    def passing(self, label: str) -> bool:
        """Return whether the driver must wait at this step; it may not survive it."""
        try:
            wanted, _, how = self._file.read_text().partition("|")
        except FileNotFoundError:
            return False
        if wanted != label:
            return False
        self._file.rename(self._reached)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    async def passed(self, label: str) -> None:
        if self.passing(label):
            while self.reached:
                await asyncio.sleep(0.01)


class Apart(Marking):
    """Calls for one device never overlap, whichever node plugin made them."""

    name = NAME

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        self.stop = Stop(config.directory)
        self.running = Counter[str]()

    async def prepare(self, claim, device):
        edits = await self._alone("prepare", device, super().prepare(claim, device))
        return replace(edits, device_nodes=())  # the host has no such nodes

    async def unprepare(self, claim, device):
        await self._alone("unprepare", device, super().unprepare(claim, device))

    async def _alone(self, what, device, call):
        self.running[device.name] += 1
        if self.running[device.name] > 1:
            self.hardware.note_wrong(f"{what} of {device.name} beside another call")
        try:
            await self.stop.passed(f"{what} {device.name} begins")
            result = await call
            await self.stop.passed(f"{what} {device.name} ends")
            return result
        finally:
            self.running[device.name] -= 1
