"""
The homes of a driver: a class in the node plugin, the same class behind ``drakit-driver``, and a
driver of the Go module. In each, it does what a test says. What comes out is what the node plugin's
endpoint reports and answers, as a slice, a pod or a caller sees it.

All imports of the product are here, in :mod:`.cases` and in the fixtures.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

from pydantic import Field

from drakit import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimReference,
    Device,
    DeviceParameters,
    Driver,
    DriverConfig,
    DriverError,
    Edits,
    Health,
    Inventory,
    PreparedDevice,
)
from drakit.driver import ReleasePendingError
from drakit_driver import messages
from drakit_driver.runtime.backend import message_of, value_of
from drakit_driver.runtime.contract import DeviceKey, EndpointContext, HealthReport
from drakit_driver.runtime.snapshot import is_unchanged
from drakit_formats.resource.inventory import check_inventory
from drakit_nodeplugin.config import DeviceHealthSettings
from drakit_nodeplugin.devices.endpoint_state import EndpointState, GracePeriods
from drakit_nodeplugin.devices.pool_state import DriverState
from drakit_proto.backend.v1 import backend_pb2 as pb
from tests.unit.driverprocess.conftest import loaded, serving
from tests.unit.endpoints.backend.conftest import Found, Listener, new_endpoint
from tests.unit.endpoints.camera import NODE, running

DRIVER = "gpu.example.com"
PLUGIN, PROCESS, GO = "plugin", "drakit-driver", "go"
HOMES = (PLUGIN, PROCESS, GO)


@dataclass(frozen=True, kw_only=True)
class Does:
    """The actions of the driver in a call for one device. By default, it returns an edit."""

    result: Any = None
    """An Edits or PreparedDevice, or something else that no driver should return."""
    error: str | None = None
    bug: bool = False
    pending: bool = False
    waits: bool = False
    """Whether the work continues until :meth:`Home.let`, even if the call is canceled."""
    checks: bool = True

    def raised(self) -> None:
        if self.bug:
            raise KeyError("a bug")
        if self.error is not None:
            raise (ReleasePendingError if self.pending else DriverError)(self.error)


class At(DeviceParameters):
    x: int = 0


class Room(DeviceParameters):
    name: str = ""


class Parameters(DeviceParameters):
    """The Go driver has the same."""

    color: str = "white"
    watts: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 5
    at: At = At()
    rooms: tuple[Room, ...] = ()


@dataclass
class Script:
    """The actions of a driver in Python, in any thread, and its calls."""

    listed: object = None
    health: Mapping[str, object] = field(default_factory=dict[str, object])
    failure: Exception | None = None
    does: Mapping[str, Does] = field(default_factory=dict[str, Does])
    let: threading.Event = field(default_factory=threading.Event)
    log: list[str] = field(default_factory=list[str])

    async def work(self, what: str, device: AllocatedDevice[Any]) -> Does:
        self.log.append(f"{what} {device.name}")
        does, let = self.does.get(device.name, Does()), self.let
        while does.waits and not let.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:  # hardware that cannot be interrupted
                continue
        self.log.append(f"{what} {device.name} ends")
        does.raised()
        return does


class Scripted(Driver[DriverConfig, Parameters]):
    name = DRIVER
    health_period_seconds = 0.05
    script: Script

    async def devices(self) -> AsyncIterator[Any]:
        script, last = self.script, None
        while True:
            if script.failure is not None:
                failure, script.failure = script.failure, None
                raise failure
            if script.listed is not last:
                last = script.listed
                yield last
            await asyncio.sleep(0.005)

    async def prepare(self, claim: ClaimReference, device: AllocatedDevice[Parameters]) -> Any:
        self.script.log.append("parameters " + device.parameters.model_dump_json())
        does = await self.script.work("prepare", device)
        return Edits(env={"GPU": device.name}) if does.result is None else does.result

    async def unprepare(self, claim: ClaimReference, device: AllocatedDevice[Any]) -> None:
        await self.script.work("unprepare", device)

    async def check(self, claim: ClaimReference, device: AllocatedDevice[Any]) -> bool:
        return (await self.script.work("check", device)).checks

    def health(self, device: Device) -> Any:
        return self.script.health.get(device.name, Health.healthy())


class Home:
    """A driver in one of its homes, and the node plugin's endpoint of it."""

    kind: str

    def __init__(self, script: Script, listener: Listener) -> None:
        self.script, self.listener = script, listener
        self.endpoint: Any = None
        self.program: Path | None = None
        """The Go driver."""
        self.server: Any = None
        """The driver's process, or its server in this process. None in the node plugin."""

    @property
    def log(self) -> list[str]:
        """The calls of the driver."""
        return self.script.log

    async def list(self, inventory: object) -> None:
        self.script.listed = inventory

    async def report(self, health: Mapping[str, Any]) -> None:
        self.script.health = health

    async def fail(self, reason: str) -> None:
        self.script.failure = DriverError(reason)

    async def does(self, **devices: Does) -> None:
        self.script.does = devices

    async def let(self) -> None:
        let, self.script.let = self.script.let, threading.Event()
        let.set()

    async def stop(self) -> None:
        """Stop the process of the driver as an update does."""
        await self.server.drain()
        await self.server.stop()

    async def call(
        self, operation: str, *claims: Sequence[AllocatedDevice[Any]], first: int = 0
    ) -> list[Any]:
        """Call for claims, uid-0 and so on, and return their answers."""
        batch = [
            AllocatedClaim(claim=claim(number), devices=tuple(devices))
            for number, devices in enumerate(claims, start=first)
        ]
        answers = await getattr(self.endpoint, operation)(batch)
        return [answers[item.claim.uid] for item in batch]

    async def inventory(self, *, last: str | None = None) -> Inventory:
        """Wait for the next inventory; the one that lists or rejects `last` if that is given."""
        while True:
            heard = await self.listener.hear()
            if isinstance(heard, Inventory) and (last is None or last in names(heard)):
                return heard

    async def health(self, name: str) -> Health:
        """Wait for the next health of a device."""
        while True:
            heard = await self.listener.hear()
            if isinstance(heard, HealthReport) and DeviceKey("", name) in heard.devices:
                return heard.devices[DeviceKey("", name)]


