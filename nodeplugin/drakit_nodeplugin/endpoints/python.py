"""
An endpoint that is a Python driver: a vendor's class in a thread and event loop of its own.

Vendor code never runs in the loop that answers the kubelet: a driver that blocks, raises, or ends
its thread hurts only its own calls. What a thread cannot contain (crashes, code that holds the
GIL) needs a process of its own. What devices mean is the device manager's business.

It must not know claims beyond their identity, slices, gRPC or the kubelet.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from drakit.device import AllocatedDevice, ClaimReference, Device, Edits
from drakit.driver import Driver, DriverError
from drakit.tasks import cancelled_by_owner
from drakit_nodeplugin.endpoints.errors import EndpointStoppedError

__all__ = ("AnyDriver", "InventoryListener", "PythonEndpoint")

logger = logging.getLogger(__name__)

CALL_SECONDS = 300.0
"""After which a call of a driver is cancelled. The kubelet is told long before that it goes on."""

START_SECONDS = 10.0
"""How long making a driver may take before the daemon goes on without it."""

CLOSE_SECONDS = 5.0
"""How long a driver may take to end; its thread does not hold the process up."""

RESTART_SECONDS = (1.0, 60.0)
"""First and longest delay before a driver that ended is started again; it doubles in between."""

AnyDriver = Driver[Any]
ResultT = TypeVar("ResultT")


class InventoryListener(Protocol):
    """Who wants to know what an endpoint has; called in the daemon's loop."""

    def replaced(self, inventory: Collection[Device]) -> None:
        """The endpoint has these devices, all of them."""
        ...

    def stopped(self, reason: str) -> None:
        """The endpoint is away; until it says otherwise its devices are as they were."""
        ...


class PythonEndpoint:
    """Runs one driver, again and again, and calls it."""

    def __init__(
        self, name: str, make: Callable[[], AnyDriver], *, listener: InventoryListener
    ) -> None:
        self.name = name
        self._make = make
        self._listener = listener
        self._run: _DriverThread | None = None
        self._reason = "it is not started yet"

    async def start(self) -> None:
        """
        Start the driver once, before anything is served.

        Raises :class:`DriverError` if the driver refuses its configuration. Any other failure
        is treated as a stop, and :meth:`run` starts it again; a driver that is only slow is
        taken when it is ready.
        """
        run = self._run = _DriverThread(self.name, self._make, self._listener)
        try:
            await run.start()
        except DriverError:
            self._run = None
            raise
        except TimeoutError:
            # Nothing can end its thread. Another beside it would hang as well, and a driver that
            # takes longer than this would never be there.
            self._stopped(f"it is still starting after {START_SECONDS:.0f} s")
            logger.error("driver is slow to start", extra={"driver": self.name})
        except Exception as error:
            self._run = None
            self._stopped(f"it could not be started: {error}")
            logger.exception("driver could not be started", extra={"driver": self.name})

    async def run(self) -> None:
        """Keep the driver running until cancelled."""
        delay, longest = RESTART_SECONDS
        while True:
            if self._run is not None:
                self._stopped(await self._run.ended())
                logger.error("driver stopped", extra={"driver": self.name, "reason": self._reason})
                if self._run.yielded:
                    delay = RESTART_SECONDS[0]
                self._run = None
            await asyncio.sleep(delay)
            delay = min(delay * 2, longest)
            try:
                await self.start()
            except DriverError as error:
                self._stopped(str(error))

    def _stopped(self, reason: str) -> None:
        self._reason = reason
        self._listener.stopped(reason)

    async def close(self) -> None:
        """Stop the driver; what is prepared stays prepared."""
        if self._run is not None:
            await self._run.stop()
            self._run = None
            self._reason = "the node plugin stops"

    async def prepare(self, claim: ClaimReference, device: AllocatedDevice) -> Edits:
        """Call the driver; raises DriverError and EndpointStoppedError, and nothing else."""
        answer = await self._call("prepare", lambda driver: driver.prepare(claim, device))
        return _checked_edits(answer, driver=self.name)

    async def unprepare(self, claim: ClaimReference, device: AllocatedDevice) -> None:
        """Call the driver; raises DriverError and EndpointStoppedError, and nothing else."""
        await self._call("unprepare", lambda driver: driver.unprepare(claim, device))

    async def _call(
        self, what: str, call: Callable[[AnyDriver], Coroutine[Any, Any, ResultT]]
    ) -> ResultT:
        run = self._run
        if run is None or not run.started:
            raise EndpointStoppedError(driver=self.name, reason=self._reason)
        limit = asyncio.timeout(CALL_SECONDS)
        try:
            async with limit:
                return await run.call(call)
        except (DriverError, EndpointStoppedError):
            raise
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            raise EndpointStoppedError(driver=self.name, reason="it ended meanwhile") from None
        except Exception as error:
            # A driver may run into timeouts of its own.
            if isinstance(error, TimeoutError) and limit.expired():
                raise DriverError(
                    f"driver {self.name} gave no answer to {what} within {CALL_SECONDS:.0f} s"
                ) from None
            logger.exception("driver failed", extra={"driver": self.name, "call": what})
            text = f"driver {self.name} failed in {what}: {type(error).__name__}: {error}"
            raise DriverError(text) from error


