"""
The device plugin of one resource: connected once it has registered, replaced when it does so again,
stopped when it is gone.

As with the kubelet, nothing is tried again without a registration: a plugin whose stream ends, or
whose socket is removed or made anew, is away until it registers. One that registers while it is
still there is connected anew beside the old connection, which goes when the new one has listed its
devices; nothing is told of a stop then.

It must not know claims, other resources, or who may register.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

from drakit.device import Inventory
from drakit_nodeplugin.endpoints import lifecycle
from drakit_nodeplugin.endpoints.deviceplugin.connection import (
    CONNECT_SECONDS,
    LIST_SECONDS,
    PluginConnection,
    Registration,
    SocketIdentity,
)
from drakit_nodeplugin.endpoints.deviceplugin.remarks import Remarks
from drakit_nodeplugin.endpoints.endpoint import (
    ConnectionEndedError,
    EndpointListener,
    Update,
)
from drakit_nodeplugin.endpoints.errors import EndpointStoppedError
from drakit_nodeplugin.endpoints.lifecycle import Lifecycle

__all__ = ("DevicePluginEndpoint", "PluginAwayError")

logger = logging.getLogger(__name__)

REPLACE_SECONDS = 1.0
"""From one replacement of a connection to the next, however often a plugin registers."""

REPLACED_SECONDS = 5.0
"""How long calls of a connection that another one replaces may take to end."""


class PluginAwayError(EndpointStoppedError):
    """The device plugin of a resource is away."""

    def __init__(self, *, driver: str, resource: str, reason: str) -> None:
        super().__init__(driver=driver, reason=reason)
        self.args = (
            f"the device plugin of {resource} is away: {reason}; see to its pod on this node; once "
            f"it has registered with the node plugin, this pod is tried again by itself",
        )


class _Presence:
    """The connections of a plugin that replaced each other without a stop: one for who listens."""

    def __init__(self, first: PluginConnection) -> None:
        self.current = first
        self.over = False
        """Whether its end was noticed: what comes after it is another presence."""

    @property
    def away(self) -> str | None:
        return self.current.away

    async def updates(self) -> AsyncIterator[Update]:
        try:
            while True:
                yield await self._next()
        finally:
            self.over = True

    async def _next(self) -> Inventory:
        while True:
            connection = self.current
            try:
                inventory = await connection.next()
            except ConnectionEndedError:
                if connection is self.current:
                    raise
                continue
            if connection is self.current:
                return inventory

    async def close(self) -> None:
        self.over = True
        await self.current.close()


class DevicePluginEndpoint:
    """Keeps the device plugin of one resource, and calls it."""

    def __init__(
        self,
        resource: str,
        *,
        listener: EndpointListener,
        remarks: Remarks,
    ) -> None:
        self.resource = resource
        self._remarks = remarks
        self._news = asyncio.Event()
        self._pending: Registration | None = None
        self._last: Registration | None = None
        """What it has registered last."""
        self._used: Registration | None = None
        """What was connected to last, with or without success."""
        self._barred: str | None = None
        self._waiting = False
        """Whether it is away until it registers."""
        self._replacing = False
        self._presence: _Presence | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._lifecycle = Lifecycle(resource, self._connect, listener=listener, pause=self._pause)

    # ------------------------------------------------------------ what others say

    def register(self, registration: Registration) -> None:
        """It has registered; of several registrations that wait the last one counts."""
        self._pending = self._last = registration
        self._news.set()

    def forget(self, reason: str) -> None:
        """Its registration holds no more; it is away for this reason until it registers anew."""
        self._pending = self._last = self._used = None
        self._end(reason)

    def bar(self, reason: str) -> None:
        """It may not be used, for this reason, until `unbar`; its registration is kept."""
        self._barred = reason
        self._end(reason)

    def unbar(self) -> None:
        """It may be used again, as it has registered before."""
        self._barred = None
        if self._last is not None:
            self.register(self._last)

    def look(self, sockets: Mapping[str, SocketIdentity], *, began_at: float) -> None:
        """Compare its socket with what is in the directory; the look began at this loop time."""
        presence = self._presence
        if presence is None or presence.over or self._replacing or self._pending is not None:
            return
        connection = presence.current
        found = sockets.get(connection.registration.socket.name)
        if connection.opened_at < began_at and found != connection.identity:
            how = "removed" if found is None else "made anew"
            connection.end(ConnectionEndedError(f"its socket was {how}"))

    def _end(self, reason: str) -> None:
        if self._presence is not None:
            self._presence.current.end(ConnectionEndedError(reason))

    # ------------------------------------------------------------ how it is

    @property
    def away(self) -> str | None:
        """Why it cannot be called now; None if it can."""
        if self._barred is not None:
            return self._barred
        away = self._lifecycle.away
        if away is not None and self._waiting:
            return f"{away}, and it has not registered since"
        return away

    @property
    def connection(self) -> PluginConnection | None:
        """The connection that can be called; None while it is away."""
        if self._presence is None or self.away is not None:
            return None
        return self._presence.current

    @property
    def barred(self) -> bool:
        """Whether it may not be used."""
        return self._barred is not None

    # ------------------------------------------------------------ its life

    async def run(self) -> None:
        """Keep it connected until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._live())
            group.create_task(self._replace())

    async def close(self) -> None:
        """End it; called after the end of :meth:`run`."""
        await self._lifecycle.close()
        for task in self._closing:
            task.cancel()
        with suppress(Exception):
            await asyncio.gather(*self._closing, return_exceptions=True)

    async def _live(self) -> None:
        await self._lifecycle.start()
        await self._lifecycle.run()

    async def _pause(self, seconds: float) -> None:
        """Wait before it is connected again, but not after its first end in a while: as it has to
        register first, it is as slow as it likes to be."""
        if seconds > lifecycle.RECONNECT_SECONDS[0]:
            await asyncio.sleep(seconds)

    async def _connect(self) -> _Presence:
        """Wait for a registration, and connect."""
        self._presence = None
        if self._last is not self._used:
            # Its latest registration was to replace a connection, and could not.
            self._pending = self._last
        self._waiting = True
        while self._barred is not None or self._pending is None:
            await self._news.wait()
            self._news.clear()
        self._waiting = False
        connection = await self._opened(self._take())
        try:
            await connection.hold_first(seconds=LIST_SECONDS)
        except BaseException:
            await connection.close()
            raise
        self._presence = _Presence(connection)
        return self._presence

    def _take(self) -> Registration:
        taken, self._pending = self._pending, None
        assert taken is not None
        self._used = taken
        return taken

    async def _opened(self, registration: Registration) -> PluginConnection:
        connection = PluginConnection(registration, remarks=self._remarks)
        try:
            await connection.open()
            if self._barred is not None:
                raise ConnectionEndedError(self._barred)
            if self._last is None:
                raise ConnectionEndedError("its registration holds no more")
        except ConnectionEndedError:
            await connection.close()
            raise
        except Exception as error:  # of gRPC, that nobody foresaw
            await connection.close()
            logger.exception("device plugin cannot be reached", extra={"endpoint": self.resource})
            reason = f"it cannot be reached ({type(error).__name__})"
            raise ConnectionEndedError(reason) from error
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _replace(self) -> None:
        """Put new connections in the place of those that live."""
        while True:
            presence = self._presence
            alive = presence is not None and not presence.over and self._barred is None
            if alive and self._pending is not None:
                await self._replace_with(self._take())
                await asyncio.sleep(REPLACE_SECONDS)
                continue
            await self._news.wait()
            self._news.clear()

    async def _replace_with(self, registration: Registration) -> None:
        before, self._replacing = self._presence, True
        connection: PluginConnection | None = None
        try:
            connection = await self._opened(registration)
            if not await connection.hold_first(seconds=CONNECT_SECONDS):
                raise ConnectionEndedError("it does not list its devices")
        except ConnectionEndedError as error:
            self._used = None
            facts = {"endpoint": self.resource, "error": error.reason}
            logger.warning("device plugin registered again and cannot be reached", extra=facts)
        else:
            presence = self._presence
            if presence is before and presence is not None and not presence.over:
                old, presence.current = presence.current, connection
                old.end(ConnectionEndedError("it registered again"))
                self._close_later(old)
                connection = None
            else:
                self.register(registration)  # in the meantime it was stopped
        finally:
            self._replacing = False
            if connection is not None:
                await connection.close()

    def _close_later(self, connection: PluginConnection) -> None:
        task = asyncio.create_task(connection.close(grace_seconds=REPLACED_SECONDS))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
