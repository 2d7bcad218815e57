"""
Polls the health of a Python driver's devices, in the driver's own loop.

Does not depend on threads.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from drakit.device import Device, Health, Inventory
from drakit.driver import Driver, DriverError
from drakit_driver.runtime.contract import MALFORMED_HEALTH, DeviceKey, validated_health
from drakit_driver.runtime.failures import (
    CallCancelledError,
    kind_and_text,
    kind_of,
    text_of,
    traceback_of,
)
from drakit_driver.runtime.snapshot import snapshot_of

logger = logging.getLogger(__name__)

CONCURRENCY = 16
"""Maximum number of concurrent calls: enough to hide the latency of a slow bus, but few enough to
leave time for claims."""

TIMEOUT_SECONDS = 30.0
"""Time limit for a call. When it expires, the call is canceled, and the health of the device
becomes unknown."""

SHORTEST_PERIOD_SECONDS = 0.1
"""The minimum polling period, even if the driver sets a shorter one."""

TOLERANCE_SECONDS = 0.001
"""Devices that are due within this time are polled together, because timers are not precise enough
to tell them apart."""

MAX_MESSAGE = 1024
"""Maximum length of a health message that the kubelet accepts."""


class _Polled:
    """A device whose health is polled."""

    __slots__ = ("device", "is_overdue", "key", "reported", "task")

    def __init__(self, key: DeviceKey, device: Device) -> None:
        self.key = key
        self.device: Device | None = device
        """The device. None if the device is gone but its call has not ended."""

        self.reported: Health | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_overdue = False
        """Whether the call has timed out. It may still be running, but delays only the next call
        for its device."""


class HealthPolling:
    """Polls the devices of one driver, in the loop in which the object was created."""

    def __init__(
        self, name: str, driver: Driver[Any, Any], report: Callable[[DeviceKey, Health], None]
    ) -> None:
        """Create the poller. `report` is called with the first health of each device, and with each
        change."""
        self._name = name
        self._driver = driver
        self._report = report
        self._period = max(float(driver.health_period_seconds), SHORTEST_PERIOD_SECONDS)
        self._loop = asyncio.get_running_loop()
        self._polled: dict[DeviceKey, _Polled] = {}
        self._due: list[tuple[float, int, _Polled]] = []
        """A heap of devices by due time. Entries for devices that are gone are skipped."""
        self._order = itertools.count()
        self._calls = 0
        """The number of calls in flight that have not timed out."""
        self._wake = asyncio.Event()
        self._logged: set[str] = set()

    def replaced(self, given: Inventory, ours: Inventory) -> None:
        """From now on, poll the devices of this inventory and of its fallback. New devices are
        polled immediately. `health` is called with the driver's own objects, but the reports use
        the keys of the snapshots."""
        devices = *given.devices, *(given.fallback or ())
        present: set[DeviceKey] = set()
        for device, known in zip(devices, (*ours.devices, *(ours.fallback or ())), strict=True):
            if isinstance(known.name, str) and isinstance(known.pool, str):  # pyright: ignore[reportUnnecessaryIsInstance] - vendors
                key = DeviceKey(known.pool, known.name)
                if key not in present:  # if two devices have the same key, the first one applies
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
        polled.device = polled.reported = None
        if polled.task is None:
            del self._polled[key]

    async def run(self) -> None:
        """Poll until canceled."""
        while True:
            now = self._loop.time()
            soon = now + TOLERANCE_SECONDS
            while self._due and self._due[0][0] <= soon and self._calls < CONCURRENCY:
                polled = heapq.heappop(self._due)[2]
                if self._polled.get(polled.key) is polled and polled.device is not None:
                    self._calls += 1
                    polled.is_overdue = False
                    polled.task = self._loop.create_task(self._poll(polled, polled.device))
                    polled.task.add_done_callback(_retrieve)
            delay = None
            if self._due and self._calls < CONCURRENCY:
                delay = self._due[0][0] - now
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wake.wait()

    def _plan(self, polled: _Polled, at: float) -> None:
        heapq.heappush(self._due, (at, next(self._order), polled))
        self._wake.set()

    # ------------------------------------------------------------ one call

    async def _poll(self, polled: _Polled, device: Device) -> None:
        timer = self._loop.call_later(TIMEOUT_SECONDS, self._give_up, polled)
        health = await self._ask(device)
        timer.cancel()
        polled.task = None
        if not polled.is_overdue:
            self._release()
        if polled.device is None:
            del self._polled[polled.key]
            return
        if not polled.is_overdue:
            self._notify(polled, health)
        self._plan(polled, self._loop.time() + self._period)

    def _give_up(self, polled: _Polled) -> None:
        if polled.task is not None:
            polled.is_overdue = True
            polled.task.cancel()
            self._release()
            text = f"the driver did not respond within {TIMEOUT_SECONDS:.0f} s"
            self._notify(polled, Health.unknown(text))

    def _release(self) -> None:
        self._calls -= 1
        self._wake.set()

    def _notify(self, polled: _Polled, health: Health) -> None:
        if polled.device is not None and health != polled.reported:
            polled.reported = health
            self._report(polled.key, health)

    async def _ask(self, device: Device) -> Health:
        try:
            answer = cast("object", self._driver.health(device))
            answer = await answer if inspect.isawaitable(answer) else answer
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            raise  # the loop is ending
        except asyncio.CancelledError:
            return Health.unknown(str(CallCancelledError()))
        except DriverError as error:
            return Health.unknown(text_of(error)[:MAX_MESSAGE])
        except BaseException as error:  # a PyO3 panic is not an Exception
            self._log_once(kind_of(error), "driver fails to report health", error)
            return Health.unknown(f"the driver failed: {kind_and_text(error)}"[:MAX_MESSAGE])
        with suppress(Exception):  # the vendor's own class may raise when it is read
            if (health := validated_health(snapshot_of(answer))) is not MALFORMED_HEALTH:
                return health
        text = f"the driver returned {kind_of(answer)}, which is not a valid Health"
        self._log_once("answer", text, None)
        return Health.unknown(text)

    def _log_once(self, kind: str, text: str, error: BaseException | None) -> None:
        """Log a kind of problem once per connection, instead of for each device every few
        seconds."""
        if kind not in self._logged:
            self._logged.add(kind)
            facts = {"driver": self._name, "error": text}
            if error is not None:
                facts["exception"] = traceback_of(error)
            logger.error("health is unknown", extra=facts)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve the task's exception, so that asyncio does not log it. The loop raises a SystemExit
    anyway."""
    if not task.cancelled():
        task.exception()
