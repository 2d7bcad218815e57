"""
One run of a Python driver: created, served and closed in its own thread and event loop.

Vendor code never runs in the loop that answers the kubelet: a driver that blocks, raises, or ends
its thread affects only its own calls. A thread cannot contain crashes, or code that holds the GIL:
those need a backend. :mod:`drakit_nodeplugin.endpoints.endpoint` decides about the next connection.
:mod:`.driver_loop` calls into the driver's loop, watches it and ends it, :mod:`.driver_calls` calls
the driver's methods, and :mod:`.driver_reports` reads its inventories.

It must not know claims beyond their identity, slices, gRPC or the kubelet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from drakit.device import AllocatedClaim, Edits, Inventory
from drakit.driver import DriverError
from drakit_nodeplugin.endpoints.contract import ConnectionEndedError, DriverTraits, Update
from drakit_nodeplugin.endpoints.failures import (
    CallCancelledError,
    DeviceFailedError,
    kind_and_text,
    text_of,
    traceback_of,
)
from drakit_nodeplugin.endpoints.latest_value import LatestValue, pace_of, updates_of
from drakit_nodeplugin.endpoints.policies import AnyPolicies, PolicyFeed, held_nodes
from drakit_nodeplugin.endpoints.python.driver_calls import AnyDriver, DriverCalls
from drakit_nodeplugin.endpoints.python.driver_loop import Bridge, Watchdog, end_loop, where_is
from drakit_nodeplugin.endpoints.python.driver_reports import (
    SNAPSHOT_SECONDS,
    FloodError,
    HealthPolling,
    UnreadableError,
    open_stream,
    read_inventories,
    take_snapshots,
)

__all__ = ("PythonConnection", "PythonConnector")

logger = logging.getLogger(__name__)

START_SECONDS = 10.0
"""The time that a driver's constructor has before the daemon continues without it."""

LIST_SECONDS = 2.0
"""The time that a new driver has to list its devices before the daemon serves without it. The
kubelet may be waiting for a claim, and would have to retry."""

POLICIES_PACE_SECONDS = 0.5
"""Minimum time between two calls of `apply_policies`. An upgrade of the chart changes many policies
at once."""

POLICIES_RETRY_SECONDS = 60.0
"""Pause before refused policies are tried again."""

CLOSE_SECONDS = 5.0
"""The time that a driver has to end. Its thread does not delay the process."""


class PythonConnector:
    """Makes the connections of one driver, one after the other."""

    def __init__(
        self,
        name: str,
        make: Callable[[], AnyDriver],
        traits: DriverTraits,
        *,
        policies: PolicyFeed | None = None,
    ) -> None:
        """`make` is called in the driver's thread, once per run. A driver that has `policies` lists
        its devices only after it got them."""
        self._name = name
        self._make = make
        self._traits = traits
        self._policies = policies
        self._last: PythonConnection | None = None

    async def connect(self) -> PythonConnection:
        """
        Start the driver.

        Raises :class:`DriverError` if it refuses its configuration, and anything else if it cannot
        be started now. A slow driver is returned before it is ready, and continues to start.
        """
        if self._last is not None:
            # Two runs of a driver never overlap: the first may hold hardware that the next needs.
            await self._last.gone()
        connection = self._last = PythonConnection(
            self._name, self._make, self._traits, policies=self._policies
        )
        try:
            await connection.start(timeout_seconds=START_SECONDS)
            if self._policies is None or self._policies.known:
                await connection.listed(timeout_seconds=LIST_SECONDS)
        except TimeoutError:
            # Nothing can end its thread. A second thread would hang as well, and a driver that
            # takes longer than this would never be available.
            facts = {"driver": self._name, "where": connection.where()}
            logger.error("driver is slow to start", extra=facts)
        except asyncio.CancelledError:
            await connection.close()
            raise
        return connection


