"""
Asks a driver, in its own loop, how each of its devices is: again and again, and tells what changed.

A device is asked anew some time after its last answer, so a driver that is slow is asked less
often. Nobody waits for these calls, and they do not wait for others of the same device.

It must not know what health leads to, or who is told.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
import logging
import operator
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypeGuard

from drakit.device import Device, Health, Inventory
from drakit.driver import Driver, DriverError
from drakit_nodeplugin.endpoints.endpoint import DeviceKey
from drakit_nodeplugin.endpoints.errors import kind_of, text_of, traceback_of
from drakit_nodeplugin.endpoints.python.snapshot import snapshot_of

__all__ = ("HealthPolling",)

logger = logging.getLogger(__name__)

CONCURRENCY = 16
"""Calls at a time: enough to hide a slow bus, few enough to leave the loop to claims."""

TIMEOUT_SECONDS = 30.0
"""After which a call is cancelled, and nobody knows how its device is."""

SHORTEST_PERIOD_SECONDS = 0.1
"""However often the driver wants to be asked."""

TOLERANCE_SECONDS = 0.001
"""How much too early a device may be asked: timers are no more exact than that."""

MAX_MESSAGE = 1024
"""Characters that the kubelet takes."""


class _Polled:
    """A device that is asked for its health."""

    __slots__ = ("device", "key", "overdue", "task", "told")

    def __init__(self, key: DeviceKey, device: Device) -> None:
        self.key = key
        self.device: Device | None = device
        """None if it is gone, and only waits for the end of a call."""

        self.told: Health | None = None
        self.task: asyncio.Task[Any] | None = None
        self.overdue = False
        """Whether the call had its time: it may go on for as long as it likes, and counts no more
        but that it keeps the next one of its device from beginning."""


class HealthPolling:
    """Polls the devices of one driver, in the loop in which it is made and used."""

    def __init__(
        self, name: str, driver: Driver[Any, Any], report: Callable[[DeviceKey, Health], None]
    ) -> None:
        """`report` is told of each device's first health and of each change."""
        self._name = name
        self._driver = driver
        self._report = report
        self._period = max(float(driver.health_period_seconds), SHORTEST_PERIOD_SECONDS)
        self._loop = asyncio.get_running_loop()
        self._devices: Collection[Device] = ()
        self._polled: dict[DeviceKey, _Polled] = {}
        self._due: list[tuple[float, int, _Polled]] = []
        """A heap; entries of devices that have gone since are passed over."""
        self._order = itertools.count()
        self._asking = 0
        """Calls that have not had their time yet."""
        self._wake = asyncio.Event()
        self._logged: set[str] = set()

    def replaced(self, given: Inventory, ours: Inventory) -> None:
        """There are these devices now, those of the fallback as well; new ones are asked at once.

        The driver is asked for its own objects, by keys of the snapshots."""
        devices = *given.devices, *(given.fallback or ())
        same = len(devices) == len(self._devices) and all(map(operator.is_, devices, self._devices))
        if same:
            return
        self._devices = devices
        present: set[DeviceKey] = set()
        for device, known in zip(devices, (*ours.devices, *(ours.fallback or ())), strict=True):
            if isinstance(known.name, str) and isinstance(known.pool, str):  # pyright: ignore[reportUnnecessaryIsInstance] - vendors
                key = DeviceKey(known.pool, known.name)
                if key not in present:  # of two with one name it is the first
                    present.add(key)
                    self._add(key, device)
        for key in self._polled.keys() - present:
            self._remove(key)

    def _add(self, key: DeviceKey, device: Device) -> None:
        polled = self._polled.get(key)
        if polled is not None:
            polled.device = device
        else:
            polled = self._polled[key] = _Polled(key, device)
            self._plan(polled, self._loop.time())

    def _remove(self, key: DeviceKey) -> None:
        polled = self._polled[key]
        polled.device = polled.told = None
        if polled.task is None:
            del self._polled[key]

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            now = self._loop.time()
            soon = now + TOLERANCE_SECONDS
            while self._due and self._due[0][0] <= soon and self._asking < CONCURRENCY:
                polled = heapq.heappop(self._due)[2]
                if self._polled.get(polled.key) is polled:
                    self._ask(polled)
            delay = None
            if self._due and self._asking < CONCURRENCY:
                delay = self._due[0][0] - now
            self._wake.clear()
            try:
                async with asyncio.timeout(delay):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _plan(self, polled: _Polled, at: float) -> None:
        heapq.heappush(self._due, (at, next(self._order), polled))
        self._wake.set()

    # ------------------------------------------------------------ one call

    def _ask(self, polled: _Polled) -> None:
        assert polled.device is not None
        self._asking += 1
        polled.overdue = False
        polled.task = self._loop.create_task(self._call(polled.device))
        timer = self._loop.call_later(TIMEOUT_SECONDS, self._give_up, polled)
        polled.task.add_done_callback(lambda task: self._ended(polled, task, timer))

    async def _call(self, device: Device) -> object:
        answer = self._driver.health(device)
        return await answer if inspect.isawaitable(answer) else answer

    def _give_up(self, polled: _Polled) -> None:
        if polled.task is None:
            return
        polled.overdue = True
        polled.task.cancel()
        self._release()
        text = f"the driver did not say within {TIMEOUT_SECONDS:.0f} s how it is"
        self._tell(polled, Health.unknown(text))

    def _ended(
        self, polled: _Polled, task: asyncio.Task[object], timer: asyncio.TimerHandle
    ) -> None:
        timer.cancel()
        polled.task = None
        if not polled.overdue:
            self._release()
        health = self._health(task)
        if polled.device is None:
            del self._polled[polled.key]
            return
        if not polled.overdue:
            self._tell(polled, health)
        self._plan(polled, self._loop.time() + self._period)

    def _release(self) -> None:
        self._asking -= 1
        self._wake.set()

    def _tell(self, polled: _Polled, health: Health) -> None:
        if polled.device is not None and health != polled.told:
            polled.told = health
            self._report(polled.key, health)

    # ------------------------------------------------------------ what the answer is

    def _health(self, task: asyncio.Task[object]) -> Health:
        if task.cancelled():
            return Health.unknown("the driver's call was cancelled, and not by us")
        error = task.exception()
        if isinstance(error, DriverError):
            return Health.unknown(text_of(error)[:MAX_MESSAGE])
        if error is not None:  # SystemExit is on its way through the loop, and logged there
            kind = kind_of(error)
            text = f"{kind}: {text_of(error)}"
            if isinstance(error, Exception):
                self._log_once(kind, "driver fails to tell health", error)
            return Health.unknown(f"the driver failed to say: {text}"[:MAX_MESSAGE])
        answer = task.result()
        with suppress(Exception):  # its class may be the vendor's own, and raise when it is read
            if _is_health(answer):
                return snapshot_of(answer)
        text = f"the driver answered {kind_of(answer)}, which is no Health that there is"
        self._log_once("answer", text, None)
        return Health.unknown(text)

    def _log_once(self, kind: str, text: str, error: BaseException | None) -> None:
        """Once in each life of the driver, not for each of its devices every few seconds."""
        if kind not in self._logged:
            self._logged.add(kind)
            facts = {"driver": self._name, "error": text}
            if error is not None:
                facts["exception"] = traceback_of(error)
            logger.error("health cannot be told", extra=facts)


def _is_health(answer: object) -> TypeGuard[Health]:
    return (
        isinstance(answer, Health)
        and answer.status in ("healthy", "unhealthy", "unknown")
        and isinstance(answer.message, str)  # pyright: ignore[reportUnnecessaryIsInstance] - vendors
    )
