"""
One run of a Python driver, which is created, served and closed in its own thread and event loop.

Vendor code never runs in the loop that serves the kubelet: a driver that blocks, raises, or ends
its thread affects only its own calls. A thread cannot contain crashes, or code that holds the GIL:
such drivers must run as backends. :mod:`.endpoint` decides when to connect again. :mod:`.loop`
calls into the driver's loop, watches it and ends it, :mod:`.calls` calls the driver's methods, and
:mod:`.polling` polls the health of its devices.

A driver that yields too fast is stopped. This module rejects only inventories of the wrong type and
endless yields, because they would harm the daemon. Snapshots (:mod:`.snapshot`) are taken only of
the newest inventory. The device manager validates each device, and omits only those that cannot be
published.

Of a claim, the module knows only the identity. Does not depend on slices, gRPC or the kubelet.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

from drakit.device import AllocatedClaim, Inventory, PreparedDevice
from drakit.driver import Driver, DriverError
from drakit_daemon.event_loop import new_event_loop
from drakit_driver.runtime.calls import AnyDriver, DriverCalls
from drakit_driver.runtime.contract import ConnectionEndedError, DriverTraits, Update
from drakit_driver.runtime.endpoint import follow_policies
from drakit_driver.runtime.failures import (
    DeviceFailedError,
    kind_and_text,
    kind_of,
    text_of,
    traceback_of,
)
from drakit_driver.runtime.latest_value import LatestValue, updates_of
from drakit_driver.runtime.loop import DriverLoop, Watchdog, end_loop, where_is
from drakit_driver.runtime.policies import AnyPolicies, PolicyFeed
from drakit_driver.runtime.polling import HealthPolling
from drakit_driver.runtime.snapshot import InventorySnapshots, inventory_of

logger = logging.getLogger(__name__)

START_SECONDS = 10.0
"""Maximum time to wait for a driver's constructor before the daemon continues without the
driver."""

LIST_SECONDS = 2.0
"""Maximum time to wait for a new driver to list its devices before the daemon starts serving. The
wait is worthwhile because the kubelet may be waiting for a claim, and would have to retry."""

CLOSE_SECONDS = 5.0
"""How long the daemon waits for a driver to end. After that, the driver's thread does not delay the
exit of the process."""


# ---------------------------------------------------------------- inventories

MAX_YIELDS = 2000
"""Maximum number of inventories per second, and in a burst. A driver that yields on every bus event
stays far below this limit, and a loop without waits far exceeds it."""

COUNTED_DEVICES = 8_192
"""An inventory counts once more for each multiple of this number of devices, because it takes
longer to process."""

SNAPSHOT_SECONDS = 0.05
"""Minimum time between two snapshots. A snapshot of 1,000 devices takes 2 ms in this thread, and a
driver may yield 2,000 times a second."""

TURN_SECONDS = 0.005
"""How long a stream that never waits can occupy the driver's loop before other calls get a turn."""


class FloodError(DriverError):
    """A driver yields faster than the node plugin can process."""

    def __init__(self) -> None:
        super().__init__(
            f"it yielded more than {MAX_YIELDS:,} inventories within a second; this is a bug in "
            "the driver, which must wait for a change before it yields again"
        )


