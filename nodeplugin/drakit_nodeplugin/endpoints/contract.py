"""
The contract between an endpoint and a connection, and between an endpoint and its listener.

A connection is one life of a source of devices: a Python driver in its thread, a backend behind its
socket, a device plugin. It reports devices and their health, and is called for claims. It does not
reconnect, order calls, limit their time or word their errors: :mod:`.endpoint` does that for every
kind. What devices become when an endpoint stops is the listener's decision.

It must not know how any kind of endpoint works.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from drakit.device import AllocatedClaim, Edits, Health, Inventory
from drakit_nodeplugin.endpoints.errors import DeviceFailedError

__all__ = (
    "Calls",
    "Connection",
    "ConnectionEndedError",
    "CounterSetKey",
    "DeviceKey",
    "EndpointListener",
    "HealthReport",
    "Reports",
    "Update",
    "WorkKey",
)


class ConnectionEndedError(Exception):
    """A connection has ended. The text says why, and appears in a pod's Event."""

    def __init__(self, reason: str, *, disorderly: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.disorderly = disorderly
        """The connection did harm while it lived: a long life does not reset its backoff."""


class DeviceKey(NamedTuple):
    """A device of one driver on this node."""

    pool: str
    """In the driver's words: empty for the pool that has the node's name."""
    name: str


class CounterSetKey(NamedTuple):
    """A counter set of one driver on this node: the hardware behind several devices."""

    pool: str
    """In the driver's words."""
    name: str
    kind: Literal["counter set"] = "counter set"
    """Distinguishes it from a device of the same name."""


WorkKey = DeviceKey | CounterSetKey
"""A resource of a call. Calls that have one in common never overlap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport:
    """The health of some devices; the health of all others is unchanged."""

    devices: Mapping[DeviceKey, Health]


Update = Inventory | HealthReport
"""What a connection reports: all of its devices, or the health of some."""


class EndpointListener(Protocol):
    """Follows what endpoints have; called in the daemon's loop, and returns at once."""

    def replaced(self, endpoint: str, inventory: Inventory) -> None:
        """The endpoint is available and has these devices, and no others."""
        ...

    def reported(self, endpoint: str, report: HealthReport) -> None:
        """The health of devices has changed; devices that the endpoint does not have are
        ignored."""
        ...

    def stopped(self, endpoint: str, reason: str) -> None:
        """The endpoint is unavailable; reported again if the reason changes."""
        ...


class Calls(Protocol):
    """
    Calls for claims, in the daemon's loop.

    A batch has at least one claim. Unless the driver's granularity is a batch of claims, it has
    exactly one. Pools are in the driver's words. No two calls for the same device or counter set
    run at the same time, calls for others do.

    A call answers for every claim of the batch, by UID. It may raise:

    * :class:`.DeviceFailedError`: the batch failed, with this sentence;
    * :class:`drakit.driver.DriverError`: the batch failed, and the text becomes the sentence;
    * :class:`ConnectionEndedError`: the connection ended meanwhile;
    * :class:`.CallOverdueError`: the other side did not answer within its own deadline;
    * anything else: a bug, which is logged.

    A call is cancelled when nobody waits for it any more, or after its time limit. It must then
    return or raise only after the work has really ended, because the next call for its devices
    begins at that moment.
    """

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[Edits] | DeviceFailedError]:
        """Make the devices ready; return the edits of each claim's devices, in their order."""
        ...

    async def unprepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, DeviceFailedError | None]:
        """Undo it, and reset the devices if the driver wants that; None is success."""
        ...

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool]:
        """Return whether all devices of each claim are still in order."""
        ...


class Reports(Protocol):
    """What a connection reports of itself: enough for its life cycle."""

    @property
    def unavailable(self) -> str | None:
        """Why nothing can be called now; None while calls are possible, which is never before the
        first inventory was reported."""
        ...

    def inventories(self) -> AsyncIterator[Update]:
        """
        List and watch: first an inventory, then each change of it and of health.

        The connection sets the pace, best with a :class:`.LatestValue`: of several inventories that
        were not taken in time only the last is given. It ends or raises when the connection does,
        preferably with :class:`ConnectionEndedError`; from then on `unavailable` has that reason.
        """
        ...

    async def close(self) -> None:
        """End the connection; what is prepared stays prepared. Returns within seconds, even if the
        other side hangs, and raises nothing."""
        ...


class Connection(Reports, Calls, Protocol):
    """One life of an endpoint."""

    @property
    def blocked(self) -> str | None:
        """What its event loop is blocked in; None while it answers, or if it has no own loop."""
        ...
