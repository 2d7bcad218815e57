"""
One life of a backend: connected, its streams read, called, and closed.

It lives as long as its stream of devices. The stream of health beside it is optional and called
again by itself. Messages are taken as they come, but only the last of a short time is read; who
talks without end is disconnected, and who talks in large pieces is taken from slowly. That there is
another life after this one is decided in :mod:`drakit_nodeplugin.endpoints.lifecycle`, how claims
are told to a backend in :mod:`.claimcalls`.

It must not know claims, slices or the kubelet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Hashable
from contextlib import aclosing, suppress
from typing import Any

import grpc
import grpc.aio

from drakit.backoff import Backoff
from drakit.device import Inventory
from drakit.rate_limiter import RateLimiter
from drakit.tasks import cancelled_by_owner
from drakit_nodeplugin.endpoints.backend.channel import (
    BackendChannel,
    BackendFailedError,
    Stream,
    failed,
)
from drakit_nodeplugin.endpoints.backend.claimcalls import BackendClaims
from drakit_nodeplugin.endpoints.backend.convert import health_of
from drakit_nodeplugin.endpoints.backend.inventories import HealthBook, InventoryReader
from drakit_nodeplugin.endpoints.endpoint import (
    ConnectionEndedError,
    DeviceKey,
    HealthReport,
    Update,
)
from drakit_nodeplugin.endpoints.python.bridge import Bridge
from drakit_nodeplugin.endpoints.python.stream import MAX_DEVICES
from drakit_nodeplugin.endpoints.wire import GarbageError, Turns, parse, parts
from drakit_proto.backend.v1 import backend_pb2 as pb

__all__ = ("BackendConnection",)

logger = logging.getLogger(__name__)

MESSAGES_A_SECOND = 100.0
MESSAGES_AT_ONCE = 200.0
"""What a backend may send of its devices; one that sends more does not wait for changes."""

BYTES_A_SECOND = 32 * 1024 * 1024
"""Taken of one stream: so who sends without end in large messages costs little of the loop."""

PACE_SECONDS = 0.05
"""Between two inventories that are read; the first is read at once."""

SHARE = 9
MAX_PAUSE_SECONDS = 2.0
"""Times as long as it took to read one it is waited for the next, but no longer than this: so
reading takes a tenth of the loop's time, however many devices a backend says again and again."""

HEALTH_AGAIN_SECONDS = (1.0, 60.0)
"""Until a stream of health that has ended is called again."""

STEADY_SECONDS = 60.0
CLOSE_SECONDS = 3.0
GONE = "the connection to its backend was lost"

_HEALTHS = frozenset({pb.WatchHealthResponse.DEVICES_FIELD_NUMBER})