def _checked_edits(answer: object, *, driver: str) -> Edits:
    if not isinstance(answer, Edits):
        raise DriverError(
            f"driver {driver} answered prepare with {type(answer).__name__}, which is no Edits; "
            f"this is a fault of the driver"
        )
    return answer


def _checked_inventory(inventory: Iterable[object]) -> tuple[Device, ...]:
    devices: list[Device] = []
    for device in inventory:
        if not isinstance(device, Device):
            raise DriverError(
                f"it listed {type(device).__name__}, which is no Device; this is a fault of the "
                f"driver"
            )
        devices.append(device)
    return tuple(devices)


class _DriverThread:
    """One life of a driver."""

    def __init__(
        self, name: str, make: Callable[[], AnyDriver], listener: InventoryListener
    ) -> None:
        self._name = name
        self._make = make
        self._listener = listener
        self._home = asyncio.get_running_loop()
        self._started: asyncio.Future[tuple[AnyDriver, asyncio.AbstractEventLoop]] = (
            self._home.create_future()
        )
        self._ended: asyncio.Future[str] = self._home.create_future()
        self._main: asyncio.Task[None] | None = None
        self._stopping = False
        self.yielded = False
        """Whether it ever said what it has: one that did not is restarted ever more slowly."""

    async def start(self) -> None:
        # A daemon thread: a driver that hangs must not keep the process from ending.
        threading.Thread(target=self._thread, name=f"driver-{self._name}", daemon=True).start()
        async with asyncio.timeout(START_SECONDS):
            await asyncio.shield(self._started)

    @property
    def started(self) -> bool:
        """Whether it can be called."""
        return self._started.done() and self._started.exception() is None

    async def ended(self) -> str:
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        self._stopping = True  # one that is only just starting is ended once it has started
        self._cancel()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.ended()
        except TimeoutError:
            logger.warning("driver does not end and is left", extra={"driver": self._name})

    async def call(self, call: Callable[[AnyDriver], Coroutine[Any, Any, ResultT]]) -> ResultT:
        driver, loop = self._started.result()
        if self._ended.done():
            raise EndpointStoppedError(driver=self._name, reason=self._ended.result())

        async def call_there() -> ResultT:
            # Not before: a method that is no coroutine function would run in the daemon's loop.
            return await call(driver)

        work = call_there()
        try:
            future = asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError as error:  # its loop was closed a moment ago
            work.close()
            raise EndpointStoppedError(driver=self._name, reason="it ended") from error
        answer = asyncio.wrap_future(future)
        try:
            await asyncio.wait({answer, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        finally:
            answer.cancel()
        # It came when the loop was about to be closed, and nobody will ever run it.
        if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            work.close()
        raise EndpointStoppedError(driver=self._name, reason=self._ended.result())

    # ------------------------------------------------------------ in the driver's thread

    def _thread(self) -> None:
        reason = "its stream ended"
        try:
            driver = self._make()
            try:
                asyncio.run(self._serve(driver))
            finally:
                driver.close()
        except asyncio.CancelledError:
            reason = "the node plugin stops"
        except DriverError as error:
            reason = str(error)
            self._tell(self._fail_start, error)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            logger.error("driver ended", exc_info=error, extra={"driver": self._name})
            self._tell(self._fail_start, DriverFailedToStartError(reason))
        self._tell(self._end, reason)

    async def _serve(self, driver: AnyDriver) -> None:
        self._main = asyncio.current_task()
        self._tell(self._succeed_start, driver, asyncio.get_running_loop())
        async for inventory in driver.devices():
            self._tell(self._replace, _checked_inventory(inventory))

    def _tell(self, function: Callable[..., None], *values: Any) -> None:
        try:
            self._home.call_soon_threadsafe(function, *values)
        except RuntimeError:
            logger.debug("the daemon's loop is closed", extra={"driver": self._name})

    # ------------------------------------------------------------ in the daemon's loop again

    def _succeed_start(self, driver: AnyDriver, loop: asyncio.AbstractEventLoop) -> None:
        if not self._started.done():
            self._started.set_result((driver, loop))
        if self._stopping:
            self._cancel()

    def _cancel(self) -> None:
        if self.started and self._main is not None:
            _, loop = self._started.result()
            with suppress(RuntimeError):  # closed already: it is ending
                loop.call_soon_threadsafe(self._main.cancel)

    def _fail_start(self, error: Exception) -> None:
        if not self._started.done():
            self._started.set_exception(error)
            self._started.exception()  # heard, whoever else awaits it

    def _replace(self, inventory: tuple[Device, ...]) -> None:
        self.yielded = True
        self._listener.replaced(inventory)

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)


class DriverFailedToStartError(Exception):
    """A driver's constructor raised something that is not about its configuration."""
