from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drakit import Driver
from drakit.driver import DriverConfig
from drakit_driver.runtime.failures import EndpointStoppedError
from drakit_driver.runtime.order import Order, claim_key
from drakit_formats.resource.claim import parse_claim
from drakit_nodeplugin.claims.allocation import wanted_claim
from drakit_nodeplugin.claims.kubelet_claims import KubeletClaims
from drakit_nodeplugin.claims.prepare import Preparing
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.claims.recovery import Recovery, SpecRestorer
from drakit_nodeplugin.claims.work import ClaimDependencies, ClaimResult, waits_for_hardware
from drakit_nodeplugin.config import OpaqueParameters
from drakit_nodeplugin.state.cdi_files import ClaimSpecs
from drakit_nodeplugin.state.checkpoint import Checkpoint
from drakit_nodeplugin.state.device_numbers import HeldNumbers
from drakit_nodeplugin.state.metadata_files import MetadataFiles
from drakit_nodeplugin.state.podresources import PodView
from tests.fakes.claims import (
    DRIVER,
    NODE,
    FakeClaims,
    FakeDevices,
    FakeInventories,
    prepare,
    reference,
    unprepare,
)
from tests.fakes.node import StaticNode

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


def wanted(found: dict[str, Any], limits: OpaqueParameters | None = None, **options: Any) -> Any:
    return wanted_claim(
        parse_claim(found),
        reference=reference(found["metadata"]["uid"]),
        driver=DRIVER,
        node=NODE,
        labels={},
        boot_id="boot-1",
        limits=limits or OpaqueParameters(),
        **options,
    )


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
        self.metadata = MetadataFiles(DRIVER, folder / "metadata")
        self.checkpoint = Checkpoint(
            folder / "checkpoint.db", files=self.specs, metadata=self.metadata, numbers=numbers
        )
        self.parts = ClaimDependencies(
            driver=DRIVER,
            node=StaticNode(name=NODE, labels={"zone": "a"}),
            boot_id=boot_id,
            checkpoint=self.checkpoint,
            source=claims,
            devices=devices,
            order=Order(),
            inventories=self.inventories,
            specs=self.specs,
            metadata=self.metadata,
            limits=OpaqueParameters(),
        )
        self.engine = Preparing(self.parts)
        self.answers: dict[str, ClaimResult] = {}
        """The results so far, keyed by UID."""
        self.steps: list[dict[str, float]] = []
        """The seconds of each step, of each prepare that has ended."""
        self.seconds: list[float] = []
        """The seconds of each operation that has ended."""
        self.queue = ClaimQueue(
            DRIVER,
            self.engine,
            order=self.parts.order,
            observers=[self],
            on_steps=lambda seconds: self.steps.append(dict(seconds)),
        )
        self.recovery = Recovery(checkpoint=self.checkpoint, queue=self.queue)
        self.restorer = SpecRestorer(self.parts, directory=self.cdi, queue=self.queue)

    async def prepare(self, *claims):
        return await prepare(self.queue, *claims)

    async def unprepare(self, *claims):
        return await unprepare(self.queue, *claims)

    def finished(self, claim, operation, answer, seconds) -> None:
        self.answers[claim.uid] = answer
        self.seconds.append(seconds)

    def lasts(self, claim, operation) -> None:
        pass

    def abandon(self, uid: str) -> None:
        """Abandon a prepare, as an unprepare that waits does."""
        for turn in self.parts.order.line(claim_key(uid)):
            if (work := getattr(turn, "work", None)) is not None:
                work.abandon()

    def is_waiting(self, uid: str) -> bool:
        """Return whether a claim waits for hardware that another one has."""
        return waits_for_hardware(self.parts.order, uid)

    def files(self) -> set[str]:
        return {path.name for path in self.cdi.iterdir()} if self.cdi.exists() else set()

    async def states(self) -> dict[str, str]:
        return {claim.uid: claim.state async for page in self.checkpoint.pages() for claim in page}


class Kubelet:
    """The claims that the kubelet lists."""

    def __init__(self) -> None:
        self.claims = KubeletClaims(pods=PodView.COMPLETE)
        self.asked = 0

    def lists(self, *uids: str, pods: PodView = PodView.COMPLETE) -> None:
        self.claims = KubeletClaims(uids=frozenset(uids), pods=pods)

    async def listed(self) -> KubeletClaims:
        self.asked += 1
        return replace(self.claims, asked_at=asyncio.get_running_loop().time())


async def errors(plugin: Plugin, *uids: str) -> list[str | None]:
    """Prepare claims in one call; return their errors, in order."""
    answers = await plugin.prepare(*map(reference, uids))
    return [answers[uid].error for uid in uids]


async def forget(plugin: Plugin, uid: str) -> None:
    """Forget a claim as the plugin does on an admin's request."""
    (claim,) = (await plugin.checkpoint.find([uid])).values()
    assert await plugin.checkpoint.forget(uid, claim.generation)


class EmptyDriver(Driver[DriverConfig]):
    """A driver without devices of its own, for :class:`DirectEndpoint`."""

    name = DRIVER

    def __init__(self) -> None:
        super().__init__(DriverConfig(), StaticNode(name=NODE))

    async def devices(self):
        yield []


def stopped() -> EndpointStoppedError:
    return EndpointStoppedError(driver=DRIVER, reason="its stream ended")


def sql(path: Path, *statements: str) -> list[Any]:
    """Run statements in a transaction; return the rows of the last one."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            rows = connection.execute(statement).fetchall()
    return rows


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory. On a busy disk, flushes take most of the time of these tests."""
    with tempfile.TemporaryDirectory(prefix="drakit-", dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def path(tmp_path) -> Path:
    """The database of a checkpoint, in a folder that does not exist yet."""
    return tmp_path / DRIVER / "checkpoint.db"


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[Checkpoint]:
    checkpoint = Checkpoint(path, **options)
    await checkpoint.open()
    try:
        yield checkpoint
    finally:
        await checkpoint.close()


@pytest.fixture
async def checkpoint(path) -> AsyncIterator[Checkpoint]:
    async with opened(path) as checkpoint:
        yield checkpoint


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


@pytest.fixture
async def plugin(start) -> Plugin:
    return await start()
