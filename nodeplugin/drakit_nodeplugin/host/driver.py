"""
One hosted driver in one instance of the plugin: the servers that the kubelet calls, and the active
driver while this instance has the lock.

The sockets are created first, within a second of the start. If no other instance has the lock, the
driver becomes active during the start. Otherwise, this instance requests the **hand-over**. Until
it is complete, the kubelet's calls wait, and the pod is not ready. The other instance makes new
calls wait, finishes the calls in flight, however long they take, and closes the driver and the
checkpoint. It releases the lock once no part of the driver is running. It remains ready, and
becomes active again if this instance ends.

If any part of a driver fails unexpectedly, the driver is closed, and restarted after a delay. An
error in one driver must not affect the other drivers in the process.

Stop order: calls are served until none is in flight, or canceled after the drain timeout. Then the
sockets are removed, the active driver is closed, and the lock is released. A driver that does not
end keeps the lock until the process ends.

:mod:`.active_driver` assembles the driver, :mod:`.drivers` manages the set of drivers, and
:mod:`drakit_nodeplugin.state.lock` decides which instance is active.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Literal

from drakit_daemon import tasks
from drakit_daemon.backoff import Backoff
from drakit_driver.runtime.contract import CALL_SECONDS
from drakit_nodeplugin.config import ConfigError
from drakit_nodeplugin.endpoints.sources import DriverSource
from drakit_nodeplugin.host.active_driver import ActiveDriver
from drakit_nodeplugin.host.node import Environment, NodeEvents
from drakit_nodeplugin.kubelet.server import DriverServer
from drakit_nodeplugin.kubelet.sockets import SocketError, socket_paths
from drakit_nodeplugin.state.checkpoint import CheckpointError
from drakit_nodeplugin.state.inspection import read_device_numbers
from drakit_nodeplugin.state.lock import DriverLock

logger = logging.getLogger(__name__)

UNREGISTERED_SECONDS = 10.0
"""How long a new instance that the kubelet has not registered waits before it requests the
hand-over. Until it is registered, calls still go to the other instance."""

HAND_OVER_SECONDS = CALL_SECONDS + 30.0
"""How long a hand-over waits for calls in flight before it cancels them. If the driver still does
not end, the process must restart, because a thread cannot be killed, and the other instance is
waiting for the lock."""

ENDED_SECONDS = 0.1
"""How long to wait for a closed driver to end. After that, it keeps the lock until the process
ends."""

RESTART_SECONDS = (1.0, 60.0)
"""Initial and maximum delay before a failed driver restarts."""

LONG_SECONDS = 60.0
"""Time between two log lines about an unfinished hand-over."""


class HostedDriver:
    """A driver in this instance of the plugin."""

    def __init__(self, driver: DriverSource, environment: Environment) -> None:
        """Create the servers. Raises :class:`SocketError` if the paths of the sockets are too
        long."""
        config = environment.config
        self.name = driver.name
        self._driver = driver
        self._environment = environment
        self._data = config.drivers_directory / driver.name
        self._drain_seconds = config.drain_timeout.total_seconds()
        self._events = NodeEvents(environment.node.name, environment.session)
        self._lock = DriverLock(driver.name, self._data, instance_uid=environment.instance_uid)
        self._server = DriverServer(
            socket_paths(
                driver.name,
                kubelet_root=config.kubelet_root,
                instance_uid=environment.instance_uid,
            ),
            reports_health=driver.traits.health,
            health_timeout_seconds=config.devices.health.timeout,
        )
        # The series of all drivers exist from the start, in the order of the configuration.
        environment.metrics.for_driver(driver.name)
        self._active: ActiveDriver | None = None
        self._failure: str | None = None
        """The error that ended the driver. None once the driver is active again."""
        self._backoff = Backoff(*RESTART_SECONDS)
        self._has_ended = True
        """Whether no part of a closed driver is still running."""
        self._stuck: str | None = None
        """The reason why a hand-over cannot end without a restart of the process."""

    async def start(self) -> None:
        """Serve the kubelet, and activate the driver unless another instance is active. Raises
        :class:`ConfigError` if that fails. After an unexpected error, :meth:`parts` retry."""
        try:
            await self._server.start()
            held = await self._lock.try_acquire()
        except (OSError, SocketError) as error:
            raise ConfigError(f"driver {self.name}: {error}") from error
        if held:
            try:
                await self._activate()
            except ConfigError:
                raise
            except Exception as error:
                self._report_failure(error)
        else:
            await self._read_numbers()

    def parts(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Return the parts that run until the daemon stops, keyed by name."""
        poller = self._environment.file_poller
        return {
            f"{self.name} server": lambda: self._server.run(poller),
            f"{self.name} instance": self._run,
            f"{self.name} Events of the node": self._events.run,
        }

    async def stop(self) -> None:
        """Stop in order. Does not raise."""
        await self.stop_serving()
        await self._server.stop()
        if self._active is not None:
            await self._close(self._active)
        if self._has_ended:
            await self._lock.release()

    async def stop_serving(self) -> None:
        """Serve calls until none is in flight, or until the drain timeout. After that, refuse
        calls. :meth:`stop` stops everything else."""
        # Keep serving new calls: a call that is refused fails, which delays the start of its pod.
        active = self._active
        if active is not None and not await active.queue.drain(timeout_seconds=self._drain_seconds):
            self._server.refuse()
            await active.queue.cancel()
        self._server.refuse()

    async def idle(self) -> bool:
        """Return whether this instance is active, and the driver has neither devices nor claims."""
        return self._active is not None and await self._active.idle()

    # ------------------------------------------------------------ activity

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_at = loop.time()
            try:
                if self._active is None:
                    if not self._lock.held:
                        await self._wait_for_lock()
                    await self._activate()
                    await self._server.forget_ended()
                    freeze_objects()
                await self._work()
            except ConfigError:  # the process ends, and the other instance becomes active again
                raise
            except Exception as error:
                self._report_failure(error)
                await self._end_failed()
                if loop.time() - began_at > RESTART_SECONDS[1]:
                    self._backoff.succeeded()
                await asyncio.sleep(self._backoff.next_seconds())
            freeze_objects()

    def _report_failure(self, error: Exception) -> None:
        broken = None if self._active is None else self._active.broken
        self._failure = broken or "an internal error of the node plugin ended the driver"
        logger.error(
            "driver failed; it is started again", extra={"driver": self.name}, exc_info=error
        )
        self._events.emit(
            reason="EndpointStopped",
            action="Restart",
            note=f"driver {self.name} is unavailable: {self._failure}; the node plugin starts it "
            "again, and its log on this node has the error",
        )

    async def _end_failed(self) -> None:
        """Close what is left of a failed driver. If its thread does not end, raise an error,
        because the process must then end."""
        self._server.serve(None)
        if self._active is not None:
            await self._active.queue.cancel()
            await self._active.close()
            async with asyncio.timeout(HAND_OVER_SECONDS):
                await self._active.ended()
            self._active = None
        self._environment.metrics.forget(self.name)
        await self._lock.release()

    async def _wait_for_lock(self) -> None:
        facts = {"driver": self.name}
        logger.info("another instance is active", extra=facts)
        ask_at = asyncio.get_running_loop().time() + UNREGISTERED_SECONDS

        def may_ask() -> bool:
            is_registered = self._server.registration.registered.is_set()
            return is_registered or asyncio.get_running_loop().time() >= ask_at

        message = "the active instance has not handed over yet"
        log_level = logging.INFO if self._lock.handed_over else logging.WARNING
        async with _reported(log_level, message, facts):
            await self._lock.acquire(may_ask=may_ask)

    async def _activate(self) -> None:
        active = ActiveDriver(
            self._driver,
            self._environment,
            events=self._events,
            registration=self._server.registration,
        )
        try:
            await active.start()
        except BaseException:
            await self._close(active)
            raise
        self._active = active
        self._failure = None
        self._server.serve(active.queue, active.health)
        logger.info("this instance is active", extra={"driver": self.name})

    async def _close(self, active: ActiveDriver) -> None:
        """Close a driver before the process ends."""
        self._has_ended = False
        await active.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDED_SECONDS):
                await active.ended()
                self._has_ended = True

    async def _work(self) -> None:
        """Run the active driver until another instance requests the hand-over, and then hand the
        driver over."""
        active = self._active
        assert active is not None
        facts = {"driver": self.name}
        async with asyncio.TaskGroup() as group:
            maintenance = group.create_task(tasks.run(active.maintenance()))
            parts = group.create_task(tasks.run(active.parts()))
            if await self._until_asked() == "lost":
                logger.error("data directory was replaced, restoring it", extra=facts)
                await active.restore_checkpoint()
            else:
                logger.info("another instance requests the driver", extra=facts)
            self._server.serve(None)
            deadline = asyncio.get_running_loop().time() + HAND_OVER_SECONDS
            message = "driver is not handed over yet: calls are in flight"
            async with _reported(logging.WARNING, message, facts):
                if not await active.queue.drain(timeout_seconds=HAND_OVER_SECONDS):
                    await active.queue.cancel()  # cancel the calls that the driver has not ended
            maintenance.cancel()
            parts.cancel()
        await active.close()
        message = "driver is not handed over yet: its thread has not ended"
        async with _reported(logging.WARNING, message, facts):
            try:
                async with asyncio.timeout_at(deadline):
                    await active.ended()
            except TimeoutError:
                self._stuck = f"the thread of driver {self.name} does not end"
                await active.ended()
        self._active = self._stuck = None
        self._environment.metrics.forget(self.name)
        await self._lock.release()
        logger.info("driver handed over", extra=facts)

    async def _until_asked(self) -> Literal["asked", "lost"]:
        while True:
            asked = await self._lock.until_asked(self._environment.file_poller)
            if asked != "ignored":
                return asked
            logger.warning(
                "a former active instance requests the driver again; ignoring it for a while",
                extra={"driver": self.name},
            )
            # The kubelet calls the other instance, which has registered more recently but cannot
            # respond.
            self._server.register_again()

    async def _read_numbers(self) -> None:
        """Read the device numbers that this driver's claims hold, so that claims of other drivers
        don't get them. Until the hand-over, the active instance may add numbers that this instance
        does not know. The risk is small, and does not justify the cost of a lock."""
        numbers = self._environment.numbers
        try:
            claims = await asyncio.to_thread(read_device_numbers, self._data / "checkpoint.db")
        except CheckpointError as error:
            facts = {"driver": self.name, "error": str(error)}
            logger.warning("held device numbers cannot be read", extra=facts)
            numbers.give_up(self.name)
        else:
            numbers.load(self.name, claims)

    # ------------------------------------------------------------ probes and metrics

    async def liveness_problem(self) -> str | None:
        """Return the reason why the process must restart, or None. Either its sockets do not
        respond, or a driver that another instance is waiting for does not end."""
        return self._stuck or await self._server.probe()

    def readiness_problem(self) -> str | None:
        """Return the problem that prevents pods from getting devices, or None. An instance that has
        handed over remains ready, because the other instance is active."""
        if self._active is not None:
            registration = self._server.registration.status
            return self._active.readiness_problem() or registration.readiness_problem()
        if self._failure is not None:
            return self._failure
        if self._lock.handed_over:
            return None
        if self._lock.held:
            return "the driver is starting"
        return (
            "another instance of the node plugin is active for the driver, and has not handed over "
            "yet"
        )

    async def measure(self) -> None:
        """Update the gauges."""
        if self._active is not None:
            await self._active.measure()


@asynccontextmanager
async def _reported(level: int, message: str, facts: Mapping[str, str]) -> AsyncGenerator[None]:
    """Log a message periodically while the ``async with`` block is running."""

    async def report() -> None:
        while True:
            await asyncio.sleep(LONG_SECONDS)
            logger.log(level, message, extra=dict(facts))

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        reporting.cancel()


def freeze_objects() -> None:
    """Exclude all existing objects from full garbage collections, because most of them are
    permanent. A collection then blocks all calls for one millisecond instead of twenty."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
