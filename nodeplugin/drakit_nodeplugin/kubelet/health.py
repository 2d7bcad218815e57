"""
What the kubelet is told of the devices' health, and when: at once, at each change, and again.

The kubelet believes in a device's health for as long as it was told to, so all of it is told again
at a third of that time. How messages look is said in :mod:`.healthservice`; what health a device
has, by the source.

It must not know gRPC, or how health is found out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from drakit import logs
from drakit_nodeplugin.devices.model import DeviceHealth, Revision

__all__ = ("HealthReports", "HealthSource", "StreamLog", "Subscription", "logged_stream", "shown")

logger = logging.getLogger(__name__)

PACE_SECONDS = 0.2
"""From one look at the devices to the next: a driver whose devices flap by the thousand makes five
messages a second of it."""

MAX_DEVICES = 500
"""Of one message: with the longest names and texts less than 1 MiB, and the kubelet takes 4."""

MAX_MESSAGE_BYTES = 1024
"""What the kubelet would cut itself: it counts bytes, and cuts through characters."""

CUT = "..."

MAX_LOGGED = 10
"""Devices that one log line names; it counts the rest."""

MAX_LOGGED_CHARACTERS = 200
"""Characters of a device's message in the log: vendors write these texts."""

GONE = "the driver does not list the device any more"

_Told = Mapping[tuple[str, str], DeviceHealth]
"""Health by pool and device."""


class HealthSource(Protocol):
    """Who knows the health of a driver's devices. Used in one event loop."""

    @property
    def revision(self) -> Revision:
        """Advances at each change of a device's health, and may advance for anything else."""
        ...

    def health_states(self) -> Sequence[DeviceHealth]:
        """Give the health of every device: at best the same object for as long as none of them
        changed, and never an object that was given before and has changed since."""
        ...


class HealthReports:
    """The reports on one driver's devices, to any number of subscribers."""

    def __init__(self, source: HealthSource, *, driver: str, timeout_seconds: float) -> None:
        """The timeout is how long the kubelet believes in what it was told."""
        self.timeout_seconds = max(1, math.ceil(timeout_seconds))
        """In the whole seconds that a message can hold."""

        self._source = source
        self._driver = driver
        self._ended = asyncio.Event()

    def end(self) -> None:
        """End all subscriptions, those to come included."""
        self._ended.set()

    @contextmanager
    def stream(self, method: str) -> Generator[Subscription]:
        """Subscribe for one stream, and log its start and end."""
        with logged_stream(self._driver, method, ended=self._ended) as log:
            yield self.subscribe(log)

    def subscribe(self, log: StreamLog) -> Subscription:
        """Begin a subscription that logs its changes here."""
        resend_seconds = self.timeout_seconds / 3
        return Subscription(self._source, resend_seconds=resend_seconds, ended=self._ended, log=log)


class StreamLog:
    """
    The log lines of one stream, under a request id of its own.

    The id is set for each line only: a stream is an asynchronous generator, which may be closed in
    a different context from the one that started it.
    """

    def __init__(self, driver: str, method: str) -> None:
        self._request_id = logs.new_request_id()
        self._facts = {"driver": driver, "method": method}

    def info(self, message: str, **facts: object) -> None:
        """Log a line."""
        with logs.request_scope(self._request_id):
            logger.info(message, extra=self._facts | facts)

    def changes(self, changes: Sequence[DeviceHealth]) -> None:
        """Log the changes that the kubelet receives, in one line of limited size."""
        named = [f"{each.pool}/{each.device} {_in_words(each)}" for each in changes[:MAX_LOGGED]]
        if len(changes) > MAX_LOGGED:
            named.append(f"and {len(changes) - MAX_LOGGED} more")
        unhealthy = sum(each.status == "unhealthy" for each in changes)
        self.info(
            "device health sent",
            devices=len(changes),
            unhealthy=unhealthy,
            changes="; ".join(named),
        )


def _in_words(health: DeviceHealth) -> str:
    message = health.message[:MAX_LOGGED_CHARACTERS]
    return f"{health.status} ({message})" if message else health.status