def names(inventory: Inventory) -> set[str]:
    return {each.name for each in inventory.devices}


def claim(number: int) -> ClaimReference:
    return ClaimReference(namespace="lab", name=f"claim-{number}", uid=f"uid-{number}")


def allocated(name: str, *, pool: str = NODE, **fields: Any) -> AllocatedDevice[Any]:
    return AllocatedDevice(name=name, pool=pool, request="main", **fields)


class GoHome(Home):
    kind = GO
    process: asyncio.subprocess.Process

    def __init__(self, script: Script, listener: Listener) -> None:
        super().__init__(script, listener)
        self._taken = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    async def start(self, program: Path, socket: Path) -> None:
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            program, socket, DRIVER, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        self._reading = asyncio.create_task(self._read_log())

    async def _read_log(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            words = json.loads(line)
            if words == "ok":
                self._taken.set()
            else:
                self.script.log.append(words)

    async def stop(self) -> None:
        self.process.terminate()
        await self.process.wait()

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        if self._reading is not None:
            await self._reading

    async def _say(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self._taken.clear()
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(20):
            await self._taken.wait()

    async def list(self, inventory: object) -> None:
        assert isinstance(inventory, Inventory)
        # As they are: what cannot be sent is for the Go module to find.
        message = pb.WatchDevicesResponse(
            devices=[message_of(each, pb.Device) for each in inventory.devices],
            counter_sets=[message_of(each, pb.CounterSet) for each in inventory.counter_sets],
        )
        if inventory.fallback is not None:
            fallback = pb.Fallback(
                devices=[message_of(each, pb.Device) for each in inventory.fallback]
            )
            message.fallback.CopyFrom(fallback)
        messages.add_reports(message, inventory)
        await self._say(list=_written(message))

    async def report(self, health: Mapping[str, Any]) -> None:
        given = [messages.device_health_message(DeviceKey("", n), h) for n, h in health.items()]
        await self._say(health=_written(pb.WatchHealthResponse(devices=given)))

    async def fail(self, reason: str) -> None:
        await self._say(fail=reason)

    async def let(self) -> None:
        await self._say(let=True)

    async def does(self, **devices: Does) -> None:
        await self._say(does={name: _order(name, each) for name, each in devices.items()})


def sendable(device: Any) -> bool:
    """Return whether a driver in Go can list a device: whether a message has all of its values."""
    try:
        message = message_of(device, pb.Device)
        sent = value_of(pb.Device.FromString(message.SerializeToString()), Device)
        return is_unchanged(sent, device) and sent.edits == device.edits
    except (AttributeError, TypeError, ValueError):
        return False


def _order(name: str, does: Does) -> dict[str, Any]:
    given = Edits(env={"GPU": name}) if does.result is None else does.result
    result = PreparedDevice(edits=given) if isinstance(given, Edits) else given
    return {
        "result": _written(messages.prepared_message("", [result])),
        "error": does.error,
        "bug": does.bug,
        "pending": does.pending,
        "waits": does.waits,
        "checks": does.checks,
    }


def _written(message: Any) -> str:
    return base64.b64encode(message.SerializeToString()).decode()


@asynccontextmanager
async def at_home(
    kind: str, listed: Inventory, *, found: Found, program: Path | None
) -> AsyncIterator[Home]:
    """Run a driver in a home, which has listed this inventory."""
    listener = Listener()
    script = Script(listed=listed)
    home: Home = (GoHome if kind == GO else Home)(script, listener)
    home.kind, home.program = kind, program
    async with AsyncExitStack() as stack:
        stack.enter_context(mock.patch.object(Scripted, "script", script, create=True))
        if kind == PLUGIN:
            driver, _ = loaded(Scripted)
            context = EndpointContext(listener=listener, node=NODE)
            endpoint = driver.endpoint(context)
        else:
            await stack.enter_async_context(found.watched())
            endpoint = new_endpoint(found, listener)
            home.server = await stack.enter_async_context(instance(home, found))
        home.endpoint = await stack.enter_async_context(running(endpoint))
        await home.inventory()
        yield home
        script.let.set()


def successor(home: Home) -> Home:
    """Return the driver's next process, which has its own script only if it is a process."""
    if not isinstance(home, GoHome):
        return home
    other = GoHome(Script(listed=home.script.listed), home.listener)
    other.program = home.program
    return other


@asynccontextmanager
async def instance(home: Home, found: Found) -> AsyncIterator[Any]:
    """Run one process of a driver with a socket; a second one takes the path over."""
    socket = found.path / "driver.sock"
    if isinstance(home, GoHome):
        assert home.program is not None
        await home.start(home.program, socket)
        try:
            await home.list(home.script.listed)
            yield home.process
        finally:
            await home.end()
    else:
        async with serving(*loaded(Scripted), socket) as server:
            yield server


# ------------------------------------------------------------ what others see


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The effects of two inventories on a slice, an Event and the pods of held devices."""

    published: Mapping[str, Device]
    rejected: Mapping[str, str]
    evicted: frozenset[str]


def seen(before: Inventory, after: Inventory) -> Seen:
    state = DriverState(
        node=NODE,
        open_ended=False,
        timing=DeviceHealthSettings(),
        gone_eviction_seconds=10,
        now=time.monotonic,
        wall_clock=time.time,
    )
    endpoint = EndpointState(DRIVER, state, GracePeriods(stop_seconds=300))
    for inventory in (before, after):
        endpoint.replace(inventory, taken=())
    checked = check_inventory(after, node=NODE)
    return Seen(
        published={_place(each): each for each in checked.devices},
        rejected=endpoint.rejected,
        evicted=frozenset(
            f"{pool.name}/{name}".removeprefix(f"{NODE}/")
            for pool in endpoint.pools.values()
            for name in pool.evict_at
        ),
    )


def _place(device: Device) -> str:
    return f"{device.pool}/{device.name}" if device.pool else device.name
