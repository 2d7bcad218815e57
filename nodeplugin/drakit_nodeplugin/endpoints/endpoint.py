"""
What every kind of endpoint has in common: the words between it, the manager, the engine, and who
hosts it.

An endpoint lives in connections, one after the other: each is a stream that first lists what there
is and then tells of changes, until it ends. How often it is connected again is :mod:`.lifecycle`'s.

It must not know how any kind of endpoint works.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from drakit.device import AllocatedDevice, ClaimReference, Edits, Health, Inventory
from drakit.resource.pools import short_pool
from drakit_nodeplugin.endpoints.errors import EndpointStoppedError
from drakit_nodeplugin.endpoints.traits import DriverTraits

__all__ = (
    "Connection",
    "ConnectionEndedError",
    "CounterSetKey",
    "DeviceKey",
    "Diagnostic",
    "Endpoint",
    "EndpointListener",
    "HealthReport",
    "HostedEndpoint",
    "Surroundings",
    "Update",
    "WorkKey",
    "work_keys",
)


class ConnectionEndedError(Exception):
    """A connection is over. The text says why, and ends in a pod's Event."""

    def __init__(self, reason: str, *, disorderly: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.disorderly = disorderly
        """It did harm for as long as it lived: that it lived long speaks for nothing."""


class DeviceKey(NamedTuple):
    """A device of one driver on this node."""

    pool: str
    """In the driver's words: empty for the pool that has the node's name."""
    name: str


class CounterSetKey(NamedTuple):
    """A counter set of one driver on this node: the hardware behind several devices."""

    pool: str
    """The driver's name for it."""
    name: str
    kind: Literal["counter set"] = "counter set"
    """Distinguishes it from a device of the same name."""


WorkKey = DeviceKey | CounterSetKey
"""The resources of a call. Calls that have one in common never overlap."""


def work_keys(devices: Iterable[AllocatedDevice], *, node: str) -> frozenset[WorkKey]:
    """Return the resources of a call for these devices. `node` is the name of the node."""
    keys: set[WorkKey] = set()
    for device in devices:
        pool = short_pool(node, device.pool)
        keys.add(DeviceKey(pool, device.name))
        keys.update([CounterSetKey(pool, name) for name in device.consumes])
    return frozenset(keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport:
    """How devices are, as somebody looked; those that are not named are as they were."""

    devices: Mapping[DeviceKey, Health]


Update = Inventory | HealthReport
"""What a connection tells: all that there is, or how something of it is."""


class EndpointListener(Protocol):
    """Who wants to know what an endpoint has; called in the daemon's loop, and returns at once."""

    def replaced(self, endpoint: str, inventory: Inventory) -> None:
        """The endpoint is there and has this, all of it."""
        ...

    def reported(self, endpoint: str, report: HealthReport) -> None:
        """Devices of the endpoint are like this; a device that it does not have is ignored."""
        ...

    def stopped(self, endpoint: str, reason: str) -> None:
        """The endpoint is away; said again if the reason changes."""
        ...


class Connection(Protocol):
    """One life of an endpoint."""

    @property
    def away(self) -> str | None:
        """Why nothing can be called now; None while it can, from its first inventory on."""
        ...

    def updates(self) -> AsyncIterator[Update]:
        """List and watch: an inventory first, then whatever changes. Only the last of several
        inventories that nobody has taken yet is given. It ends or raises when the endpoint does,
        best a :class:`ConnectionEndedError`."""
        ...

    async def close(self) -> None:
        """End it; returns within seconds, whatever becomes of it, and raises nothing."""
        ...


class Endpoint(Protocol):
    """The engine's view of an endpoint. Calls that have a device or a counter set in common never
    overlap."""

    @property
    def traits(self) -> DriverTraits:
        """Which calls it needs; known while it is stopped as well."""
        ...

    def away(self) -> EndpointStoppedError | None:
        """Say why it cannot be called now; None if it can."""
        ...

    async def prepare(
        self, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> Sequence[Edits]:
        """Make the devices of a claim ready; raises DeviceFailedError, EndpointStoppedError."""
        ...

    async def unprepare(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> None:
        """Undo it; raises DeviceFailedError, EndpointStoppedError."""
        ...

    async def check(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> bool:
        """Say whether all of them are still in order; raises EndpointStoppedError."""
        ...


class HostedEndpoint(Endpoint, Protocol):
    """What a hosted driver runs: one endpoint, or all endpoints of a driver that has several."""

    @property
    def blocked(self) -> str | None:
        """What its event loop is blocked in, if it has one of its own; None while it answers."""
        ...

    async def start(self) -> None:
        """Connect for the first time, before anything is served; returns within seconds. Raises
        :class:`drakit.driver.DriverError` if a configuration is refused, and nothing else."""
        ...

    async def run(self) -> None:
        """Keep it connected until cancelled, and tell the listener what it has."""
        ...

    async def close(self) -> None:
        """End it; what is prepared stays prepared. Called after the end of :meth:`run`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostic:
    """Something that people should know of an endpoint: becomes a log line and an Event of the
    Node, and is counted by its reason."""

    reason: str
    """One of a closed set of words (``ResourceRefused``), as the Event has it."""

    note: str
    """A sentence that names endpoint, cause and remedy; the same cause gives the same text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What an endpoint is given by who hosts it."""

    listener: EndpointListener
    node: str
    """The node's name."""

    primary: asyncio.Event
    """Set while this process is the driver's primary one: while one instance of a driver replaces
    another, only that one has the sockets on which vendors' programs call us."""

    remark: Callable[[Diagnostic], None]
    """Says something to people; returns at once."""
