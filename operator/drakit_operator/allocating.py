"""
Runs the queries that explanations have planned, in Kubernetes' own allocator.

The allocator program can take seconds, so it is called in a thread. The namespace that has used the
least time gets the next turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from drakit_daemon.kube.queue import Turns
from drakit_daemon.logs import ProblemLog
from drakit_explain.cel.allocator import Allocator
from drakit_explain.queries import Query, Verdicts
from drakit_explain.verdicts import Verdict
from drakit_operator.metrics import Metrics

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.05
"""How long queries run before another object gets its turn. Most queries take 1 ms, and the longest
2.5 s."""

WAIT_SECONDS = 3.0
"""How long to wait for a turn. Without a limit, queries could occupy all workers."""


class AllocatorQueries:
    """Runs one query of the allocator at a time. Not thread-safe."""

    def __init__(
        self, allocator: Allocator, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """:param clock: returns the time in seconds, to measure queries."""
        self._allocator = allocator
        self._metrics = metrics
        self._clock = clock
        self._turns = Turns(clock=clock)
        self._problems = ProblemLog(
            logger,
            "Kubernetes' allocator does not respond, so some reasons are not reported",
            recovered="Kubernetes' allocator responds again",
        )

    async def ask(
        self, queries: Sequence[Query], verdicts: Verdicts, namespace: str
    ) -> float | None:
        """
        Run some of these queries. The rest are planned again.

        Return how many seconds the queries took, or None if the namespace did not get a turn.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS) as limit, self._turns.turn(namespace):
                limit.reschedule(None)
                began = self._clock()
                found = await asyncio.to_thread(self._ask, queries)
        except TimeoutError:
            return None
        for query, verdict in zip(queries, found, strict=False):
            verdicts.keep(query, verdict)
            self._metrics.allocator_queries.labels(verdict.outcome.value).inc()
        self._problems.report(self._allocator.problem or None)
        return self._clock() - began

    def _ask(self, queries: Sequence[Query]) -> list[Verdict]:
        end = self._clock() + TURN_SECONDS
        found: list[Verdict] = []
        for query in queries:
            found.append(self._allocator.answer(query))
            if self._clock() > end:
                break
        return found
