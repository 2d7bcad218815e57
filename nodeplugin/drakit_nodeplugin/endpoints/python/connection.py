"""
One life of a Python driver: made, served and closed in a thread and event loop of its own.

What ends it ends this life alone; that there is another one after it is decided in
:mod:`drakit_nodeplugin.endpoints.lifecycle`. How calls reach it is :mod:`.bridge`'s business, how
its inventories are read :mod:`.stream`'s, and how they reach the daemon's loop :mod:`.mailbox`'s.

It must not know claims, slices, gRPC or the kubelet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Collection, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from drakit.device import Device, Edits, Inventory
from drakit.driver import Driver, DriverError
from drakit_nodeplugin.endpoints.endpoint import ConnectionEndedError, Update
from drakit_nodeplugin.endpoints.errors import text_of, traceback_of
from drakit_nodeplugin.endpoints.python.bridge import Bridge
from drakit_nodeplugin.endpoints.python.health_polling import HealthPolling
from drakit_nodeplugin.endpoints.python.mailbox import Mailbox
from drakit_nodeplugin.endpoints.python.plain import name_of_type
from drakit_nodeplugin.endpoints.python.shutdown import wind_up
from drakit_nodeplugin.endpoints.python.stream import (
    FloodError,
    UnreadableError,
    open_stream,
    read_inventories,
)
from drakit_nodeplugin.endpoints.python.watchdog import Watched, where_is

__all__ = ("AnyDriver", "DriverThread")

logger = logging.getLogger(__name__)

AnyDriver = Driver[Any, Any]

TAKE_SECONDS = 0.05
"""From one taking of news to the next: a driver that yields a thousand times a second must not keep
the daemon's loop busy. The first is taken at once."""

CLOSE_SECONDS = 5.0
"""How long a driver may take to end; its thread does not hold the process up."""


