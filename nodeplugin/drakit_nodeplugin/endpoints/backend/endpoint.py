"""
An endpoint that is a backend: connected whenever its socket is there, and called over it.

Which socket is its own is :mod:`.directory`'s; one life of it is :mod:`.connection`, that there is
another one after it :mod:`drakit_nodeplugin.endpoints.lifecycle`, and what is called how
:mod:`drakit_nodeplugin.endpoints.calls`.

It must not know claims beyond their identity, slices or the kubelet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from drakit.device import AllocatedClaim, AllocatedDevice, ClaimReference, Edits
from drakit.driver import DriverError
from drakit.rate_limiter import RateLimiter
from drakit.resource.pools import short_pool
from drakit_nodeplugin.endpoints.allowlist import Rights
from drakit_nodeplugin.endpoints.backend.channel import BackendChannel, shown
from drakit_nodeplugin.endpoints.backend.claimcalls import BackendClaims
from drakit_nodeplugin.endpoints.backend.connection import BackendConnection
from drakit_nodeplugin.endpoints.backend.directory import BackendDirectory, BackendSocket
from drakit_nodeplugin.endpoints.calls import CALL_SECONDS, DriverCalls
from drakit_nodeplugin.endpoints.endpoint import (
    ConnectionEndedError,
    Surroundings,
    WorkKey,
    work_keys,
)
from drakit_nodeplugin.endpoints.errors import DeviceFailedError, EndpointStoppedError, text_of
from drakit_nodeplugin.endpoints.lifecycle import Lifecycle
from drakit_nodeplugin.endpoints.python.bridge import BridgeClosedError
from drakit_nodeplugin.endpoints.together import Together
from drakit_nodeplugin.endpoints.traits import DriverTraits

__all__ = ("BackendEndpoint",)

logger = logging.getLogger(__name__)

LIST_SECONDS = 2.0
"""How long a backend that is there at the start may take to say who it is, and then to list its
devices, before the daemon starts to serve without it."""

EARLY_AT_ONCE = 5
EARLY_AGAIN_SECONDS = 60.0
"""A new socket is a new backend, to which one connects at once: so often in a short time, and once
more each time that this has passed. One that crashes faster has to wait as any other."""


class BackendEndpoint:
    """
    Keeps one backend connected, and calls it.

    Calls run concurrently, but calls that have a device or a counter set in common run one after
    the other, in the order in which they were made.
    """

    blocked: str | None = None
    """It runs nothing of its own that could block."""

    def __init__(
        self,
        driver: str,
        *,
        traits: DriverTraits,
        directory: BackendDirectory,
        surroundings: Surroundings,
    ) -> None:
        self.name = driver
        self.traits = traits
        self._directory = directory
        self._rights = directory.rights(driver)
        self._node = surroundings.node
        self._lifecycle = Lifecycle(
            driver, self._connect, listener=surroundings.listener, pause=self._pause
        )
        self._calls = DriverCalls(driver, traits=traits, node=self._node, caller=self)
        self._checks = Together[AllocatedClaim, bool](self._check_claims, apart=self._busy)
        self._socket: BackendSocket | None = None
        """The one that was connected to last."""
        self._early = RateLimiter(burst=EARLY_AT_ONCE, per_second=1 / EARLY_AGAIN_SECONDS)
        self._running = False

    # ------------------------------------------------------------ its life

    async def start(self) -> None:
        """Connect if its backend is there; otherwise that is waited for in :meth:`run`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LIST_SECONDS):
                await self._directory.at_start(self.name)
        # Without a backend nothing is told: what was published is its own for the start grace.
        with suppress(DriverError, TimeoutError):
            async with asyncio.timeout(2 * LIST_SECONDS):
                await self._lifecycle.start()

    async def run(self) -> None:
        """Keep it connected until cancelled, and tell the listener what it has."""
        self._running = True
        await self._lifecycle.run()

    async def close(self) -> None:
        """End the connection; what is prepared stays prepared."""
        await self._lifecycle.close()

    async def _connect(self) -> BackendConnection:
        socket = self._directory.socket(self.name)
        if socket is None and not self._running:
            raise DriverError(
                f"there is no backend of this name at {shown(self._directory.path)} yet"
            )
        socket = self._socket = await self._directory.wait(self.name)
        connection = BackendConnection(self.name, BackendChannel(socket.path))
        try:
            await connection.start(node=self._node, version=self._directory.version)
            if self._rights is not None and not await asyncio.to_thread(socket.is_in_place):
                raise ConnectionEndedError(
                    "its socket was replaced while the node plugin connected to it"
                )
            await connection.listed(timeout_seconds=LIST_SECONDS)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _pause(self, seconds: float) -> None:
        """Wait before the next connection, but not if there is a new socket."""
        if self._socket is not None:
            self._directory.lost(self._socket)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._directory.wait(self.name, other_than=self._socket)
                if not self._early.take():
                    await asyncio.sleep(seconds)

    # ------------------------------------------------------------ how it is

    def away(self) -> EndpointStoppedError | None:
        """Say what a call would raise because the backend is away; None if it can be called."""
        reason = self._lifecycle.unavailable
        return None if reason is None else EndpointStoppedError(driver=self.name, reason=reason)

    # ------------------------------------------------------------ calls

    async def call(
        self,
        function: Callable[[Any], Any],
        *,
        what: str,
        keys: Collection[WorkKey],
        timeout_seconds: float,
    ) -> Any:
        """Call the backend as :meth:`.Bridge.call` does."""
        connection, away = self._lifecycle.connection, self._lifecycle.unavailable
        if connection is None or away is not None:
            raise BridgeClosedError(away or "it is not started")
        return await connection.call(
            function, what=what, keys=keys, timeout_seconds=timeout_seconds
        )

    def busy(self, keys: Collection[WorkKey]) -> bool:
        """Tell whether a call of these devices has not ended; False while the backend is away."""
        connection, away = self._lifecycle.connection, self._lifecycle.unavailable
        return connection is not None and away is None and connection.busy(keys)

    async def prepare(
        self, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> Sequence[Edits]:
        """Call the backend; raises DeviceFailedError and EndpointStoppedError, and nothing else."""
        edits = await self._calls.prepare(claim, devices)
        if self._rights is not None:
            await asyncio.to_thread(_check_edits, edits, self._rights)
        return edits

    async def unprepare(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> None:
        """Call the backend; raises DeviceFailedError and EndpointStoppedError, and nothing else."""
        await self._calls.unprepare(claim, devices)

    async def check(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> bool:
        """Call the backend, for a claim as a whole; raises EndpointStoppedError, and nothing
        else."""
        own = [replace(device, pool=short_pool(self._node, device.pool)) for device in devices]
        return await self._checks.call(AllocatedClaim(claim=claim, devices=tuple(own)))

    async def _check_claims(self, claims: Sequence[AllocatedClaim]) -> Sequence[bool | Exception]:
        async def run(backend: BackendClaims) -> Sequence[bool]:
            answers = await backend.check_claims(claims)
            return [answers.get(item.claim.uid, False) for item in claims]

        keys = work_keys((d for item in claims for d in item.devices), node=self._node)
        try:
            return await self.call(
                run, what="check_claims", keys=keys, timeout_seconds=CALL_SECONDS
            )
        except BridgeClosedError as error:
            raise EndpointStoppedError(driver=self.name, reason=error.reason) from None
        except Exception as error:
            # One that fails to check does not know that all is well.
            facts = {"driver": self.name, "error": text_of(error)}
            logger.warning("backend cannot check claims", extra=facts)
            return [False] * len(claims)

    def _busy(self, item: AllocatedClaim) -> bool:
        return self.busy(work_keys(item.devices, node=self._node))


def _check_edits(edits: Sequence[Edits], rights: Rights) -> None:
    for index, each in enumerate(edits):
        if (problem := rights.edits_problem(each)) is not None:
            raise DeviceFailedError(f"its backend {problem}", index=index)
