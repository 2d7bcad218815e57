"""
An endpoint that is a Python driver: a vendor's class in a thread and event loop of its own.

Vendor code never runs in the loop that answers the kubelet: a driver that blocks, raises, or ends
its thread hurts only its own calls. What a thread cannot contain (crashes, code that holds the GIL)
needs a process of its own. One life of a driver is :mod:`.connection`, that there is another one
after it :mod:`drakit_nodeplugin.endpoints.lifecycle`, and what is called how
:mod:`drakit_nodeplugin.endpoints.calls`. What devices mean is the device manager's business.

It must not know claims beyond their identity, slices, gRPC or the kubelet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from drakit import tasks
from drakit.device import AllocatedDevice, ClaimReference, Edits
from drakit_nodeplugin.endpoints.calls import DriverCalls
from drakit_nodeplugin.endpoints.endpoint import EndpointListener, WorkKey
from drakit_nodeplugin.endpoints.errors import EndpointStoppedError
from drakit_nodeplugin.endpoints.lifecycle import Lifecycle
from drakit_nodeplugin.endpoints.python.bridge import BridgeClosedError
from drakit_nodeplugin.endpoints.python.connection import AnyDriver, DriverThread
from drakit_nodeplugin.endpoints.python.watchdog import Watchdog, Watched
from drakit_nodeplugin.endpoints.traits import DriverTraits

__all__ = ("PythonEndpoint",)

logger = logging.getLogger(__name__)

START_SECONDS = 10.0
"""How long making a driver may take before the daemon goes on without it."""

LIST_SECONDS = 2.0
"""How long a driver that was made may take to list its devices, before the daemon starts to serve
without it: the kubelet may be waiting for a claim, and would only have to ask again."""


class PythonEndpoint:
    """
    Runs one driver, again and again, and calls it.

    Calls run concurrently, but calls that have a device or a counter set in common run one after
    the other, in the order in which they were made. A call that was cancelled or timed out counts
    until it has ended.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], AnyDriver],
        *,
        traits: DriverTraits,
        listener: EndpointListener,
        node: str,
    ) -> None:
        """`make` is called in the driver's thread, for each of its lives."""
        self.name = name
        self.traits = traits
        self._make = make
        self._thread: DriverThread | None = None
        self._lifecycle = Lifecycle(name, self._connect, listener=listener)
        self._watchdog = Watchdog(name, self._watched)
        self._calls = DriverCalls(name, traits=traits, node=node, caller=self, edits=self._edits)

    async def start(self) -> None:
        """
        Start the driver once, before anything is served.

        Raises :class:`DriverError` if the driver refuses its configuration. Any other failure
        is treated as a stop, and :meth:`run` starts it again; a driver that is only slow is
        taken when it is ready.
        """
        await self._lifecycle.start()

    async def run(self) -> None:
        """Keep the driver running until cancelled, and tell the listener what it has."""
        await tasks.run(
            {
                f"{self.name} life cycle": self._lifecycle.run,
                f"{self.name} watchdog": self._watchdog.run,
            }
        )

    async def close(self) -> None:
        """Stop the driver; what is prepared stays prepared."""
        connection = self._lifecycle.connection
        await self._lifecycle.close()
        if self._thread is not None and self._thread is not connection:
            await self._thread.close()  # one that was only being started, or has not ended yet

    async def _connect(self) -> DriverThread:
        if self._thread is not None:
            # Two lives of a driver never overlap: it may still hold what the next one needs.
            await self._thread.gone()
        polls = self.traits.polls_health
        thread = self._thread = DriverThread(self.name, self._make, polls_health=polls)
        try:
            await thread.start(timeout_seconds=START_SECONDS)
        except TimeoutError:
            # Nothing can end its thread. Another beside it would hang as well, and a driver that
            # takes longer than this would never be there.
            facts = {"driver": self.name, "where": thread.where()}
            logger.error("driver is slow to start", extra=facts)
        else:
            await thread.listed(timeout_seconds=LIST_SECONDS)
        return thread

    # ------------------------------------------------------------ how it is

    def away(self) -> EndpointStoppedError | None:
        """Say what a call would raise because the driver is stopped; None if it can be called."""
        reason = self._lifecycle.unavailable
        return None if reason is None else EndpointStoppedError(driver=self.name, reason=reason)

    @property
    def blocked(self) -> str | None:
        """What the driver's event loop is blocked in; None while it answers."""
        return self._watchdog.blocked

    def _edits(self, pool: str, name: str) -> Edits | None:
        """Called in the driver's thread, and two of these never live at the same time."""
        return None if self._thread is None else self._thread.edits(pool, name)

    def _watched(self) -> Watched | None:
        connection = self._lifecycle.connection
        return None if connection is None else connection.watched

    # ------------------------------------------------------------ calls

    async def call(
        self,
        function: Callable[[AnyDriver], Any],
        *,
        what: str,
        keys: Collection[WorkKey],
        timeout_seconds: float,
    ) -> Any:
        """Call the driver as :meth:`.Bridge.call` does."""
        connection, away = self._lifecycle.connection, self._lifecycle.unavailable
        if connection is None or away is not None:
            raise BridgeClosedError(away or "it is not started")
        return await connection.call(
            function, what=what, keys=keys, timeout_seconds=timeout_seconds
        )

    def busy(self, keys: Collection[WorkKey]) -> bool:
        """Tell whether a call of these devices has not ended; False while the driver is away."""
        connection, away = self._lifecycle.connection, self._lifecycle.unavailable
        return connection is not None and away is None and connection.busy(keys)

    async def prepare(
        self, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> Sequence[Edits]:
        """Call the driver; raises DeviceFailedError and EndpointStoppedError, and nothing else."""
        return await self._calls.prepare(claim, devices)

    async def unprepare(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> None:
        """Call the driver; raises DeviceFailedError and EndpointStoppedError, and nothing else."""
        await self._calls.unprepare(claim, devices)

    async def check(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> bool:
        """Call the driver; raises EndpointStoppedError, and nothing else."""
        return await self._calls.check(claim, devices)
