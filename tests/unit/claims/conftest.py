from __future__ import annotations

from pathlib import Path

import pytest

from drakit_nodeplugin.claims.checkpoint import Checkpoint
from drakit_nodeplugin.claims.engine import ClaimEngine
from drakit_nodeplugin.claims.restore import SpecRestorer
from drakit_nodeplugin.claims.specs import ClaimSpecs
from tests.fakes.claims import DRIVER, NODE, FakeClaims, FakeDevices
from tests.fakes.node import StaticNode


class Plugin:
    """An engine with all its real parts, and the fakes at its borders."""

    def __init__(self, folder: Path, *, boot_id: str, claims: FakeClaims, devices: FakeDevices):
        self.cdi = folder / "cdi"
        self.claims = claims
        self.devices = devices
        self.checkpoint = Checkpoint(folder / "checkpoint.db")
        self.specs = ClaimSpecs(DRIVER, self.cdi)
        self.engine = ClaimEngine(
            driver=DRIVER,
            node=StaticNode(name=NODE, labels={"zone": "a"}),
            boot_id=boot_id,
            checkpoint=self.checkpoint,
            source=claims,
            devices=devices,
            specs=self.specs,
        )
        self.restorer = SpecRestorer(
            checkpoint=self.checkpoint,
            specs=self.specs,
            boot_id=boot_id,
            locks=self.engine.locks,
        )

    def files(self) -> set[str]:
        return {path.name for path in self.cdi.iterdir()} if self.cdi.exists() else set()

    async def states(self) -> dict[str, str]:
        return {claim.uid: claim.state for claim in await self.checkpoint.all()}


@pytest.fixture
def claims() -> FakeClaims:
    return FakeClaims()


@pytest.fixture
def devices() -> FakeDevices:
    return FakeDevices()


@pytest.fixture
async def start(tmp_path, claims, devices):
    """Start a plugin; the one before is stopped, as at a restart (or a reboot, by `boot_id`)."""
    running: list[Plugin] = []

    async def start(*, boot_id: str = "boot-1") -> Plugin:
        while running:
            await running.pop().checkpoint.close()
        plugin = Plugin(tmp_path, boot_id=boot_id, claims=claims, devices=devices)
        await plugin.checkpoint.open()
        running.append(plugin)
        return plugin

    yield start
    while running:
        await running.pop().checkpoint.close()
