"""A manager with its own store, wall clock and sources, and short forms of its reports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from typing import Any

import pytest

from drakit import Device, Health
from drakit.device import Inventory
from drakit_driver.runtime.contract import DeviceKey, HealthReport
from drakit_nodeplugin.config import DeviceHealthSettings, Devices
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.devices.model import Publication, PublishedTaints
from drakit_nodeplugin.state.records import StoredEndpoint
from tests.fakes.tasks import running

NODE = "node-1"
DRIVER = "camera.example.com"

SETTINGS = Devices(
    endpoint_stop_grace_period=300.0,
    start_grace_period=30.0,
    gone_eviction_delay=10.0,
    health=DeviceHealthSettings(recovery_period=30.0, eviction_delay=10.0, timeout=30.0),
)


class FakeStore:
    """A store that survives a plugin."""

    def __init__(self) -> None:
        self.rows: dict[str, StoredEndpoint] = {}
        self.writes = 0
        self.error: Exception | None = None
        self.used: dict[str, set[str]] = {}
        """Devices that claims hold, by pool."""

    def _use(self) -> None:
        if self.error is not None:
            raise self.error

    async def devices_in_use(self) -> Mapping[str, frozenset[str]]:
        self._use()
        return {pool: frozenset(names) for pool, names in self.used.items()}

    async def endpoints(self) -> list[StoredEndpoint]:
        self._use()
        return list(self.rows.values())

    async def write_endpoints(self, endpoints: Collection[StoredEndpoint]) -> None:
        self._use()
        self.writes += 1
        self.rows |= {endpoint.name: endpoint for endpoint in endpoints}

    async def forget_endpoints(self, names: Collection[str]) -> None:
        self._use()
        self.writes += 1
        for name in names:
            self.rows.pop(name, None)


class Node:
    """A node on which plugins start and end. Wall time advances with the loop's time."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.ready = True
        """Whether the sources of a plugin are ready when it starts."""
        self.rejected: list[Mapping[str, str]] = []
        self.epoch = 1_700_000_000.0

    def wall_clock(self) -> float:
        return self.epoch + asyncio.get_running_loop().time()

    def manager(self, *endpoints: str, **changes: Any) -> DeviceManager:
        arguments: dict[str, Any] = {
            "node": NODE,
            "endpoints": endpoints or (DRIVER,),
            "settings": SETTINGS,
            "store": self.store,
            "reports_health": True,
            "on_rejected": self.rejected.append,
            "wall_clock": self.wall_clock,
        }
        manager = DeviceManager(DRIVER, **(arguments | changes))
        if self.ready:
            manager.set_sources_ready()
        return manager

    @contextlib.asynccontextmanager
    async def plugin(self, *endpoints: str, **changes: Any) -> AsyncIterator[DeviceManager]:
        """One run of a plugin."""
        manager = self.manager(*endpoints, **changes)
        await manager.restore()
        async with running(manager.run()):
            yield manager


@pytest.fixture
def node() -> Node:
    return Node()


def cameras(*names: str, pool: str = "", health: Health | None = None) -> list[Device]:
    return [Device(name=name, pool=pool, health=health) for name in names]


def inventory(*names: str, **fields: Any) -> Inventory:
    return Inventory(devices=cameras(*names, **fields))


def report(**words: Health) -> HealthReport:
    return HealthReport(devices={DeviceKey("", name): word for name, word in words.items()})


def shown(publication: Publication) -> Mapping[str, Mapping[str, Collection[str]]]:
    """Return taints by pool and device, in short: ``stopped`` is drakit.dev/stopped with
    NoSchedule."""
    return {
        name: {device.name: taint_words(device.taints) for device in pool.devices}
        for name, pool in publication.pools.items()
    }


def taint_words(taints: Iterable[Any]) -> list[str]:
    return [
        taint.key.removeprefix("drakit.dev/")
        + ("" if taint.effect == "NoSchedule" else f":{taint.effect}")
        for taint in taints
    ]


def published(*words: str, at: int | None = None) -> PublishedTaints:
    """Return published taints with a time, from the words of `taint_words`."""
    pairs = [word.partition(":") for word in words]
    return {
        (key if "/" in key else f"drakit.dev/{key}", effect or "NoSchedule"): at
        for key, _, effect in pairs
    }


async def pass_time(seconds: float) -> None:
    """Advance the time, and process everything that is due."""
    await asyncio.sleep(seconds)
    for _ in range(10):
        await asyncio.sleep(0)
