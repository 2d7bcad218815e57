"""
The device plugin of one resource: connected once it has registered, replaced when it does so again,
stopped when it is gone.

As with the kubelet, a plugin whose stream ends is away until it registers, and what becomes of its
socket while the stream lives is its own business. But where the kubelet connects within a
registration, and refuses it if that fails, here the plugin has its answer by then: so a
registration that could not be connected to is tried again. A plugin that registers while it is
still there is connected anew beside the old connection, which goes when the new one has listed its
devices; nothing is told of a stop then.

It must not know claims, other resources, or who may register.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress

from drakit.device import Inventory
from drakit_nodeplugin.endpoints import lifecycle
from drakit_nodeplugin.endpoints.allowlist import Rights
from drakit_nodeplugin.endpoints.deviceplugin.connection import (
    CONNECT_SECONDS,
    LIST_SECONDS,
    PluginConnection,
    Registration,
)
from drakit_nodeplugin.endpoints.deviceplugin.remarks import Diagnostics
from drakit_nodeplugin.endpoints.deviceplugin.room import Room
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
"""From one attempt to connect to the next, however often a plugin registers."""

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
    def unavailable(self) -> str | None:
        return self.current.away

    async def inventories(self) -> AsyncIterator[Update]:
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
        remarks: Diagnostics,
        room: Room,
        rights: Rights | None = None,
    ) -> None:
        self.resource = resource
        self.rights = rights
        """Its rights; None without a restriction."""
        self._remarks = remarks
        self._room = room
        self._news = asyncio.Event()
        """That anything below may be otherwise than it was."""
        self._last: Registration | None = None
        """What it has registered last; None if that holds no more."""
        self._used: Registration | None = None
        """What was connected to last, with success."""
        self._tried: Registration | None = None
        """What it was tried to connect to last."""
        self._barred: str | None = None
        self._waiting = False
        """Whether it is away until it registers."""
        self._opening: PluginConnection | None = None
        """Of one that registers again, or is away; there are never two."""
        self._presence: _Presence | None = None
        self.away_since: float | None = asyncio.get_running_loop().time()
        """Since when it has had no connection; loop time. None while it has one."""
        self._closing: set[asyncio.Task[None]] = set()
        self._lifecycle = Lifecycle(resource, self._connect, listener=listener, pause=self._pause)

    # ------------------------------------------------------------ what others say

    def register(self, registration: Registration) -> None:
        """It has registered; of several registrations the last one counts."""
        self._last = registration
        opening = self._opening
        if opening is not None and opening.registration.socket != registration.socket:
            opening.end(ConnectionEndedError("it registered again"))
        self._news.set()

    def forget(self, reason: str) -> None:
        """Its registration holds no more; it is away for this reason until it registers anew."""
        self._last = self._used = self._tried = None
        self._end(reason)

    def bar(self, reason: str) -> None:
        """It may not be used, for this reason, until `unbar`; its registration is kept."""
        self._barred = reason
        self._end(reason)

    def unbar(self) -> None:
        """It may be used again, as it has registered last."""
        self._barred = self._used = self._tried = None
        self._news.set()

    def _end(self, reason: str) -> None:
        error = ConnectionEndedError(reason)
        if self._presence is not None:
            self._presence.current.end(error)
        if self._opening is not None:
            self._opening.end(error)

    # ------------------------------------------------------------ how it is

    @property
    def away(self) -> str | None:
        """Why it cannot be called now; None if it can."""
        if self._barred is not None:
            return self._barred
        away = self._lifecycle.unavailable
        if away is not None and self._waiting and self._wanted is None:
            return f"{away}, and it has not registered since"
        return away

    @property
    def connection(self) -> PluginConnection | None:
        """The connection that can be called; None while it is away."""
        if self._presence is None or self.away is not None:
            return None
        return self._presence.current

    @property
    def barred(self) -> str | None:
        """Why it may not be used; None if it may."""
        return self._barred

    @property
    def _wanted(self) -> Registration | None:
        """What is to be connected to; None if that is done, or may not be."""
        done = self._last is self._used or self._barred is not None
        return None if done else self._last

    @property
    def _new(self) -> Registration | None:
        """What is to be connected to, and was not tried yet."""
        return None if self._wanted is self._tried else self._wanted

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
        register first, it is as slow as it likes to be. A new registration shortens it."""
        if seconds <= lifecycle.RECONNECT_SECONDS[0]:
            return
        least = asyncio.create_task(asyncio.sleep(min(seconds, REPLACE_SECONDS)))
        try:
            async with asyncio.timeout(seconds):
                while self._new is None:
                    await self._more_news()
        except TimeoutError:
            pass
        else:
            await least
        finally:
            least.cancel()

    async def _more_news(self) -> None:
        # Of two who wait both are woken, and each looks again at all there is before it waits.
        await self._news.wait()
        self._news.clear()

    async def _connect(self) -> _Presence:
        """Wait for a registration, and connect."""
        self._presence = None
        if self.away_since is None:
            self.away_since = asyncio.get_running_loop().time()
        self._room.leave(self.resource)
        if self._opening is not None:
            # What was to replace it is what there is now, and need not have listed its devices.
            self._opening.end(ConnectionEndedError("the one before it is gone"))
        while True:
            self._waiting = True
            while self._opening is not None or (registration := self._wanted) is None:
                await self._more_news()
            self._waiting = False
            try:
                connection, _ = await self._opened(registration, list_seconds=LIST_SECONDS)
            except ConnectionEndedError:
                if self._new is None:
                    raise
                await asyncio.sleep(REPLACE_SECONDS)  # another registration holds instead
            else:
                self._presence = _Presence(connection)
                self.away_since = None
                return self._presence

    async def _opened(
        self, registration: Registration, *, list_seconds: float
    ) -> tuple[PluginConnection, bool]:
        """Connect, and tell whether it has listed its devices in this time. Raises
        :class:`ConnectionEndedError`."""
        self._tried = registration
        self._opening = connection = PluginConnection(
            registration, remarks=self._remarks, room=self._room, rights=self.rights
        )
        try:
            await connection.open()
            self._used = registration
            has_listed = await connection.hold_first(seconds=list_seconds)
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
        finally:
            self._opening = None
            self._news.set()
        return connection, has_listed

    async def _replace(self) -> None:
        """Put new connections in the place of those that live."""
        while True:
            presence, registration = self._presence, self._new
            if presence is None or presence.over or registration is None:
                await self._more_news()
                continue
            await self._replace_with(registration, presence)
            await asyncio.sleep(REPLACE_SECONDS)

    async def _replace_with(self, registration: Registration, presence: _Presence) -> None:
        before = self._used
        try:
            connection, has_listed = await self._opened(registration, list_seconds=CONNECT_SECONDS)
            if not has_listed or self._presence is not presence or presence.over:
                await connection.close()
                raise ConnectionEndedError("it does not list its devices")
        except ConnectionEndedError as error:
            # It is tried again once the one that lives has ended.
            if self._used is registration:
                self._used = before
            self._news.set()
            facts = {"endpoint": self.resource, "error": error.reason}
            logger.warning("device plugin registered again and cannot be reached", extra=facts)
            return
        old, presence.current = presence.current, connection
        old.end(ConnectionEndedError("it registered again"))
        self._close_later(old)

    def _close_later(self, connection: PluginConnection) -> None:
        task = asyncio.create_task(connection.close(grace_seconds=REPLACED_SECONDS))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