class DriverThread:
    """One life of a driver: a :class:`.Connection`."""

    def __init__(self, name: str, make: Callable[[], AnyDriver], *, polls_health: bool) -> None:
        """`make` is called in the thread."""
        self._name = name
        self._make = make
        self._polls_health = polls_health
        self._home = asyncio.get_running_loop()
        # Written at home, by what the thread tells.
        self._started: asyncio.Future[tuple[AnyDriver, Bridge]] = self._home.create_future()
        self._over: asyncio.Future[ConnectionEndedError] = self._home.create_future()
        self._gone: asyncio.Future[None] = self._home.create_future()
        self._closing = False
        self._package = ""
        self.watched: Watched | None = None
        """What there is to watch; None before it has a loop, and once that is over."""

        # Written in the thread.
        self._mailbox = Mailbox()
        self._published = _Published()
        self._has_listed = False
        self._main: asyncio.Task[None] | None = None
        # A daemon thread: a driver that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._live, name=f"driver-{name}", daemon=True)

    # ------------------------------------------------------------ at home

    async def start(self, *, timeout_seconds: float) -> None:
        """
        Make the driver.

        Raises :class:`DriverError` if it refuses, :class:`ConnectionEndedError` if it fails, and
        TimeoutError if it takes longer; then it goes on.
        """
        try:
            self._thread.start()
        except RuntimeError:  # the process may have no more threads
            self._gone.set_result(None)
            raise
        async with asyncio.timeout(timeout_seconds):
            await asyncio.shield(self._started)

    async def listed(self, *, timeout_seconds: float) -> None:
        """Wait for its first inventory, or its end, but no longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._mailbox.wait()

    async def gone(self) -> None:
        """Wait until nothing of it runs any more."""
        await asyncio.shield(self._gone)

    def where(self) -> str:
        """Say what its thread is doing."""
        return where_is(self._thread.ident or 0, package=self._package)

    @property
    def unavailable(self) -> str | None:
        """Why it cannot be called now; None while it can."""
        if self._over.done():
            return self._over.result().reason
        if not self._started.done():
            return "it is still starting"
        if not self._has_listed:
            return "it has not said yet which devices it has"
        return self._started.result()[1].stop_reason

    async def inventories(self) -> AsyncIterator[Update]:
        """Give what it tells, until it ends; raises :class:`ConnectionEndedError`."""
        while True:
            await self._mailbox.wait()
            updates = self._mailbox.take()
            for update in updates:
                if self._over.done():
                    break  # what is over has nothing any more
                yield update
            if self._over.done():
                raise self._over.result()
            await asyncio.sleep(TAKE_SECONDS)

    async def close(self) -> None:
        """End it; one that does not end in some time is left to itself."""
        self._closing = True  # one that is only just starting is ended once it has started
        self._cancel()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.gone()
        except TimeoutError:
            facts = {"driver": self._name, "where": self.where()}
            logger.warning("driver does not end and is left", extra=facts)

    async def call(
        self,
        function: Callable[[AnyDriver], Any],
        *,
        what: str,
        keys: Collection[Hashable],
        timeout_seconds: float,
    ) -> Any:
        """Call it as :meth:`.Bridge.call` does; only once it has started."""
        driver, bridge = self._started.result()
        return await bridge.call(
            lambda: function(driver), what=what, keys=keys, timeout_seconds=timeout_seconds
        )

    def edits(self, pool: str, name: str) -> Edits | None:
        """Return the edits that a device carries; None if it is not listed. For its thread."""
        return self._published.edits(pool, name)

    def busy(self, keys: Collection[Hashable]) -> bool:
        """Tell whether it has not ended all calls with these keys, as :meth:`.Bridge.busy` does;
        only once it has started."""
        return self._started.result()[1].busy(keys)

    # ------------------------------------------------------------ at home, told by the thread

    def _has_started(self, driver: AnyDriver, bridge: Bridge, watched: Watched) -> None:
        self._started.set_result((driver, bridge))
        self.watched, self._package = watched, watched.package
        if self._closing:
            self._cancel()

    def _cancel(self) -> None:
        if self._main is not None:
            with suppress(RuntimeError):  # closed already: it is ending
                self._main.get_loop().call_soon_threadsafe(self._main.cancel)

    def _is_over(self, ended: ConnectionEndedError, refusal: DriverError | None) -> None:
        if self._over.done():
            return
        self._over.set_result(ended)
        self.watched = None
        self._mailbox.wake()
        if not self._started.done():
            self._started.set_exception(refusal or ended)
            self._started.exception()  # heard, whoever else awaits it

    def _is_silent(self) -> None:
        """Its loop is closed, so what was called and not answered never will be."""
        if self._started.exception() is None:
            self._started.result()[1].close(self._over.result().reason)

    def _is_gone(self) -> None:
        self._gone.set_result(None)

    # ------------------------------------------------------------ in the thread

    def _tell(self, function: Callable[..., None], *values: Any) -> None:
        try:
            self._home.call_soon_threadsafe(function, *values)
        except RuntimeError:
            logger.debug("the daemon's loop is closed", extra={"driver": self._name})

    def _live(self) -> None:
        try:
            driver = self._make()
        except BaseException as error:
            self._end(error, refusal=error if isinstance(error, DriverError) else None)
        else:
            try:
                self._serve_in_loop(driver)
            except BaseException as error:  # there may be no file left for a loop
                self._end(error)
            try:
                driver.close()
            except BaseException as error:
                facts = {"driver": self._name, "exception": traceback_of(error)}
                logger.error("driver failed to close", extra=facts)
        self._tell(self._is_gone)

    def _serve_in_loop(self, driver: AnyDriver) -> None:
        loop = asyncio.new_event_loop()
        bridge = Bridge(self._name, home=self._home, there=loop)
        watched = Watched(
            loop=loop, thread=threading.get_ident(), package=_package_of(type(driver))
        )
        executor = ThreadPoolExecutor(thread_name_prefix=f"driver-{self._name}")
        loop.set_default_executor(executor)
        stream: AsyncIterator[object] | None = None
        error: BaseException | None = None
        try:
            stream = open_stream(driver)
            self._main = loop.create_task(self._serve(driver, stream), name="stream")
            self._tell(self._has_started, driver, bridge, watched)
            loop.run_until_complete(self._main)
        except BaseException as raised:
            error = raised
        if self._main is not None and self._main.done() and not self._main.cancelled():
            self._main.exception()  # heard, as asyncio wants it: SystemExit came another way
        bridge.end()
        self._end(error)
        wind_up(loop, stream=stream, executor=executor, driver=self._name)
        self._tell(self._is_silent)

    def _end(self, error: BaseException | None, *, refusal: DriverError | None = None) -> None:
        """Say why it is over: with the reason, the exception's type and its text."""
        if error is None:
            ended = ConnectionEndedError("its stream ended")
        elif isinstance(error, asyncio.CancelledError):
            reason = "the node plugin stops" if self._closing else "it cancelled its own stream"
            ended = ConnectionEndedError(reason)
        elif isinstance(error, DriverError):
            ended = ConnectionEndedError(text_of(error), disorderly=isinstance(error, FloodError))
        else:
            ended = ConnectionEndedError(f"{name_of_type(type(error))}: {text_of(error)}")
        if error is not None and _is_a_bug(error):
            facts = {"driver": self._name, "exception": traceback_of(error)}
            logger.error("driver ended", extra=facts)
        if refusal is not None:  # its own may be of a class of the vendor's
            refusal = DriverError(ended.reason)
        self._tell(self._is_over, ended, refusal)

    async def _serve(self, driver: AnyDriver, stream: AsyncIterator[object]) -> None:
        polling: HealthPolling | None = None
        if self._polls_health:
            polling = HealthPolling(self._name, driver, self._mailbox.report)

        def take(given: Inventory, ours: Inventory) -> None:
            self._published.replace(given)
            self._has_listed = True
            self._mailbox.replace(ours)
            if polling is not None:
                polling.replaced(given, ours)

        if polling is None:
            await read_inventories(stream, take)
            return
        reading = asyncio.create_task(read_inventories(stream, take), name="stream")
        asking = asyncio.create_task(polling.run(), name="health")
        parts = {reading, asking}
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
        for part in done:
            part.result()


class _Published:
    """The devices that a driver yielded last, with its own edits; used in its thread."""

    def __init__(self) -> None:
        self._inventory = Inventory(devices=())
        self._by_key: dict[tuple[str, str], Device] | None = None

    def replace(self, inventory: Inventory) -> None:
        self._inventory, self._by_key = inventory, None

    def edits(self, pool: str, name: str) -> Edits | None:
        if self._by_key is None:
            # Of several devices with one name the first, those of the fallback last.
            listed = (*self._inventory.devices, *(self._inventory.fallback or ()))
            self._by_key = {_key(device): device for device in reversed(listed)}
        device = self._by_key.get((pool, name))
        return None if device is None else device.edits


def _key(device: Device) -> tuple[str, str]:
    return str(device.pool), str(device.name)  # a vendor's name may be no text


def _is_a_bug(error: BaseException) -> bool:
    """Tell what the log must explain: a DriverError says all that its driver has to say."""
    if isinstance(error, DriverError):
        return isinstance(error, UnreadableError)
    return not isinstance(error, asyncio.CancelledError)


def _package_of(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]
