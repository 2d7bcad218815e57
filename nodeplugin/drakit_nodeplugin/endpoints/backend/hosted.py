"""
A backend's driver as the host sees it: known by name, whether its backend is there or not.

Its endpoint is connected whenever its socket is there. :mod:`.directory` knows that socket,
:mod:`.connection` is one life of the backend, and :mod:`drakit_nodeplugin.endpoints.endpoint` owns
the rest.

It must not know claims beyond their identity, slices or the kubelet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress

from drakit.driver import DriverError
from drakit.rate_limiter import RateLimiter
from drakit_nodeplugin.endpoints.backend.channel import BackendChannel, shown
from drakit_nodeplugin.endpoints.backend.connection import BackendConnection
from drakit_nodeplugin.endpoints.backend.directory import BackendDirectory, BackendSocket
from drakit_nodeplugin.endpoints.contract import ConnectionEndedError
from drakit_nodeplugin.endpoints.endpoint import Endpoint, HostedEndpoint, Surroundings
from drakit_nodeplugin.endpoints.traits import DriverTraits, Granularity

__all__ = ("BackendEndpoint", "BackendSource")

LIST_SECONDS = 2.0
"""How long the daemon's start waits for a backend to report its name, and as long for its devices;
then the daemon serves without it."""

EARLY_AT_ONCE = 5
EARLY_AGAIN_SECONDS = 60.0
"""A new socket is a new backend, which is connected at once: this often in a short time, and once
more after each such period. A backend that crashes faster waits like any other endpoint."""

TRAITS = DriverTraits(
    side_effects=True,
    checks=True,
    health=True,
    prepare_granularity=Granularity.BATCH,
    unprepare_granularity=Granularity.BATCH,
)
"""The same for all backends, because they must be known without a backend. A method that a backend
does not implement costs one call for each connection."""


class BackendSource:
    """The driver of a backend: a :class:`.DriverSource`."""

    foreign = True

    def __init__(self, driver: str, directory: BackendDirectory) -> None:
        """Its backend registers in `directory`."""
        self._driver = driver
        self._directory = directory

    @property
    def name(self) -> str:
        """The driver's name."""
        return self._driver

    @property
    def where(self) -> str:
        """The name of the driver in errors."""
        return f"backend {self._driver}"

    @property
    def traits(self) -> DriverTraits:
        """Which calls it needs."""
        return TRAITS

    @property
    def expected(self) -> Collection[str]:
        """Its endpoint, which has its name."""
        return (self._driver,)

    def endpoint(self, surroundings: Surroundings) -> HostedEndpoint:
        """Make its endpoint."""
        return BackendEndpoint(self._driver, self._directory, surroundings)


class BackendEndpoint(Endpoint):
    """Keeps one backend connected, and calls it."""

    def __init__(
        self, driver: str, directory: BackendDirectory, surroundings: Surroundings
    ) -> None:
        super().__init__(
            driver,
            self._connect,
            traits=TRAITS,
            listener=surroundings.listener,
            node=surroundings.node,
            pause=self._pause,
        )
        self._directory = directory
        self._rights = directory.rights(driver)
        self._socket: BackendSocket | None = None
        """The socket of the last connection."""
        self._early = RateLimiter(burst=EARLY_AT_ONCE, per_second=1 / EARLY_AGAIN_SECONDS)
        self._is_running = False

    async def start(self) -> None:
        """Connect if its backend is there; otherwise :meth:`run` waits for it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LIST_SECONDS):
                await self._directory.at_start(self.name)
        # Without a backend nothing is reported: its devices stay published for the start grace.
        with suppress(DriverError, TimeoutError):
            async with asyncio.timeout(2 * LIST_SECONDS):
                await super().start()

    async def run(self) -> None:
        """As :meth:`.Endpoint.run`."""
        self._is_running = True
        await super().run()

    async def _connect(self) -> BackendConnection:
        socket = self._directory.socket(self.name)
        if socket is None and not self._is_running:
            raise DriverError(
                f"there is no backend of this name at {shown(self._directory.path)} yet"
            )
        socket = self._socket = await self._directory.wait(self.name)
        connection = BackendConnection(self.name, BackendChannel(socket.path), rights=self._rights)
        try:
            await connection.start(node=self._directory.node, version=self._directory.version)
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
