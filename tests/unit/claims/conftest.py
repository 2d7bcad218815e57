from __future__ import annotations

from pathlib import Path

import pytest

from drakit_nodeplugin.claims.allocation import ParameterLimits
from drakit_nodeplugin.claims.prepare import Preparing
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.claims.recovery import Recovery, SpecRestorer
from drakit_nodeplugin.claims.scheduler import Scheduler
from drakit_nodeplugin.claims.work import ClaimAnswer, ClaimDependencies
from drakit_nodeplugin.state.cdi_files import ClaimSpecs
from drakit_nodeplugin.state.checkpoint import Checkpoint
from drakit_nodeplugin.state.device_numbers import HeldNumbers
from tests.fakes.claims import (
    DRIVER,
    NODE,
    FakeClaims,
    FakeDevices,
    FakeInventories,
    prepare,
    unprepare,
)
from tests.fakes.node import StaticNode


class Plugin:
    """An engine with its real parts, and fakes for its dependencies."""

    def __init__(
        self,
        folder: Path,
        *,
        boot_id: str,
        claims: FakeClaims,
        devices: FakeDevices,
        numbers: HeldNumbers | None = None,
    ):
        self.cdi = folder / "cdi"
        self.claims = claims
        self.devices = devices
        self.inventories = FakeInventories()
        self.specs = ClaimSpecs(DRIVER, self.cdi)
        self.checkpoint = Checkpoint(folder / "checkpoint.db", files=self.specs, numbers=numbers)
        self.parts = ClaimDependencies(
            driver=DRIVER,
            node=StaticNode(name=NODE, labels={"zone": "a"}),
            boot_id=boot_id,
            checkpoint=self.checkpoint,
            source=claims,
            devices=devices,
            scheduler=Scheduler(),
            inventories=self.inventories,
            specs=self.specs,
            limits=ParameterLimits(),
        )
        self.engine = Preparing(self.parts)
        self.answers: dict[str, ClaimAnswer] = {}
        """The answers so far, by UID."""
        self.queue = ClaimQueue(
            DRIVER, self.engine, scheduler=self.parts.scheduler, observers=[self]
        )
        self.recovery = Recovery(checkpoint=self.checkpoint, queue=self.queue)
        self.restorer = SpecRestorer(self.parts, directory=self.cdi, queue=self.queue)

    async def prepare(self, *claims):
        return await prepare(self.queue, *claims)

    async def unprepare(self, *claims):
        return await unprepare(self.queue, *claims)

    def finished(self, claim, operation, answer, seconds) -> None:
        self.answers[claim.uid] = answer

    def lasts(self, claim, operation) -> None:
        pass

    def abandon(self, uid: str) -> None:
        """Abandon a prepare, as an unprepare that waits does."""
        for turn in self.parts.scheduler.turns(uid):
            if (work := getattr(turn, "work", None)) is not None:
                work.abandon()

    def is_waiting(self, uid: str) -> bool:
        """Return whether a claim waits for hardware that another one has."""
        return any(turn.ready is not None for turn in self.parts.scheduler.turns(uid))

    def files(self) -> set[str]:
        return {path.name for path in self.cdi.iterdir()} if self.cdi.exists() else set()

    async def states(self) -> dict[str, str]:
        return {claim.uid: claim.state async for page in self.checkpoint.pages() for claim in page}


@pytest.fixture
def claims() -> FakeClaims:
    return FakeClaims()


@pytest.fixture
def devices() -> FakeDevices:
    return FakeDevices()


@pytest.fixture
async def start(tmp_path, claims, devices):
    """Start a plugin. The previous one is stopped, as in a restart, or a reboot by `boot_id`."""
    running: list[Plugin] = []

    async def start(*, boot_id: str = "boot-1") -> Plugin:
        while running:
            await running.pop().checkpoint.close()
        plugin = Plugin(tmp_path, boot_id=boot_id, claims=claims, devices=devices)
        await plugin.checkpoint.open()
        if plugin.checkpoint.damage is not None:
            plugin.engine.rebuilt.set()  # as after the first attempt of a rebuild
        running.append(plugin)
        return plugin

    yield start
    while running:
        await running.pop().checkpoint.close()
