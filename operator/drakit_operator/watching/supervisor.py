"""
Keeps Kopf running while we lead: restarts it after an error, without losing its facts.

One malformed event on a watch ends all of Kopf (any error but 410), so an end is expected, not
exceptional. All kinds are listed before each run; the store and the queue outlive the runs.

It must not know leases, or what is done with changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from drakit.backoff import Backoff
from drakit.kube.errors import ApiError, GoneError
from drakit_operator.watching.discovery import KindsMissingError
from drakit_operator.watching.thread import KopfThread

__all__ = ("Pauses", "Watcher")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pauses:
    """Seconds on the loop's clock."""

    first_seconds: float = 1.0
    """Before Kopf restarts; doubled with each run that ended early."""

    longest_seconds: float = 30.0
    stop_seconds: float = 2.0
    """Longest wait for its end: less than what is left of a Lease that cannot be renewed (3 s)."""

    settled_seconds: float = 60.0
    """After a run of that length, the pauses start at the first one again."""


class Watcher:
    """Runs Kopf until it is canceled."""

    def __init__(
        self,
        *,
        prepare: Callable[[], Awaitable[None]],
        make_thread: Callable[[], KopfThread],
        on_restart: Callable[[], None],
        pauses: Pauses | None = None,
    ) -> None:
        self._prepare = prepare
        self._make_thread = make_thread
        self._on_restart = on_restart
        self._pauses = pauses or Pauses()
        self._thread: KopfThread | None = None
        self._renewal = asyncio.Event()

    def renew(self) -> None:
        """End this run, so that the next one discovers the served kinds again."""
        self._renewal.set()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last heartbeat of Kopf's loop; 0 between two runs."""
        return self._thread.silent_seconds if self._thread is not None else 0.0

    async def run(self) -> None:
        """Run Kopf until canceled, and restart it whenever it ends."""
        clock = asyncio.get_running_loop().time
        backoff = Backoff(
            first_seconds=self._pauses.first_seconds,
            limit_seconds=self._pauses.longest_seconds,
            jitter=0,  # only the leader runs Kopf
        )
        while True:
            began = clock()
            await self._run_once()
            if clock() - began >= self._pauses.settled_seconds:
                backoff.succeeded()
            self._on_restart()
            await asyncio.sleep(backoff.next_seconds())

    async def _run_once(self) -> None:
        try:
            await self._prepare()
        except (ApiError, KindsMissingError) as error:
            logger.warning("watched kinds cannot be listed", extra={"error": str(error)})
            return
        self._renewal.clear()
        thread = self._thread = self._make_thread()
        thread.start()
        try:
            renewal = asyncio.create_task(self._renewal.wait(), name="renewal")
            try:
                await asyncio.wait((thread.ended, renewal), return_when=asyncio.FIRST_COMPLETED)
            finally:
                renewal.cancel()
            if thread.ended.done():
                error = thread.ended.result()
                expired = isinstance(error, GoneError)
                level = logging.INFO if expired else logging.WARNING
                logger.log(level, "kopf ended, restarting it", extra={"error": repr(error)})
            else:
                logger.info("the kinds that can be watched have changed, restarting kopf")
        finally:
            self._thread = None
            await thread.stop(timeout_seconds=self._pauses.stop_seconds)