class UnreadableError(DriverError):
    """The value that a driver yielded raises an exception when it is read."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"the value that it yielded cannot be read: {kind_and_text(error)}; this is a "
            "bug in the driver"
        )


def open_stream(driver: Driver[Any, Any]) -> AsyncIterator[object]:
    """Return a driver's inventory stream. Raises :class:`DriverError` if the driver does not return
    one."""
    stream = cast("object", driver.devices())
    if isinstance(stream, AsyncIterator):
        return cast("AsyncIterator[object]", stream)
    if inspect.iscoroutine(stream):
        stream.close()
        raise DriverError("its devices() never yields; it must be an async generator")
    raise DriverError(
        f"its devices() returned {kind_of(stream)}; it must be an async generator, defined with "
        f"'async def' and yield"
    )


async def read_inventories(stream: AsyncIterator[object], latest: LatestValue[Inventory]) -> None:
    """
    Read a driver's stream until it ends, and write its inventories to a cell of the same loop.

    Raises the stream's exceptions. Raises :class:`DriverError` if a value is not an inventory or
    cannot be read, or if the driver yields too fast. Does not close the stream.
    """
    loop = asyncio.get_running_loop()
    allowed = float(MAX_YIELDS)
    turned_at = loop.time()
    while True:
        asked_at = loop.time()
        try:
            listed = await anext(stream)
        except StopAsyncIteration:
            return
        # Add to the allowance only for time spent in the driver: counting our own processing time
        # would hide an endless stream.
        allowed = min(MAX_YIELDS, allowed + (loop.time() - asked_at) * MAX_YIELDS)
        try:
            given = inventory_of(listed)
        except DriverError:
            raise
        except Exception as error:
            raise UnreadableError(error) from error
        allowed -= 1 + len(given.devices) // COUNTED_DEVICES
        if allowed < 0:
            raise FloodError
        latest.replace(given)
        if loop.time() - turned_at > TURN_SECONDS:
            await asyncio.sleep(0)
            turned_at = loop.time()


# ---------------------------------------------------------------- connections


class PythonConnector:
    """Creates the connections of one driver, one at a time."""

    def __init__(
        self,
        name: str,
        make: Callable[[], AnyDriver],
        traits: DriverTraits,
        *,
        policies: PolicyFeed | None = None,
    ) -> None:
        """Create a connector. `make` is called in the driver's thread, once per run. If `policies`
        is set, the driver lists its devices only after it has applied policies."""
        self._name = name
        self._make = make
        self._traits = traits
        self._policies = policies
        self._last: PythonConnection | None = None

    async def connect(self) -> PythonConnection:
        """
        Start the driver.

        Raises :class:`DriverError` if the driver rejects its configuration, and any other error if
        it cannot be started now. If the driver is slow to start, return before it is ready, and let
        it continue.
        """
        if self._last is not None:
            # Two runs of a driver must not overlap, because the previous run may hold hardware that
            # the next one needs.
            await self._last.gone()
        self._last = PythonConnection(self._name, self._make, self._traits, self._policies)
        await self._last.start()
        return self._last

    async def ended(self) -> None:
        """Wait until no part of the last run is still running."""
        if self._last is not None:
            await self._last.gone()


class PythonConnection:
    """One run of a driver. Implements :class:`.Connection`."""

    def __init__(
        self,
        name: str,
        make: Callable[[], AnyDriver],
        traits: DriverTraits,
        policies: PolicyFeed | None,
    ) -> None:
        """Create a connection. `make` is called in the driver's thread."""
        self._name = name
        self._make = make
        self._traits = traits
        self._policies = policies
        self._home = asyncio.get_running_loop()
        self._latest = LatestValue[Inventory]()
        # The following are written in the daemon's loop, from reports of the thread.
        self._started: asyncio.Future[tuple[DriverCalls, DriverLoop]] = self._home.create_future()
        self._gone: asyncio.Future[None] = self._home.create_future()
        self._is_closing = False
        self._watchdog: Watchdog | None = None
        self._background: list[asyncio.Task[None]] = []
        # The following are written in the thread.
        self._configured = asyncio.Event()
        """Set once the driver has applied policies. Before that, it would withdraw its devices."""
        self._package = ""
        self._has_listed = False
        self._main: asyncio.Task[None] | None = None
        # Use a daemon thread, because a driver that hangs must not prevent the process from ending.
        self._thread = threading.Thread(target=self._live, name=f"driver-{name}", daemon=True)

    # ------------------------------------------------------------ in the daemon's loop: life cycle

    async def start(self) -> None:
        """
        Create the driver, and wait briefly until it lists its devices. A slow driver continues to
        start.

        Raises :class:`DriverError` if the driver rejects its configuration, and any other error if
        it fails.
        """
        try:
            self._thread.start()
        except RuntimeError:  # the process may have no threads left
            self._gone.set_result(None)
            raise
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(self._started)
            if self._policies is None or self._policies.known:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LIST_SECONDS):
                        await self._latest.wait()
        except TimeoutError:
            # Keep waiting for this thread, which cannot be killed. A second thread would also hang,
            # and a driver that takes longer than this to start would never become available.
            facts = {"driver": self._name, "where": self._where()}
            logger.error("driver is slow to start", extra=facts)
        except asyncio.CancelledError:
            await self.close()
            raise

    async def gone(self) -> None:
        """Wait until no part of the driver is running."""
        await asyncio.shield(self._gone)

    def _where(self) -> str:
        return where_is(self._thread.ident or 0, package=self._package)

    @property
    def unavailable(self) -> str | None:
        """Implement :attr:`.Connection.unavailable`."""
        if (over := self._latest.over) is not None:
            return over.reason
        if not self._started.done():
            return "it is still starting"
        if not self._has_listed:
            waits = None if self._policies is None else self._policies.stop_reason
            return waits or "it has not listed its devices yet"
        return self._started.result()[1].stop_reason

    @property
    def blocked(self) -> str | None:
        """Implement :attr:`.Connection.blocked`."""
        return None if self._watchdog is None else self._watchdog.blocked

    def inventories(self) -> AsyncIterator[Update]:
        """Implement :meth:`.Connection.inventories`."""
        return updates_of(self._latest)

    async def close(self) -> None:
        """Implement :meth:`.Connection.close`. If the driver does not end in time, abandon it."""
        self._is_closing = True  # a driver that is still starting is closed once it has started
        self._cancel()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.gone()
        except TimeoutError:
            facts = {"driver": self._name, "where": self._where()}
            logger.warning("driver did not stop in time and is abandoned", extra=facts)

    def _cancel(self) -> None:
        if self._main is not None:
            with suppress(RuntimeError):  # the loop is already closed
                self._main.get_loop().call_soon_threadsafe(self._main.cancel)

    # ------------------------------------------------------------ in the daemon's loop: calls

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[PreparedDevice] | DeviceFailedError]:
        """Implement :meth:`.Calls.prepare`."""
        calls, loop = self._started.result()
        results = await loop.call(calls.prepare, batch)
        if self._policies is not None:
            self._policies.prepared_claims(batch, results)
        return results

    async def unprepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, DeviceFailedError | None]:
        """Implement :meth:`.Calls.unprepare`."""
        calls, loop = self._started.result()
        return await loop.call(calls.unprepare, batch)

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool]:
        """Implement :meth:`.Calls.check`."""
        calls, loop = self._started.result()
        return await loop.call(calls.check, batch)

    async def _configure(self, feed: PolicyFeed) -> None:
        calls, loop = self._started.result()

        async def apply(policies: AnyPolicies) -> Mapping[str, str]:
            await loop.call(calls.apply_policies, policies)
            return {}

        await follow_policies(
            feed, apply, driver=self._name, applied=lambda: loop.notify(self._configured.set)
        )

    # ------------------------------------------------------------ in the daemon's loop: reports

    def _has_started(self, calls: DriverCalls, loop: DriverLoop, watchdog: Watchdog) -> None:
        self._started.set_result((calls, loop))
        self._watchdog = watchdog
        self._background.append(self._home.create_task(watchdog.run()))
        if self._policies is not None:
            self._background.append(self._home.create_task(self._configure(self._policies)))
        if self._is_closing:
            self._cancel()

    def _is_over(self, ended: ConnectionEndedError, refusal: DriverError | None) -> None:
        self._watchdog = None
        for task in self._background:
            task.cancel()
        self._latest.end(ended)
        if not self._started.done():
            self._started.set_exception(refusal or ended)
            self._started.exception()  # mark it as retrieved, so that asyncio does not log it

    # ------------------------------------------------------------ in the thread

    def _notify(self, function: Callable[..., None], *values: Any) -> None:
        try:
            self._home.call_soon_threadsafe(function, *values)
        except RuntimeError:
            logger.debug("the daemon's loop is closed", extra={"driver": self._name})

    def _live(self) -> None:
        try:
            driver = self._make()
        except BaseException as error:
            self._end(error, refuses=isinstance(error, DriverError))
        else:
            self._package = type(driver).__module__.partition(".")[0]
            if (feed := self._policies) is not None:
                driver.held_devices = feed.held
            self._serve_in_loop(driver)
            try:
                driver.close()
            except BaseException as error:
                facts = {"driver": self._name, "exception": traceback_of(error)}
                logger.error("driver failed to close", extra=facts)
        self._notify(self._gone.set_result, None)

    def _serve_in_loop(self, driver: AnyDriver) -> None:
        try:
            loop = new_event_loop()
        except Exception as error:  # the process may have no file descriptors left
            self._end(error)
            return
        executor = ThreadPoolExecutor(thread_name_prefix=f"driver-{self._name}")
        loop.set_default_executor(executor)
        calls, outside = DriverCalls(self._name, driver, self._traits), DriverLoop(loop)
        ident = threading.get_ident()
        watchdog = Watchdog(self._name, loop=loop, thread=ident, package=self._package)
        stream: AsyncIterator[object] | None = None
        ended_by: BaseException | None = None
        try:
            stream = open_stream(driver)
            self._main = loop.create_task(self._serve(driver, calls, stream), name="stream")
            self._notify(self._has_started, calls, outside, watchdog)
            loop.run_until_complete(self._main)
        except BaseException as error:
            ended_by = error
        outside.end()
        reason = self._end(ended_by)
        end_loop(loop, stream=stream, executor=executor, driver=self._name)
        self._notify(outside.close, reason)

    async def _serve(
        self, driver: AnyDriver, calls: DriverCalls, stream: AsyncIterator[object]
    ) -> None:
        """Run the parts of the connection. When one of them ends, cancel the others."""
        if self._policies is not None:
            await self._configured.wait()
        latest = LatestValue[Inventory](pace_seconds=SNAPSHOT_SECONDS)
        polling: HealthPolling | None = None
        if self._traits.polls_health:
            polling = HealthPolling(self._name, driver, self._latest.report)
        parts = [read_inventories(stream, latest), self._list(latest, calls, polling)]
        if polling is not None:
            parts.append(polling.run())
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        for task in done:
            task.result()

    async def _list(
        self, latest: LatestValue[Inventory], calls: DriverCalls, polling: HealthPolling | None
    ) -> None:
        """Until canceled, publish a snapshot of each newest inventory. The driver's own objects do
        not leave its thread."""
        snapshots = InventorySnapshots()
        while True:
            given, _ = await latest.next()
            assert given is not None  # the cell contains no health
            try:
                ours = await snapshots.of(given)
            except DriverError:
                raise
            except Exception as error:
                raise UnreadableError(error) from error
            calls.published(given)
            self._has_listed = True
            self._latest.replace(ours)
            if polling is not None:
                polling.replaced(given, ours)

    def _end(self, error: BaseException | None, *, refuses: bool = False) -> str:
        """Report the reason why the connection ended, such as the exception's type and message.
        Return the reason."""
        if error is None:
            reason = "its stream ended"
        elif isinstance(error, asyncio.CancelledError):
            ours = "the node plugin is stopping"
            reason = ours if self._is_closing else "it canceled its own stream"
        elif isinstance(error, DriverError):
            reason = text_of(error)
        else:
            reason = kind_and_text(error)
        # Don't log a traceback for a DriverError, because its message is sufficient.
        understood = isinstance(error, DriverError | asyncio.CancelledError | None)
        if not understood or isinstance(error, UnreadableError):
            facts = {"driver": self._name, "exception": traceback_of(error)}
            logger.error("driver ended", extra=facts)
        ended = ConnectionEndedError(reason, disorderly=isinstance(error, FloodError))
        # Create a new error instead of passing on the driver's own, because its class may be vendor
        # code.
        self._notify(self._is_over, ended, DriverError(reason) if refuses else None)
        return reason