@contextmanager
def logged_stream(driver: str, method: str, *, ended: asyncio.Event) -> Generator[StreamLog]:
    """Log the start and the end of a stream; `ended` is set if the plugin ends it."""
    log = StreamLog(driver, method)
    began = time.monotonic()
    log.info("health stream started")
    reason = "the plugin ended it"
    try:
        yield log
    except Exception as error:
        reason = f"it failed: {error}"
        raise
    except BaseException:  # a cancellation, or the generator is closed
        if not ended.is_set():
            reason = "the kubelet closed the stream"
        raise
    finally:
        seconds = round(time.monotonic() - began, 1)
        log.info("health stream ended", reason=reason, seconds=seconds)


class Subscription:
    """What one subscriber was told, and what it is told next."""

    def __init__(
        self,
        source: HealthSource,
        *,
        resend_seconds: float,
        ended: asyncio.Event,
        log: StreamLog,
    ) -> None:
        self._source = source
        self._log = log
        self._resend_seconds = resend_seconds
        self._ended = ended
        self._told: _Told = {}
        self._states: Sequence[DeviceHealth] | None = None
        self._unsent: list[DeviceHealth] = []
        self._seen = 0
        self._looked_at = -math.inf
        self._resend_at = -math.inf

    async def next(self) -> Sequence[DeviceHealth] | None:
        """Wait for the devices of the next message; None if there is to be none any more."""
        while not self._unsent:
            if await self._wait_ended(until=self._looked_at + PACE_SECONDS):
                return None
            changed = await self._wait_changed(until=self._resend_at)
            self._look(resend=not changed)
        if self._ended.is_set():
            return None
        part, self._unsent = self._unsent[:MAX_DEVICES], self._unsent[MAX_DEVICES:]
        return part

    def _look(self, *, resend: bool) -> None:
        """Find what is to be sent: all devices, or those that have changed."""
        now = self._looked_at = asyncio.get_running_loop().time()
        self._seen = self._source.revision.number
        before, states = self._states, self._source.health_states()
        # A source that changes all the time must not hold it back.
        resend = resend or now >= self._resend_at
        if resend:
            self._resend_at = now + self._resend_seconds
        elif states is before:
            return
        told = {(state.pool, state.device): state for state in states}
        changed = [state for key, state in told.items() if self._told.get(key) != state]
        gone = [_gone(state) for key, state in self._told.items() if key not in told]
        if changed or gone:
            self._log.changes([*changed, *gone])
        self._unsent = [*(told.values() if resend else changed), *gone]
        self._told, self._states = told, states

    # ------------------------------------------------------------ waiting

    async def _wait_ended(self, *, until: float) -> bool:
        """Wait for the end, but not for longer than this. Say whether it has come."""
        if not self._ended.is_set():
            await _wait_first(self._ended.wait(), until=until)
        return self._ended.is_set()

    async def _wait_changed(self, *, until: float) -> bool:
        """Wait for a change or the end, but not for longer than this. Say whether one came."""
        changed = self._source.revision.after(self._seen)
        return await _wait_first(changed, self._ended.wait(), until=until)


def _gone(state: DeviceHealth) -> DeviceHealth:
    """Say once of a device that is missing that nobody knows: it would keep its last health until
    the kubelet believes in it no more."""
    return DeviceHealth(
        pool=state.pool,
        device=state.device,
        status="unknown",
        message=GONE,
        changed_at=int(time.time()),
    )


async def _wait_first(*waits: Coroutine[Any, Any, object], until: float) -> bool:
    """Wait until one of them has ended, or a time of the loop's clock has come, which is False."""
    left_seconds = max(0.0, until - asyncio.get_running_loop().time())
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(
            tasks, timeout=left_seconds, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        for task in tasks:
            task.cancel()
    return bool(done)


def shown(message: str) -> str:
    """Make a text that can be sent, and that the kubelet does not cut."""
    data = message.encode(errors="backslashreplace")
    if len(data) > MAX_MESSAGE_BYTES:
        data = data[: MAX_MESSAGE_BYTES - len(CUT)]
        return data.decode(errors="ignore") + CUT
    return data.decode()
