"""A node plugin with only the device plugin adapter, and its listener."""

from __future__ import annotations

import asyncio
import os
import shutil
import string
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from drakit import AllocatedDevice, ClaimReference
from drakit.device import Edits, Inventory
from drakit_driver.runtime import endpoint as lifecycle
from drakit_nodeplugin.allowed import AllowedPlugin
from drakit_nodeplugin.config import DevicePlugins as Settings
from drakit_nodeplugin.endpoints.deviceplugin import plugin_connection, plugin_registration, plugins
from drakit_nodeplugin.endpoints.deviceplugin.plugins import DevicePlugins, DevicePluginsSource
from drakit_nodeplugin.endpoints.host_paths import HostDeviceNodes
from drakit_nodeplugin.endpoints.sources import Diagnostic, HostContext
from drakit_nodeplugin.state.podresources import DeviceManagerResources
from tests.fakes.direct import call
from tests.unit.endpoints.camera import NODE, until

DRIVER = "deviceplugin.drakit.dev"
THING = "vendor.example/thing"
CLAIM = ClaimReference(namespace="lab", name="things", uid="uid-a")
OWN = {"owner": {"uid": os.getuid()}}


ANY: dict[str, Any] = {
    **OWN,
    "resources": [
        THING,
        *(f"a.example/{name}" for name in "abco"),
        "good.example/g",
        "other.example/Big_One",
        *(f"v.example/r{number}" for number in range(64)),
    ],
    "devices": ["/dev/*", "/dev/*/*"],
    "mounts": {"/": "rw"},
    "env": [f"{letter}*" for letter in string.ascii_uppercase],
    "cdiDevices": ["vendor.example/thing", "vendor.example/gpu"],
}
"""An entry for tests that are not about entries."""


def plugins_of(**entries: dict[str, Any]) -> Mapping[str, AllowedPlugin]:
    """The entries of these names; the resource of ``thing`` is ``vendor.example/thing``."""
    return Settings.model_validate(
        {
            "plugins": {
                name: {"resources": [f"vendor.example/{name}"], **entry}
                for name, entry in entries.items()
            }
        }
    ).plugins


class World:
    """The environment of the adapter, and the reports on each resource, in order."""

    def __init__(self, directory: Path) -> None:
        """`directory` is that of the entry ``thing``."""
        self.directory = directory
        self.diagnostics: list[Diagnostic] = []
        self.kubelet: dict[str, bool] | Exception = {}
        """Resources that the kubelet serves (True), or whose devices only its pods still hold
        (False), or the error of its response."""
        self.unknown: str | None = None
        """The reason why the kubelet may have other resources."""
        self.reports: dict[str, list[Inventory | str]] = {}
        self.devices = HostDeviceNodes(root=directory.parent / "dev")
        self.entries = plugins_of(thing=ANY)
        self.plugins: DevicePlugins

    def replaced(self, endpoint, inventory) -> None:
        self.reports.setdefault(endpoint, []).append(inventory)

    def reported(self, endpoint, report) -> None:
        raise AssertionError("health comes with the devices")

    def stopped(self, endpoint, reason) -> None:
        self.reports.setdefault(endpoint, []).append(reason)

    async def resources(self) -> DeviceManagerResources:
        if isinstance(self.kubelet, Exception):
            raise self.kubelet
        return DeviceManagerResources(resources=self.kubelet, unknown=self.unknown)

    def health(self, resource: str = THING) -> dict[str, str]:
        """Devices as they were last reported; none while the endpoint is stopped."""
        last = self.reports.get(resource, [""])[-1]
        if isinstance(last, str):
            return {}
        return {d.name: d.health.status for d in last.devices if d.health is not None}

    def stops(self, resource: str = THING) -> list[str]:
        return [each for each in self.reports.get(resource, []) if isinstance(each, str)]

    def reasons(self) -> list[str]:
        return [diagnostic.reason for diagnostic in self.diagnostics]

    async def until_listed(self, *names: str, resource: str = THING) -> None:
        await until(lambda: set(self.health(resource)) == set(names))

    async def until_stopped(self, resource: str = THING) -> str:
        await until(lambda: isinstance(self.reports.get(resource, [None])[-1], str))
        return self.stops(resource)[-1]

    async def prepare(self, *names: str, request: str = "main", **options: str) -> list[Edits]:
        """Prepare a claim with devices of one request."""
        devices = [device(name, request=request, **options) for name in names]
        return await self.prepare_devices(devices)

    async def prepare_devices(self, devices: Sequence[AllocatedDevice]) -> list[Edits]:
        """Prepare a claim."""
        return [each.edits for each in await call(self.plugins.prepare, CLAIM, devices)]

    async def unprepare_devices(self, devices: Sequence[AllocatedDevice]) -> None:
        """Unprepare a claim."""
        await call(self.plugins.unprepare, CLAIM, devices)

    def source(self) -> DevicePluginsSource:
        return DevicePluginsSource(
            DRIVER,
            self.directory.parent,
            where="config",
            kubelet_resources=self.resources,
            plugins=self.entries,
            devices=self.devices,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        context = HostContext(listener=self, node=NODE, report=self.diagnostics.append)
        self.plugins = self.source().endpoint(context)
        await self.plugins.start()
        task = asyncio.create_task(self.plugins.run())
        try:
            for entry in self.entries:
                await until((self.directory.parent / entry / "kubelet.sock").exists)
            yield self
        finally:
            task.cancel()
            await asyncio.wait({task})
            await self.plugins.close()
        assert task.cancelled(), task.exception()


def device(name: str, *, pool: str = "thing.vendor.example", request: str = "main", **options):
    return AllocatedDevice(name=name, pool=f"{NODE}/{pool}", request=request, **options)


@pytest.fixture
def short_delays(monkeypatch) -> None:
    """Shorten all times to a fiftieth."""
    monkeypatch.setattr(lifecycle, "RECONNECT_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(plugin_registration, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(plugin_connection, "REPLACE_SECONDS", 0.02)
    monkeypatch.setattr(plugins, "SETTLE_SECONDS", 0.02)


@pytest.fixture
def directory() -> Iterator[Path]:
    """The directory of the entry ``thing``, with a path that is short enough for sockets."""
    parent = Path(tempfile.mkdtemp(prefix="dp", dir="/tmp"))
    (parent / "thing").mkdir()
    yield parent / "thing"
    shutil.rmtree(parent)


@pytest.fixture
async def world(directory, short_delays) -> AsyncIterator[World]:
    async with World(directory).running() as world:
        yield world
