"""Drivers that cannot unprepare whatever they are asked to, and those that undo too much."""

from __future__ import annotations

import asyncio
import json
import shutil

from drakit import Device, Driver, DriverError
from tests.fakes.broken.tidy import Tidy, TidyConfig


class NothingToUndo(Tidy):
    """An unprepare of a claim that is not prepared is an error."""

    def unprepare(self, claim, device):
        self.place(claim, device).rmdir()
        self.note(claim, device).unlink()


class NothingAfterReboot(Tidy):
    """An unprepare after a reboot is an error, because the state is gone."""

    def unprepare(self, claim, device):
        if self.note(claim, device).exists():
            self.place(claim, device).rmdir()
            self.note(claim, device).unlink()


class OwnMemory(Tidy):
    """Unprepares what this process has prepared."""

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        self.known: dict[str, str] = {}

    def make(self, claim, device, mode):
        self.known[self.key(claim, device)] = mode
        return super().make(claim, device, mode)

    def unprepare(self, claim, device):
        if self.known.pop(self.key(claim, device), None) is None:
            raise DriverError("nobody knows of the claim")
        super().unprepare(claim, device)


class KeepsDevice(Tidy):
    """Keeps a lamp for its first claim forever."""

    def make(self, claim, device, mode):
        self.notes.mkdir(exist_ok=True)
        owner = self.notes / f"owner-{device.name}"
        if not owner.exists():
            owner.write_text(claim.uid)
        if device.share_id is None and owner.read_text() != claim.uid:
            raise DriverError("the lamp is another claim's")
        return super().make(claim, device, mode)


class FailureStays(Tidy):
    """A claim that was refused keeps the lamp."""

    def mode(self, device):
        self.notes.mkdir(exist_ok=True)
        lock = self.notes / f"lock-{device.name}"
        if lock.exists():
            raise DriverError("the lamp is locked")
        lock.touch()
        mode = super().mode(device)
        lock.unlink()
        return mode


class NeedsParameters(Tidy):
    """Looks into the parameters to unprepare."""

    def unprepare(self, claim, device):
        if device.configs[0].get("mode") == "dim":
            self.note(claim, device).write_text(json.dumps({"mode": "bright"}))
        super().unprepare(claim, device)


class UndoesAtStop(Tidy):
    """Takes all that is prepared with it."""

    def close(self):
        shutil.rmtree(self.run, ignore_errors=True)


class Unnamed(Driver[TidyConfig]):
    """The name of its unprepare is misspelt, so that nothing undoes its work."""

    name = "unnamed.example.com"

    async def devices(self):
        yield [Device(name="lamp")]
        await asyncio.Event().wait()

    def prepare(self, claim, device):
        raise DriverError("nobody gets it")

    def unprepair(self, claim, device):
        raise DriverError("nobody calls it")
