"""
Leadership: a replica waits for the Lease, is the leader once, and exits if the Lease may be lost.

The election has its own thread, event loop and session, so that the work of the main loop never
delays a renewal. The same thread serves the probes, for the same reason. If the Lease may be lost,
the process exits immediately, regardless of what the main loop is doing, because another replica
relies on that. The kubelet restarts the container, which becomes a candidate again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

from drakit_daemon import tasks
from drakit_daemon.event_loop import run_in_thread
from drakit_daemon.kube import Session
from drakit_daemon.kube.lease import LeaseElection, LeaseTimings
from drakit_operator.config import Election

logger = logging.getLogger(__name__)

RELEASE_SECONDS = 3.0
"""How long to wait for the Lease to be released during shutdown. After that, the Lease expires by
itself."""

LOG_SECONDS = 1.0
"""How long to wait for the log when the process exits."""


def _end_process(reason: str) -> None:
    # If nothing reads the log, another thread can hang in a write while it holds the log's lock.
    tasks.limit_exit(1, seconds=LOG_SECONDS)
    logger.error("no longer leading; the process ends", extra={"reason": reason})
    os._exit(1)


class Leadership:
    """One candidate in the election. Run it once."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Session]],
        settings: Election,
        *,
        namespace: str,
        identity: str,
        companion: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        """
        :param connect: opens the election's session, in the election thread.
        :param companion: a context manager that is entered before the election and exited after it,
            in the election thread.
        """
        self._connect = connect
        self._settings = settings
        self._namespace = namespace
        self._identity = identity
        self._companion = companion
        self._election: LeaseElection | None = None
        self.won = asyncio.Event()
        """Set when this replica is the leader."""

    @property
    def is_leader(self) -> bool:
        """Whether this replica holds the Lease, and its renewal is not overdue."""
        return self._election is not None and self._election.is_leader

    async def run(self) -> None:
        """Take part in the election until canceled, and then release the Lease."""
        campaign = partial(self._campaign, asyncio.get_running_loop())
        await run_in_thread("lease", campaign, stop_seconds=RELEASE_SECONDS)

    # ---- called in the election thread

    def silent_seconds(self) -> float:
        """Return how long ago the API server last responded about the Lease."""
        responded_at = self._election.responded_at if self._election is not None else float("-inf")
        return asyncio.get_running_loop().time() - responded_at

    async def _campaign(self, owner: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        settings = self._settings
        async with await self._connect() as session, self._companion():
            election = self._election = LeaseElection(
                session,
                namespace=self._namespace,
                name=settings.lease_name,
                identity=self._identity,
                timings=LeaseTimings(
                    lease_seconds=int(settings.lease_duration),
                    renew_deadline_seconds=settings.renew_deadline,
                    retry_seconds=settings.retry_period,
                ),
            )

            async def lead() -> None:
                await election.acquire()
                owner.call_soon_threadsafe(self.won.set)
                _end_process(await election.hold())

            leading = asyncio.create_task(lead(), name="lead")
            stopping = asyncio.create_task(stop.wait(), name="stop")
            try:
                await asyncio.wait({leading, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if leading.done():
                    leading.result()
            finally:
                leading.cancel()
                stopping.cancel()
                await asyncio.wait({leading, stopping})
                await election.release()
