"""Fixtures: a directory of backends, a watched directory, and a listener of an endpoint."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from drakit.device import AllocatedDevice, ClaimReference
from drakit_driver.runtime import endpoint as lifecycle
from drakit_driver.runtime.contract import HealthReport
from drakit_nodeplugin.allowed import AllowedBackend
from drakit_nodeplugin.config import Backends
from drakit_nodeplugin.endpoints.backend import connection
from drakit_nodeplugin.endpoints.backend import directory as directory_module
from drakit_nodeplugin.endpoints.backend.connection import BackendEndpoint, BackendSource
from drakit_nodeplugin.endpoints.backend.directory import BackendDirectory
from drakit_nodeplugin.endpoints.host_paths import HostDeviceNodes
from drakit_nodeplugin.endpoints.sources import Diagnostic, HostContext
from tests.fakes.backend import FakeBackend
from tests.fakes.direct import Work, call_batch
from tests.fakes.node import StaticNode
from tests.unit.endpoints import camera
from tests.unit.endpoints.camera import NODE, running, until

DRIVER = "gpu.example.com"
CLAIM = ClaimReference(namespace="lab", name="train", uid="uid-a")
OTHER = ClaimReference(namespace="lab", name="infer", uid="uid-b")
GPU = AllocatedDevice(name="gpu-0", pool=NODE, request="main")
SECOND = AllocatedDevice(name="gpu-1", pool=NODE, request="main")
OWN = {"owner": {"uid": os.getuid()}}
ANY: dict[str, Any] = {
    **OWN,
    "env": ["GPU*"],
    "mounts": {"/": "rw"},
    "devices": ["/dev/*"],
    "hooks": ["/bin/sh"],
    "intelRdt": True,
}
"""An entry for tests that are not about entries."""


def allowed_backends(**entries: dict[str, Any]) -> Mapping[str, AllowedBackend]:
    """The entries of these names; the driver of ``gpu`` is ``gpu.example.com``."""
    return Backends.model_validate(
        {
            "allowed": {
                name: {"driver": f"{name}.example.com", **entry} for name, entry in entries.items()
            }
        }
    ).allowed


class Listener(camera.Listener):
    """The reports of an endpoint, in order."""

    def __init__(self) -> None:
        super().__init__(DRIVER)

    async def names(self) -> list[str]:
        """Wait for the next inventory, and return the names of its devices."""
        while isinstance(report := await self.hear(), str):
            pass
        return [each.name for each in report.devices]

    async def unhealthy(self) -> list[str]:
        """Wait for the next report of health, and return the names of its unhealthy devices."""
        while not isinstance(report := await self.hear(), HealthReport):
            pass
        reported = report.devices.items()
        return sorted([key.name for key, each in reported if each.status == "unhealthy"])

    async def reason(self) -> str:
        while not isinstance(report := await self.hear(), str):
            pass
        return report


class Found:
    """Watched directories of backends, and the reports."""

    def __init__(self, parent: Path, allowed: Mapping[str, AllowedBackend] | None = None) -> None:
        self.parent = parent
        self.path = parent / "gpu"
        """The directory of the driver of most tests."""
        self.diagnostics: list[Diagnostic] = []
        self.appeared: list[str] = []
        self.taken: dict[str, str] = {}
        self.directory = BackendDirectory(
            parent,
            node=StaticNode(name=NODE),
            taken=self.taken.get,
            report=self.diagnostics.append,
            allowed=allowed_backends(gpu=ANY, tpu=ANY) if allowed is None else allowed,
            devices=HostDeviceNodes(root=Path("/dev")),
        )

    @property
    def notes(self) -> list[str]:
        """The messages of the diagnostics. DIR is the directory of the driver of most tests."""
        return [
            diagnostic.note.replace(str(self.path), "DIR").replace(str(self.parent), "PARENT")
            for diagnostic in self.diagnostics
        ]

    async def noted(self) -> list[str]:
        """Wait for a diagnostic, and return the messages."""
        await until(lambda: self.diagnostics)
        return self.notes

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.directory.run(self.appeared.append))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
        assert task.cancelled(), task.exception()


@pytest.fixture
def sockets():
    """The directory of the backend of most tests; its path leaves room for a socket's name."""
    parent = Path(tempfile.mkdtemp(prefix="drakit-"))
    for entry in ("gpu", "tpu"):
        (parent / entry).mkdir()
    yield parent / "gpu"
    shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture
def quick(monkeypatch) -> None:
    """Delays between attempts are hundredths of a second."""
    monkeypatch.setattr(directory_module, "SCAN_SECONDS", 0.02)
    monkeypatch.setattr(directory_module, "AGAIN_SECONDS", (0.02, 0.05))
    monkeypatch.setattr(directory_module, "HANDOVER_SECONDS", 0.05)
    monkeypatch.setattr(connection, "HEALTH_AGAIN_SECONDS", (0.02, 0.05))
    monkeypatch.setattr(lifecycle, "RECONNECT_SECONDS", (0.02, 0.05))


@pytest.fixture
def slow_reconnect(quick, monkeypatch) -> None:
    """Delay reconnects by a minute, except for a new socket. Must be requested before the
    endpoint."""
    monkeypatch.setattr(lifecycle, "RECONNECT_SECONDS", (60.0, 60.0))


@pytest.fixture
async def found(sockets, quick) -> Found:
    return Found(sockets.parent)


@pytest.fixture
async def listener() -> Listener:
    return Listener()


async def call_both(work: Work, *items: tuple[Any, ...]) -> Sequence[Any | BaseException]:
    """Call an endpoint for a batch of claims; errors are returned as results."""
    return await call_batch(work, *((claim, devices) for claim, *devices in items))


def new_endpoint(found: Found, listener: Listener) -> BackendEndpoint:
    context = HostContext(listener=listener, node=NODE, report=found.diagnostics.append)
    endpoint = BackendSource(DRIVER, found.directory).endpoint(context)
    assert isinstance(endpoint, BackendEndpoint)
    return endpoint


@pytest.fixture
async def endpoint(found, listener):
    """A running endpoint, with or without its backend."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(found.watched())
        yield await stack.enter_async_context(running(new_endpoint(found, listener)))


@pytest.fixture
async def backend(sockets):
    async with FakeBackend(sockets / "gpu.sock") as backend:
        yield backend


@pytest.fixture
async def served(backend, endpoint, listener):
    """An endpoint whose backend has listed its devices."""
    await listener.names()
    return endpoint
