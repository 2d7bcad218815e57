"""
One life of a Python driver: made, served and closed in a thread and event loop of its own.

What ends it ends this life alone; that it is started again is decided in :mod:`.python`, and how
calls reach it is :mod:`.bridge`'s business.

It must not know claims, slices, gRPC or the kubelet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from drakit.device import Device
from drakit.driver import Driver, DriverError
from drakit_nodeplugin.endpoints.bridge import Bridge

__all__ = ("AnyDriver", "DriverThread", "InventoryListener")

logger = logging.getLogger(__name__)

AnyDriver = Driver[Any]


class DriverFailedToStartError(Exception):
    """A driver's constructor raised something that is not about its configuration."""


class InventoryListener(Protocol):
    """Who wants to know what an endpoint has; called in the daemon's loop."""

    def replaced(self, inventory: Collection[Device]) -> None:
        """The endpoint has these devices, all of them."""
        ...

    def stopped(self, reason: str) -> None:
        """The endpoint is away; until it says otherwise its devices are as they were."""
        ...


class DriverThread:
    """One life of a driver."""

    def __init__(
        self, name: str, make: Callable[[], AnyDriver], listener: InventoryListener
    ) -> None:
        self._name = name
        self._make = make
        self._listener = listener
        self._home = asyncio.get_running_loop()
        self._started: asyncio.Future[tuple[AnyDriver, asyncio.AbstractEventLoop, Bridge]] = (
            self._home.create_future()
        )
        self._ended: asyncio.Future[str] = self._home.create_future()
        self._main: asyncio.Task[None] | None = None
        self._stopping = False
        self.yielded = False
        """Whether it ever said what it has: one that did not is restarted ever more slowly."""

    async def start(self, *, timeout_seconds: float) -> None:
        """Raises TimeoutError if it takes longer, and goes on; or whatever the driver raises."""
        # A daemon thread: a driver that hangs must not keep the process from ending.
        threading.Thread(target=self._thread, name=f"driver-{self._name}", daemon=True).start()
        async with asyncio.timeout(timeout_seconds):
            await asyncio.shield(self._started)

    @property
    def started(self) -> bool:
        """Whether it was started; it may have ended since."""
        return self._started.done() and self._started.exception() is None

    @property
    def stop_reason(self) -> str | None:
        """Why it cannot be called any more; None while it can, once it has started."""
        _, _, bridge = self._started.result()
        return bridge.stop_reason

    async def ended(self) -> str:
        """Wait for its end, and say the reason."""
        return await asyncio.shield(self._ended)

    async def stop(self, *, timeout_seconds: float) -> None:
        """End it; one that does not end in this time is left to itself."""
        self._stopping = True  # one that is only just starting is ended once it has started
        self._cancel()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.ended()
        except TimeoutError:
            logger.warning("driver does not end and is left", extra={"driver": self._name})

    async def call(
        self, function: Callable[[AnyDriver], Any], *, key: Hashable, timeout_seconds: float
    ) -> Any:
        """Call it as :meth:`.Bridge.call` does; only once it has started."""
        driver, _, bridge = self._started.result()
        return await bridge.call(lambda: function(driver), key=key, timeout_seconds=timeout_seconds)

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
        loop = asyncio.get_running_loop()
        bridge = Bridge(self._name, home=self._home, there=loop)
        self._tell(self._succeed_start, driver, loop, bridge)
        try:
            async for inventory in driver.devices():
                self._tell(self._replace, _checked_inventory(inventory))
        finally:
            bridge.end()

    def _tell(self, function: Callable[..., None], *values: Any) -> None:
        try:
            self._home.call_soon_threadsafe(function, *values)
        except RuntimeError:
            logger.debug("the daemon's loop is closed", extra={"driver": self._name})

    # ------------------------------------------------------------ in the daemon's loop again

    def _succeed_start(
        self, driver: AnyDriver, loop: asyncio.AbstractEventLoop, bridge: Bridge
    ) -> None:
        if not self._started.done():
            self._started.set_result((driver, loop, bridge))
        if self._stopping:
            self._cancel()

    def _cancel(self) -> None:
        if self.started and self._main is not None:
            _, loop, _ = self._started.result()
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
        if self.started:
            _, _, bridge = self._started.result()
            bridge.close(reason)


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