class BackendConnection:
    """One life of a backend: a :class:`.Connection`."""

    def __init__(self, driver: str, channel: BackendChannel) -> None:
        """Takes over the channel, and closes it."""
        self._driver = driver
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._claims = BackendClaims(driver, channel, over=self._wait_over)
        self._bridge = Bridge(driver, home=self._loop, there=self._loop)
        self._over: asyncio.Future[ConnectionEndedError] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._raw: bytes | None = None
        """The last message of devices that nobody has read yet."""
        self._reader = InventoryReader()
        self._health = HealthBook()
        self._has_listed = False

    # ------------------------------------------------------------ its life

    async def start(self, *, node: str, version: str) -> None:
        """Ask who it is, and begin its streams; raises :class:`ConnectionEndedError`."""
        try:
            name = await self._channel.identify(node=node, version=version)
        except BackendFailedError as error:
            raise ConnectionEndedError(f"its backend {error}") from None
        if name != self._driver:
            raise ConnectionEndedError("the backend at its socket has another name now")
        self._begin(self._watch_devices(), "devices")
        self._begin(self._watch_health(), "health")

    async def listed(self, *, timeout_seconds: float) -> None:
        """Wait for its first message of devices, or its end, but no longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not (self._has_listed or self._over.done()):
                    self._news.clear()
                    await self._news.wait()

    @property
    def unavailable(self) -> str | None:
        """Why nothing can be called now; None while it can."""
        if self._over.done():
            return self._over.result().reason
        return None if self._has_listed else "it has not said yet which devices it has"

    async def close(self) -> None:
        """End it, and all of its calls."""
        self._end(ConnectionEndedError("the node plugin has closed the connection"))
        tasks = {*self._tasks}
        for task in tasks:
            task.cancel()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                if tasks:
                    await asyncio.wait(tasks)
                await self._channel.close()
        except TimeoutError:
            logger.warning("backend's connection does not close", extra={"driver": self._driver})

    async def _wait_over(self, seconds: float) -> None:
        """Wait until it is over, but no longer than this."""
        await asyncio.wait({self._over}, timeout=seconds)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._loop.create_task(work, name=f"{self._driver} {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, ended: ConnectionEndedError) -> None:
        if not self._over.done():
            self._over.set_result(ended)
            self._raw = None
            self._news.set()
            self._bridge.end()
            self._bridge.close(ended.reason)

    # ------------------------------------------------------------ its streams

    async def inventories(self) -> AsyncIterator[Update]:
        """Give what it tells, until it ends; raises :class:`ConnectionEndedError`."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._over.done():
                raise self._over.result()
            turns = Turns()
            inventory = await self._inventory(turns)
            if inventory is not None:
                yield inventory
            if healths := self._health.take():
                yield HealthReport(devices=healths)
            await self._wait_over(max(PACE_SECONDS, _pause_after(turns)))

    async def _inventory(self, turns: Turns) -> Inventory | None:
        """Read the last message of devices, if there is a new one."""
        raw, self._raw = self._raw, None
        if raw is None:
            return None
        try:
            inventory = await self._reader.read(raw, turns)
        except GarbageError as error:
            ended = ConnectionEndedError(_fault(f"sent {error} as its devices"), disorderly=True)
            self._end(ended)
            raise ended from None
        if self._over.done():
            raise self._over.result()  # what is over has nothing any more
        if inventory is not None:
            self._health.list((*inventory.devices, *(inventory.fallback or ())))
        return inventory

    async def _watch_devices(self) -> None:
        """Take messages of devices until the stream ends: that is the end of this life."""
        try:
            if not await self._take_devices():
                return
            reason = "its backend ended its stream of devices"
        except grpc.aio.AioRpcError as error:
            logger.info(
                "backend's stream ended",
                extra={"driver": self._driver, "error": str(error.details())[:200]},
            )
            gone = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            reason = GONE if gone else f"its backend {failed(error, 'WatchDevices')}"
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            reason = GONE
        except Exception as error:
            logger.exception("backend's stream failed", extra={"driver": self._driver})
            reason = f"reading its stream of devices failed ({type(error).__name__})"
        self._end(ConnectionEndedError(reason))

    async def _take_devices(self) -> bool:
        """Take messages of devices; tells whether the stream ended by itself."""
        allowance = RateLimiter(burst=MESSAGES_AT_ONCE, per_second=MESSAGES_A_SECOND)
        async with aclosing(_messages(self._channel.stream("WatchDevices"))) as messages:
            async for raw in messages:
                if not allowance.take():
                    text = (
                        f"sent more than {MESSAGES_A_SECOND:.0f} messages of its devices a second; "
                        f"it must wait for a change before it says them again"
                    )
                    self._end(ConnectionEndedError(_fault(text), disorderly=True))
                    return False
                self._raw = raw
                self._has_listed = True
                self._news.set()
                await asyncio.sleep(len(raw) / BYTES_A_SECOND)
        return True

    async def _watch_health(self) -> None:
        """Take messages of health for as long as this life; what fails here ends nothing else."""
        first, longest = HEALTH_AGAIN_SECONDS
        backoff = Backoff(first_seconds=first, limit_seconds=longest, jitter=0)
        told: str | None = None
        while not self._over.done():
            began_at = self._loop.time()
            problem = await self._health_problem()
            if problem is None:
                return
            if problem != told and not self._over.done():
                told = problem
                facts = {"driver": self._driver, "error": problem}
                logger.warning("backend's stream of health ended", extra=facts)
            if self._loop.time() - began_at > STEADY_SECONDS:
                backoff.succeeded()
            await asyncio.sleep(backoff.next_seconds())

    async def _health_problem(self) -> str | None:
        """Read one stream of health; says how it ended, or None if there is none to be had."""
        allowance = RateLimiter(burst=MESSAGES_AT_ONCE, per_second=MESSAGES_A_SECOND)
        try:
            async with aclosing(_messages(self._channel.stream("WatchHealth"))) as messages:
                async for raw in messages:
                    turns = Turns()
                    await self._take_health(raw, turns)
                    # Slowly, but all of it: what a message does not name was in another one.
                    await asyncio.sleep(max(len(raw) / BYTES_A_SECOND, _pause_after(turns)))
                    await allowance.wait()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            return f"its backend {failed(error, 'WatchHealth')}"
        except GarbageError as error:
            return f"its backend sent {error} as the health of its devices"
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            return GONE
        except Exception as error:
            logger.exception("backend's stream failed", extra={"driver": self._driver})
            return f"reading it failed ({type(error).__name__})"
        return "its backend ended it"

    async def _take_health(self, raw: bytes, turns: Turns) -> None:
        for count, (_, part) in enumerate(parts(raw, _HEALTHS)):
            if count == MAX_DEVICES:
                raise GarbageError(f"more than {MAX_DEVICES:,} devices")
            said = parse(pb.DeviceHealth, part)
            self._health.report(DeviceKey(said.pool, said.name), health_of(said.health))
            await turns.give_way()
        self._news.set()

    # ------------------------------------------------------------ calls

    async def call(
        self,
        function: Callable[[BackendClaims], Any],
        *,
        what: str,
        keys: Collection[Hashable],
        timeout_seconds: float,
    ) -> Any:
        """Call it as :meth:`.Bridge.call` does."""
        return await self._bridge.call(
            lambda: function(self._claims), what=what, keys=keys, timeout_seconds=timeout_seconds
        )

    def busy(self, keys: Collection[Hashable]) -> bool:
        """Tell whether calls with these keys have not ended, as :meth:`.Bridge.busy` does."""
        return self._bridge.busy(keys)


def _pause_after(turns: Turns) -> float:
    return min(MAX_PAUSE_SECONDS, SHARE * turns.worked_seconds)


async def _messages(stream: Stream) -> AsyncGenerator[bytes]:
    """Give the messages of a stream until it ends; raises AioRpcError."""
    try:
        while isinstance(raw := await stream.read(), bytes):
            yield raw
    finally:
        stream.cancel()


def _fault(text: str) -> str:
    return f"its backend {text}; this is a fault of the backend"
