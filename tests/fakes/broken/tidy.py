"""
The driver that follows all rules: lamps for a single claim each, and a rail whose light claims
share.

The driver creates a directory for each claim below ``run``, which a reboot empties, and a note in a
file below ``notes``, which stays. Both are named after claim and device, so that any process finds
them.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from drakit import (
    Capacity,
    Condition,
    Device,
    Driver,
    DriverConfig,
    DriverError,
    Edits,
    Health,
    Mount,
    PreparedDevice,
)
from drakit.device import CapacityRange

MODES = ("bright", "dim")


class TidyConfig(DriverConfig):
    root: Path
    lamps: int = 4


class Tidy(Driver[TidyConfig]):
    """Devices ``lamp-0`` and so on, and ``rail``."""

    name = "tidy.example.com"
    reports_health = True
    metadata_files = True
    seconds = 0.0
    """Seconds that a prepare takes."""

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        self.run = config.root / "run" / "tidy"
        self.notes = config.root / "notes"
        self.unplugged = config.root / "unplugged"

    async def devices(self):
        yield self.listed()
        while not self.unplugged.exists():
            await asyncio.sleep(0.1)
        yield self.listed()
        await asyncio.Event().wait()

    def listed(self) -> list[Device]:
        light = Capacity(value="10", default="1", valid_range=CapacityRange(min="1", step="1"))
        return [
            *(
                Device(
                    name=f"lamp-{number}", attributes={"number": number}, health=Health.healthy()
                )
                for number in range(self.config.lamps)
                if number != 1 or not self.unplugged.exists()
            ),
            Device(
                name="rail",
                capacity={"light": light},
                allow_multiple_allocations=True,
                health=Health.healthy(),
            ),
        ]

    def mode(self, device) -> str:
        """Return the requested mode. Raise DriverError if it is invalid."""
        mode = "bright"
        for config in device.configs:
            if unknown := sorted(config.keys() - {"mode"}):
                raise DriverError(f"{unknown[0]!r} is no parameter of a lamp; take mode")
            mode = config.get("mode", mode)
        if mode not in MODES:
            raise DriverError(f"mode is none that a lamp has; take {' or '.join(MODES)}")
        return mode

    def key(self, claim, device) -> str:
        return f"{claim.uid}-{device.name}-{device.share_id or 'whole'}"

    def place(self, claim, device) -> Path:
        return self.run / self.key(claim, device)

    def note(self, claim, device) -> Path:
        return self.notes / self.key(claim, device)

    async def prepare(self, claim, device):
        if device.name not in {listed.name for listed in self.listed()}:
            raise DriverError(f"there is no {device.name} on this node")
        mode = self.mode(device)
        await asyncio.sleep(self.seconds)
        return PreparedDevice(
            edits=self.make(claim, device, mode), conditions=self.conditions(device)
        )

    def conditions(self, device) -> tuple[Condition, ...]:
        return (Condition(type="Ready", status="True", reason="Lit"),)

    def make(self, claim, device, mode: str) -> Edits:
        """Make what the containers get."""
        self.notes.mkdir(exist_ok=True)
        self.note(claim, device).write_text(json.dumps({"mode": mode}))
        self.place(claim, device).mkdir(parents=True, exist_ok=True)
        return Edits(
            env={"LAMP": device.name, "LAMP_MODE": mode}, mounts=(self.mount(claim, device),)
        )

    def mount(self, claim, device) -> Mount:
        return Mount(
            host_path=str(self.place(claim, device)), container_path=f"/lamps/{device.name}"
        )

    def unprepare(self, claim, device) -> None:
        if self.place(claim, device).exists():
            self.place(claim, device).rmdir()
        self.note(claim, device).unlink(missing_ok=True)


class Slow(Tidy):
    """The same, as devices are that take their time."""

    seconds = 0.3


class Bare(Tidy):
    """The same, with nothing for containers."""

    def make(self, claim, device, mode):
        super().make(claim, device, mode)
        return Edits()
