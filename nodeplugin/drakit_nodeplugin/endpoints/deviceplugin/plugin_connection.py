"""
The device plugin of one resource: connected once it has registered, replaced when it registers
again, stopped when it is gone.

As with the kubelet, a plugin whose stream ends is unavailable until it registers, and its socket
does not matter while the stream lives. But the kubelet connects within a registration, and refuses
it if that fails. The node plugin answers the registration before it connects, and retries a plugin
that cannot be reached.

A plugin that registers while it is connected gets a second client beside the first one. Once the
second has listed its devices, it replaces the first: the same :class:`PluginConnection` continues,
and no stop is reported.

It must not know claims that span resources, other resources, or which plugins may register.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from drakit.device import AllocatedDevice, Edits
from drakit_nodeplugin.endpoints import endpoint as lifecycle
from drakit_nodeplugin.endpoints.contract import ConnectionEndedError, EndpointListener, Update
from drakit_nodeplugin.endpoints.deviceplugin.device_list import DeviceRoom
from drakit_nodeplugin.endpoints.deviceplugin.plugin_client import CONNECT_SECONDS, PluginClient
from drakit_nodeplugin.endpoints.deviceplugin.plugin_registration import Registration
from drakit_nodeplugin.endpoints.endpoint import Lifecycle
from drakit_nodeplugin.endpoints.latest_value import pause_after

__all__ = ("DevicePlugin", "PluginConnection")

logger = logging.getLogger(__name__)

LIST_SECONDS = 2.0
"""The time that a new connection has to list its devices before it is reported as unavailable."""

REPLACE_SECONDS = 1.0
"""Minimum time between two attempts to connect, however often a plugin registers."""

REPLACED_SECONDS = 5.0
"""Grace period of calls to a client that is replaced."""


class PluginConnection:
    """A connection to a device plugin, from its first client until no other one replaces it."""

    def __init__(self, plugin: DevicePlugin, client: PluginClient) -> None:
        self._plugin = plugin
        self._replacing = asyncio.create_task(self._replace())
        self.client = client
        """The client to call."""

    @property
    def unavailable(self) -> str | None:
        """The reason why calls are currently impossible; None while they are possible."""
        return self.client.unavailable

    async def inventories(self) -> AsyncIterator[Update]:
        """See :meth:`.Connection.inventories`."""
        loop = asyncio.get_running_loop()
        while True:
            client = self.client
            try:
                inventory = await client.next()
            except ConnectionEndedError:
                if client is self.client:
                    raise
                continue
            if client is self.client:
                began_at = loop.time()
                yield inventory
                # The receiver processes the last list before it requests the next one.
                client.hold(pause_after(loop.time() - began_at))

    async def close(self) -> None:
        """End the connection."""
        self._replacing.cancel()
        await asyncio.wait({self._replacing})
        await self.client.close()

    async def _replace(self) -> None:
        """Replace the client whenever the plugin registers again."""
        while True:
            registration = await self._plugin.next_registration(untried=True)
            try:
                client = await self._plugin.open(
                    registration, list_seconds=CONNECT_SECONDS, must_list=True
                )
            except ConnectionEndedError as error:
                # It is tried again once the present client has ended.
                facts = {"endpoint": registration.resource, "error": error.reason}
                logger.warning("device plugin registered again and is unreachable", extra=facts)
            else:
                replaced, self.client = self.client, client
                self._plugin.retire(replaced)
            await asyncio.sleep(REPLACE_SECONDS)


class DevicePlugin:
    """The device plugin of one resource, connected or not."""

    def __init__(
        self,
        resource: str,
        *,
        listener: EndpointListener,
        room: DeviceRoom,
        new_client: Callable[[Registration], PluginClient],
    ) -> None:
        self.resource = resource
        self._room = room
        self._new_client = new_client
        self._changed = asyncio.Event()
        """Whether there may be another registration to connect to."""
        self._registration: Registration | None = None
        """The last registration; None before the first one."""
        self._barred: str | None = None
        self._opening: PluginClient | None = None
        """A client that is being connected; there are never two."""
        self._connection: PluginConnection | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._lifecycle = Lifecycle(resource, self._connect, listener=listener, pause=self._pause)

    # ------------------------------------------------------------ registrations

    def register(self, registration: Registration) -> None:
        """Use a new registration; only the last one is valid."""
        self._registration = registration
        opening = self._opening
        if opening is not None and opening.registration.socket != registration.socket:
            opening.end(ConnectionEndedError("it registered again"))
        self._changed.set()

    def bar(self, reason: str) -> None:
        """Prevent its use, for this reason, until `unbar`; its registration is kept."""
        self._barred = reason
        self._end(reason)

    def unbar(self) -> None:
        """Allow its use again, by its last registration."""
        if self._barred is None:
            return
        self._barred = None
        if self._registration is not None:
            self._registration.tried = self._registration.used = False
        self._changed.set()

    def _end(self, reason: str) -> None:
        error = ConnectionEndedError(reason)
        if self._connection is not None:
            self._connection.client.end(error)
        if self._opening is not None:
            self._opening.end(error)

    def _wanted(self, *, untried: bool = False) -> Registration | None:
        """Return the registration to connect to; None if there is none now."""
        wanted = self._registration
        if wanted is None or wanted.used or self._barred is not None:
            return None
        return None if untried and wanted.tried else wanted

    async def next_registration(self, *, untried: bool = False) -> Registration:
        """Wait for a registration to connect to, if `untried` for one that was not tried yet."""
        # There is one waiter at a time: the life cycle while there is no connection, and then the
        # connection.
        while (wanted := self._wanted(untried=untried)) is None:
            self._changed.clear()
            await self._changed.wait()
        return wanted

    # ------------------------------------------------------------ state

    @property
    def barred(self) -> str | None:
        """The reason why it must not be used; None if it may be used."""
        return self._barred

    @property
    def unavailable(self) -> str | None:
        """The reason why it cannot be called now; None if it can."""
        if self._barred is not None:
            return self._barred
        reason = self._lifecycle.unavailable
        if reason is not None and self._connection is None and self._wanted() is None:
            return f"{reason}, and it has not registered since"
        return reason

    async def allocate(self, devices: Sequence[AllocatedDevice]) -> Edits:
        """Allocate the devices of one request, unless it is unavailable. Raises
        :class:`.DeviceFailedError`."""
        assert self._connection is not None
        return await self._connection.client.allocate(devices)

    # ------------------------------------------------------------ life cycle

    async def run(self) -> None:
        """Keep it connected until canceled."""
        await self._lifecycle.start()
        await self._lifecycle.run()

    async def close(self) -> None:
        """End it; called after the end of :meth:`run`."""
        await self._lifecycle.close()
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        """Wait before the next connection. The first time after a long life there is no pause,
        because the plugin must register first. A new registration shortens the pause."""
        if seconds <= lifecycle.RECONNECT_SECONDS[0]:
            return
        shortest = min(seconds, REPLACE_SECONDS)
        await asyncio.sleep(shortest)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds - shortest):
                await self.next_registration(untried=True)

    async def _connect(self) -> PluginConnection:
        """Wait for a registration, and connect."""
        self._connection = None
        self._room.release(self.resource)
        while True:
            registration = await self.next_registration()
            try:
                client = await self.open(registration, list_seconds=LIST_SECONDS)
            except ConnectionEndedError:
                if self._wanted(untried=True) is None:
                    raise
                await asyncio.sleep(REPLACE_SECONDS)  # it has registered again meanwhile
            else:
                self._connection = PluginConnection(self, client)
                return self._connection

    async def open(
        self, registration: Registration, *, list_seconds: float, must_list: bool = False
    ) -> PluginClient:
        """Connect, and wait this long for the list of devices. Raises
        :class:`ConnectionEndedError`, if `must_list` also without a list."""
        registration.tried = True
        self._opening = client = self._new_client(registration)
        is_open = False
        try:
            await client.open()
            if not await client.read_first(seconds=list_seconds) and must_list:
                raise ConnectionEndedError("it does not list its devices")
            is_open = registration.used = True
        except ConnectionEndedError:
            raise
        except Exception as error:  # an unexpected error of gRPC
            logger.exception("device plugin cannot be reached", extra={"endpoint": self.resource})
            reason = f"it cannot be reached ({type(error).__name__})"
            raise ConnectionEndedError(reason) from error
        finally:
            self._opening = None
            if not is_open:
                await client.close()
        return client

    def retire(self, client: PluginClient) -> None:
        """Close a client that was replaced; its calls have a grace period."""
        client.end(ConnectionEndedError("it registered again"))
        task = asyncio.create_task(client.close(grace_seconds=REPLACED_SECONDS))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
