"""
Asks Kubernetes' own allocator to confirm a reason before its Event is written.

The objects of a question are read from the API server when it is asked, with the fields that the
store does not keep. Slices and classes are kept for some seconds, because pods of one workload wait
for the same devices.

It must not know queues, or how a reason is found.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from drakit_daemon.kube import ApiError, NotFoundError, Session
from drakit_daemon.kube.queue import Turns
from drakit_daemon.logs import ProblemLog
from drakit_explain.cel.allocator import Allocator, Confirmed, DeletedError, Result
from drakit_explain.confirmation import Confirmation
from drakit_formats.resource.objects import Object, children
from drakit_operator.metrics import Metrics

logger = logging.getLogger(__name__)

KEPT_SECONDS = 10.0
MAX_KEPT = 4096
"""Devices of objects that are kept, and one for each object: 128 devices take about 400 KiB. The
slices of one question must fit, or none is ever found again."""

AGAIN_SECONDS = 60.0
"""Pause before a reason that is not certain is confirmed again, unless devices change before."""

OUTDATED_SECONDS = 2.0
"""Pause of a reason that follows from an object that has been deleted: the store soon knows it."""

TURN_SECONDS = 3.0
"""Longest wait for a turn, because questions must not keep all workers. The longest question takes
2.5 s, so the namespace that has used least gets the next turn."""

BUSY_SECONDS = 0.5
"""Pause of a reason that had no turn."""


@dataclass(frozen=True, slots=True)
class _Kept:
    body: Object
    at: float
    """When it was read (loop clock)."""

    size: int


class Confirmations:
    """Confirms reasons. Not for threads."""

    def __init__(
        self,
        session: Session,
        allocator: Allocator,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        :param clock: measures questions, in seconds.
        """
        self._session = session
        self._allocator = allocator
        self._metrics = metrics
        self._turns = Turns(clock=clock)
        self._kept: dict[str, _Kept] = {}
        self._problems = ProblemLog(
            logger,
            "reasons are not confirmed by Kubernetes' allocator",
            recovered="reasons are confirmed by Kubernetes' allocator again",
        )

    async def __call__(self, asked: Confirmation, namespace: str) -> float | None:
        """Return None if nothing refutes a reason, else in how many seconds to ask again."""
        try:
            async with asyncio.timeout(TURN_SECONDS) as limit, self._turns.turn(namespace):
                limit.reschedule(None)
                found = await self._ask(asked)
        except TimeoutError:
            return BUSY_SECONDS
        self._metrics.confirmations.labels(found.result).inc()
        self._problems.report(found.why if found.result is Result.UNAVAILABLE else None)
        if not found.refuted:
            return None
        logger.info("a reason is not certain", extra={"namespace": namespace, "why": found.why})
        return OUTDATED_SECONDS if found.outdated else AGAIN_SECONDS

    async def _ask(self, asked: Confirmation) -> Confirmed:
        kept = bool(self._kept)
        found = await self._allocator.confirm(asked, self._read)
        if not (found.refuted and kept):
            return found
        self._kept.clear()  # an object may have changed since it was read
        return await self._allocator.confirm(asked, self._read)

    async def _read(self, path: str) -> Object | None:
        now = asyncio.get_running_loop().time()
        if (kept := self._kept.get(path)) is not None and now - kept.at < KEPT_SECONDS:
            return kept.body
        try:
            body = await self._session.get(path)
        except NotFoundError:
            raise DeletedError from None
        except ApiError as error:
            logger.debug("object cannot be read", extra={"path": path, "error": str(error)})
            return None
        if "/namespaces/" not in path:  # each claim is read once
            self._kept.pop(path, None)
            self._kept[path] = _Kept(body, now, 1 + len(children(body, "spec", "devices")))
            left = MAX_KEPT - sum(each.size for each in self._kept.values())
            while left < 0:
                left += self._kept.pop(next(iter(self._kept))).size
        return body
