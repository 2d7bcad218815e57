"""
One source of a driver's devices: connected again and again, and called for claims.

:class:`Endpoint` owns what is the same for every kind: the life cycle (:mod:`.lifecycle`), the
order of calls, their time limits and error sentences (:mod:`.batches`). A kind supplies a
:class:`.Connection`, and a function that makes the next one. Here is also what the host, the engine
and the device manager see of an endpoint.

It must not know how any kind of endpoint works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from drakit.device import AllocatedClaim, Edits
from drakit_nodeplugin.endpoints.batches import Batches
from drakit_nodeplugin.endpoints.contract import (
    Connection,
    ConnectionEndedError,
    CounterSetKey,
    DeviceKey,
    EndpointListener,
    HealthReport,
    Update,
    WorkKey,
)
from drakit_nodeplugin.endpoints.errors import EndpointStoppedError
from drakit_nodeplugin.endpoints.lifecycle import Lifecycle
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
)


class HostedEndpoint(Protocol):
    """
    One endpoint, or all endpoints of a driver that has several.

    `prepare`, `unprepare` and `check` begin the work for a batch of claims, and return one future
    for each claim UID. They return at once; calls from one turn of the event loop cost the other
    side one wake-up.

    * Claims end at different times, unless the driver takes a batch of claims as one call.
    * A future raises :class:`.DeviceFailedError` or :class:`.EndpointStoppedError`, and nothing
      else.
    * Cancelling a future gives up that claim alone. The work for its devices ends in the
      background, and the next call for these devices begins only after that. A batch that is one
      call is cancelled when all of its claims are given up.
    * Calls that have a device or a counter set in common never overlap, and run in the order in
      which they were made. Other claims of a batch do not wait for one that has to wait.
    * A call runs in the context of its caller: its log lines have the request id.
    """

    @property
    def traits(self) -> DriverTraits:
        """Which calls it needs; known while it is stopped as well."""
        ...

    @property
    def blocked(self) -> str | None:
        """What its event loop is blocked in; None while it answers, or if it has no own loop."""
        ...

    def unavailable(self) -> EndpointStoppedError | None:
        """Return why it cannot be called now; None if it can."""
        ...

    def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, asyncio.Future[Sequence[Edits]]]:
        """Make the devices of claims ready; gives the edits of each device, in their order."""
        ...

    def unprepare(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, asyncio.Future[None]]:
        """Undo it, and reset the devices if the driver wants that."""
        ...

    def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, asyncio.Future[bool]]:
        """Return whether all devices of a claim are still in order. A driver that fails to check
        does not know, which is False; a future raises EndpointStoppedError only."""
        ...

    async def start(self) -> None:
        """Connect for the first time, before anything is served; returns within seconds. Raises
        :class:`drakit.driver.DriverError` if a configuration is refused, and nothing else."""
        ...

    async def run(self) -> None:
        """Keep it connected until cancelled, and report to the listener what it has."""
        ...

    async def close(self) -> None:
        """End it; what is prepared stays prepared. Called after the end of :meth:`run`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostic:
    """Something that people should know about an endpoint: becomes a log line and an Event of the
    Node, and is counted by its reason."""

    reason: str
    """One of a closed set of words (``ResourceRefused``), as the Event has it."""

    note: str
    """A sentence that names endpoint, cause and remedy; the same cause gives the same text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What the host gives an endpoint."""

    listener: EndpointListener
    node: str
    """The node's name."""

    primary: asyncio.Event
    """Set while this process is the driver's primary one: while one instance of a driver replaces
    another, only that one has the sockets on which vendors' programs call us."""

    remark: Callable[[Diagnostic], None]
    """Reports a diagnostic; returns at once."""


class Endpoint:
    """One endpoint of any kind: a :class:`HostedEndpoint`."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[Connection]],
        *,
        traits: DriverTraits,
        listener: EndpointListener,
        node: str,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        `connect` makes the next connection. It may wait for one to appear, and raises if there is
        none now. `node` is the node's name. `pause` is called before each reconnect: it waits this
        many seconds, or less where waiting is of no use.
        """
        self.name = name
        self.traits = traits
        self._lifecycle = Lifecycle(name, connect, listener=listener, pause=pause)
        batches = Batches(name, traits=traits, node=node, reach=self._reach)
        self.prepare = batches.prepare
        self.unprepare = batches.unprepare
        self.check = batches.check

    # ------------------------------------------------------------ its life

    async def start(self) -> None:
        """As :meth:`HostedEndpoint.start`. Any failure but a refused configuration is a stop, and
        :meth:`run` tries again."""
        await self._lifecycle.start()

    async def run(self) -> None:
        """As :meth:`HostedEndpoint.run`."""
        await self._lifecycle.run()

    async def close(self) -> None:
        """As :meth:`HostedEndpoint.close`."""
        await self._lifecycle.close()

    @property
    def blocked(self) -> str | None:
        """As :attr:`HostedEndpoint.blocked`."""
        connection = self._lifecycle.connection
        return None if connection is None else connection.blocked

    def unavailable(self) -> EndpointStoppedError | None:
        """As :meth:`HostedEndpoint.unavailable`."""
        reason = self._lifecycle.unavailable
        return None if reason is None else EndpointStoppedError(driver=self.name, reason=reason)

    def _reach(self) -> Connection | EndpointStoppedError:
        connection, stopped = self._lifecycle.connection, self.unavailable()
        if stopped is not None:
            return stopped
        assert connection is not None
        return connection