class PythonConnection:
    """One run of a driver: a :class:`.Connection`."""

    def __init__(
        self,
        name: str,
        make: Callable[[], AnyDriver],
        traits: DriverTraits,
        *,
        policies: PolicyFeed | None = None,
    ) -> None:
        """`make` is called in the thread."""
        self._name = name
        self._make = make
        self._traits = traits
        self._policies = policies
        self._home = asyncio.get_running_loop()
        self._latest = LatestValue[Inventory](pace_of)
        # Written in the daemon's loop, from reports of the thread.
        self._started: asyncio.Future[tuple[DriverCalls, Bridge]] = self._home.create_future()
        self._over: ConnectionEndedError | None = None
        self._gone: asyncio.Future[None] = self._home.create_future()
        self._is_closing = False
        self._package = ""
        self._watchdog: Watchdog | None = None
        self._background: list[asyncio.Task[None]] = []
        # Written in the thread.
        self._has_listed = False
        self._configured = asyncio.Event()
        """Set once the driver has applied policies: without any, it would withdraw its devices."""
        self._main: asyncio.Task[None] | None = None
        # A daemon thread: a driver that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._live, name=f"driver-{name}", daemon=True)

    # ------------------------------------------------------------ in the daemon's loop: life cycle

    async def start(self, *, timeout_seconds: float) -> None:
        """
        Make the driver.

        Raises :class:`DriverError` if it refuses, :class:`ConnectionEndedError` if it fails, and
        TimeoutError if it takes longer; it then continues to start.
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
                await self._latest.wait()

    async def gone(self) -> None:
        """Wait until no part of it runs any more."""
        await asyncio.shield(self._gone)

    def where(self) -> str:
        """Return the current calls of its thread."""
        return where_is(self._thread.ident or 0, package=self._package)

    @property
    def unavailable(self) -> str | None:
        """See :attr:`.Connection.unavailable`."""
        if self._over is not None:
            return self._over.reason
        if not self._started.done():
            return "it is still starting"
        if not self._has_listed:
            if self._policies is not None and not self._policies.known:
                return (
                    "its policies are unknown: the API server has not answered yet, and this node "
                    "has no copy of them"
                )
            if self._policies is not None and self._policies.refusal is not None:
                return f"it refuses its policies: {self._policies.refusal}"
            return "it has not listed its devices yet"
        return self._started.result()[1].stop_reason

    @property
    def blocked(self) -> str | None:
        """See :attr:`.Connection.blocked`."""
        return None if self._watchdog is None else self._watchdog.blocked

    def inventories(self) -> AsyncIterator[Update]:
        """See :meth:`.Connection.inventories`."""
        return updates_of(self._latest)

    async def close(self) -> None:
        """See :meth:`.Connection.close`; a driver that does not end in time is abandoned."""
        self._is_closing = True  # a driver that is still starting is ended once it has started
        self._cancel()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.gone()
        except TimeoutError:
            facts = {"driver": self._name, "where": self.where()}
            logger.warning("driver did not stop in time and is abandoned", extra=facts)

    def _cancel(self) -> None:
        if self._main is not None:
            with suppress(RuntimeError):  # closed already: it is ending
                self._main.get_loop().call_soon_threadsafe(self._main.cancel)

    # ------------------------------------------------------------ in the daemon's loop: calls

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[Edits] | DeviceFailedError]:
        """See :meth:`.Calls.prepare`."""
        calls, bridge = self._started.result()
        results = await bridge.call(lambda: calls.prepare(batch))
        if self._policies is not None:
            for claim in batch:
                edits = results.get(claim.claim.uid)
                if edits is None or isinstance(edits, DeviceFailedError):
                    continue
                for device, edit in zip(claim.devices, edits, strict=False):
                    nodes = () if device.admin_access else held_nodes(edit)
                    self._policies.prepared(claim.claim, device.name, nodes)
        return results

    async def unprepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, DeviceFailedError | None]:
        """See :meth:`.Calls.unprepare`."""
        calls, bridge = self._started.result()
        return await bridge.call(lambda: calls.unprepare(batch))

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool]:
        """See :meth:`.Calls.check`."""
        calls, bridge = self._started.result()
        return await bridge.call(lambda: calls.check(batch))

    # ------------------------------------------------------------ in the daemon's loop: reports

    def _has_started(self, calls: DriverCalls, bridge: Bridge, watchdog: Watchdog) -> None:
        self._started.set_result((calls, bridge))
        self._package = watchdog.package
        self._watchdog = watchdog
        self._background.append(self._home.create_task(watchdog.run()))
        if self._policies is not None:
            configuring = self._configure(self._policies, calls, bridge)
            self._background.append(self._home.create_task(configuring))
        if self._is_closing:
            self._cancel()

    async def _configure(self, feed: PolicyFeed, calls: DriverCalls, bridge: Bridge) -> None:
        """Let the driver apply its policies, at the start and at each change. Refused policies are
        tried again, because the reason may be the state of the node."""
        policies: AnyPolicies | None = None
        refusal: str | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if refusal is None else POLICIES_RETRY_SECONDS):
                    policies = await feed.next(policies)
            assert policies is not None
            previous, refusal = refusal, None
            try:
                await bridge.call(partial(self._apply, calls, policies))
            except ConnectionEndedError:
                return
            except (DeviceFailedError, CallCancelledError) as error:
                refusal = str(error)
                if refusal != previous:
                    facts = {"driver": self._name, "error": refusal}
                    message = "driver refuses its policies; the previous ones remain"
                    logger.error(message, extra=facts)
            feed.report(policies, refusal)
            await asyncio.sleep(POLICIES_PACE_SECONDS)

    def _is_over(self, ended: ConnectionEndedError, refusal: DriverError | None) -> None:
        if self._over is not None:
            return
        self._over = ended
        self._watchdog = None
        for task in self._background:
            task.cancel()
        self._latest.end(ended)
        if not self._started.done():
            self._started.set_exception(refusal or ended)
            self._started.exception()  # retrieved, whether or not anybody awaits it

    def _is_silent(self) -> None:
        """Record that its loop is closed: calls without an answer never get one."""
        if self._started.exception() is None and self._over is not None:
            self._started.result()[1].close(self._over.reason)

    def _is_gone(self) -> None:
        self._gone.set_result(None)

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
            if (feed := self._policies) is not None:
                driver.held_devices = feed.held
            try:
                self._serve_in_loop(driver)
            except BaseException as error:  # such as no file descriptor for a loop
                self._end(error)
            try:
                driver.close()
            except BaseException as error:
                facts = {"driver": self._name, "exception": traceback_of(error)}
                logger.error("driver failed to close", extra=facts)
        self._notify(self._is_gone)

    def _serve_in_loop(self, driver: AnyDriver) -> None:
        loop = asyncio.new_event_loop()
        bridge = Bridge(home=self._home, there=loop)
        calls = DriverCalls(self._name, driver, self._traits)
        package = type(driver).__module__.partition(".")[0]
        watchdog = Watchdog(self._name, loop=loop, thread=threading.get_ident(), package=package)
        executor = ThreadPoolExecutor(thread_name_prefix=f"driver-{self._name}")
        loop.set_default_executor(executor)
        stream: AsyncIterator[object] | None = None
        error: BaseException | None = None
        try:
            stream = open_stream(driver)
            self._main = loop.create_task(self._serve(driver, calls, stream), name="stream")
            self._notify(self._has_started, calls, bridge, watchdog)
            loop.run_until_complete(self._main)
        except BaseException as raised:
            error = raised
        bridge.end()
        self._end(error)
        end_loop(loop, stream=stream, executor=executor, driver=self._name)
        self._notify(self._is_silent)

    async def _apply(self, calls: DriverCalls, policies: AnyPolicies) -> None:
        await calls.apply_policies(policies)
        self._configured.set()

    async def _serve(
        self, driver: AnyDriver, calls: DriverCalls, stream: AsyncIterator[object]
    ) -> None:
        latest = LatestValue[Inventory](lambda _: SNAPSHOT_SECONDS)
        polling: HealthPolling | None = None
        if self._traits.polls_health:
            polling = HealthPolling(self._name, driver, self._latest.report)

        def take(given: Inventory, ours: Inventory) -> None:
            calls.published(given)
            self._has_listed = True
            self._latest.replace(ours)
            if polling is not None:
                polling.replaced(given, ours)

        if self._policies is not None:
            await self._configured.wait()
        parts = [read_inventories(stream, latest), take_snapshots(latest, take)]
        if polling is not None:
            parts.append(polling.run())
        await _until_one_ends(parts)

    def _end(self, error: BaseException | None, *, refuses: bool = False) -> None:
        """Report why it ended: the exception's type and its text."""
        if error is None:
            ended = ConnectionEndedError("its stream ended")
        elif isinstance(error, asyncio.CancelledError):
            reason = (
                "the node plugin is stopping" if self._is_closing else "it canceled its own stream"
            )
            ended = ConnectionEndedError(reason)
        elif isinstance(error, DriverError):
            ended = ConnectionEndedError(text_of(error), disorderly=isinstance(error, FloodError))
        else:
            ended = ConnectionEndedError(kind_and_text(error))
        if error is not None and _is_a_bug(error):
            facts = {"driver": self._name, "exception": traceback_of(error)}
            logger.error("driver ended", extra=facts)
        # The driver's own error is not passed on: its class may be vendor code.
        self._notify(self._is_over, ended, DriverError(ended.reason) if refuses else None)


async def _until_one_ends(parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run the parts of a connection; the first that ends cancels the others, and its error is
    raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()


def _is_a_bug(error: BaseException) -> bool:
    """Return whether the log needs a traceback; for a DriverError, its text suffices."""
    if isinstance(error, DriverError):
        return isinstance(error, UnreadableError)
    return not isinstance(error, asyncio.CancelledError)
