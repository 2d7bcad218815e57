"""A driver whose devices and calls the test controls, and its listener."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from drakit import AllocatedDevice, ClaimReference, Device, Driver, Edits, PreparedDevice
from drakit.device import Inventory
from drakit.driver import DriverConfig
from drakit_driver.runtime.contract import traits_of
from drakit_driver.runtime.endpoint import Endpoint
from drakit_driver.runtime.thread import PythonConnector
from tests.fakes.direct import call
from tests.fakes.node import StaticNode

NODE = "node-1"
CLAIM = ClaimReference(namespace="lab", name="cam", uid="uid-a")
DEVICE = AllocatedDevice(name="cam-0", pool=NODE, request="main")
OTHER = AllocatedDevice(name="cam-1", pool=NODE, request="main")
PREPARED = PreparedDevice(edits=Edits(env={"CAMERA": "0"}))
"""The result of the camera."""


class Behaviour:
    def __init__(self) -> None:
        self.made = 0
        self.closed = 0
        self.end = threading.Event()
        self.failure: BaseException | None = None
        self.refuse: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.devices: Callable[[Driver], AsyncIterator] = self._devices
        self.prepare: Callable = self._prepare
        self.unprepare: Callable = lambda: None
        self.check: Callable = lambda: True

    async def _devices(self, driver):
        self.thread = threading.current_thread()
        yield [Device(name="cam-0")]
        while not self.end.is_set():
            await asyncio.sleep(0.01)
        if self.failure is not None:
            raise self.failure

    async def _prepare(self) -> Edits:
        return Edits(env={"CAMERA": "0"})


class Camera(Driver[DriverConfig]):
    name = "camera.example.com"

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(DriverConfig(), StaticNode(name=NODE))
        self.behaviour = behaviour
        behaviour.made += 1
        if behaviour.refuse is not None:
            raise behaviour.refuse

    def devices(self):
        return self.behaviour.devices(self)

    def prepare(self, claim, device):
        return self.behaviour.prepare()

    def unprepare(self, claim, device):
        return self.behaviour.unprepare()

    def check(self, claim, device):
        return self.behaviour.check()

    def close(self):
        self.behaviour.closed += 1


class Listener:
    """The notifications of an endpoint, in order."""

    def __init__(self, endpoint: str = Camera.name) -> None:
        self.endpoint = endpoint
        self.told: list[Any] = []
        self.news = asyncio.Event()
        self._heard = 0

    def _tell(self, endpoint: str, what: object) -> None:
        assert endpoint == self.endpoint
        self.told.append(what)
        self.news.set()

    replaced = reported = stopped = _tell

    async def hear(self) -> Any:
        """Wait for the next notification."""
        async with asyncio.timeout(20):
            while len(self.told) == self._heard:
                self.news.clear()
                await self.news.wait()
        self._heard += 1
        return self.told[self._heard - 1]

    @property
    def reasons(self) -> list[str]:
        return [what for what in self.told if isinstance(what, str)]

    @property
    def inventories(self) -> list[list[str]]:
        return [[device.name for device in i.devices] for i in self.told if is_inventory(i)]


def is_inventory(what: object) -> bool:
    return isinstance(what, Inventory)


class OneByOne(Endpoint):
    """An endpoint that is called for one claim at a time."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        for operation in ("prepare", "unprepare", "check"):
            setattr(self, operation, partial(call, getattr(self, operation)))


def listing(*inventories: object) -> Callable[[Driver], AsyncIterator]:
    """The devices of a driver that lists these, and nothing more."""

    async def devices(driver):
        for inventory in inventories:
            yield inventory
        await asyncio.Event().wait()

    return devices


def new_endpoint(make: Callable[[], Driver], listener: Listener, kind=Camera) -> OneByOne:
    traits = traits_of(kind)
    connect = PythonConnector(Camera.name, make, traits).connect
    return OneByOne(Camera.name, connect, traits=traits, listener=listener, node=NODE)


@asynccontextmanager
async def running(endpoint: OneByOne) -> AsyncIterator[OneByOne]:
    """Start an endpoint, and run it in the background."""
    await endpoint.start()
    task = asyncio.create_task(endpoint.run())
    try:
        yield endpoint
    finally:
        task.cancel()
        await asyncio.wait({task})
        await endpoint.close()
    assert task.cancelled(), task.exception()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)
