"""
Selectors evaluated for the store: what a pod's explanation needs, before it is explained.

The evaluator may block for seconds, so it runs in a thread; its questions and outcomes are plain
data. Each selector is evaluated alone. One that fails counts as not evaluated: the pods that need
it get no Event about it, and are explained again when another attempt may succeed.

It must not know pods, queues, or how CEL is evaluated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from drakit_daemon.logs import ProblemLog
from drakit_explain.cel.helper import HelperError, QuestionError
from drakit_explain.selectors import Evaluations, FeatureGates, Selectors, evaluate
from drakit_explain.world import World

logger = logging.getLogger(__name__)

GATES_SECONDS = 5.0
"""Longest wait for the cluster's feature gates; afterwards they count as unknown."""

MAX_REFUSED = 512
"""Selectors that the evaluator does not answer, and that are remembered for that reason."""


class SelectorEvaluation:
    """Keeps the outcomes of selectors up to date. Not for threads."""

    def __init__(self, world: World, selectors: Selectors) -> None:
        self._world = world
        self._selectors = selectors
        self._turn = asyncio.Lock()
        self._gates: FeatureGates | None = None
        self._gates_known = asyncio.Event()
        self._refused: dict[str, float] = {}
        """Selectors that the evaluator does not answer; when each is asked again (loop clock)."""
        self._problems = ProblemLog(
            logger, "selectors cannot be evaluated", recovered="selectors are evaluated again"
        )

    async def use(self, gates: FeatureGates | None) -> bool:
        """
        Evaluate with these feature gates from now on; None means that they are unknown.

        Gates that were known stay in force. Return whether known outcomes were dropped.
        """
        wanted = gates or self._gates or FeatureGates()
        async with self._turn:
            dropped = self._gates is not None and wanted != self._gates
            if wanted != self._gates:
                self._gates = wanted
                logger.info(
                    "selectors are evaluated with feature gates",
                    extra={
                        "DRAConsumableCapacity": wanted.consumable_capacity,
                        "DRAListTypeAttributes": wanted.list_attributes,
                    },
                )
                await asyncio.to_thread(self._selectors.use, wanted)
            if dropped:
                self._world.selectors.clear()
                self._refused.clear()
            self._gates_known.set()
        return dropped

    async def prepare(self, expressions: Sequence[str]) -> float | None:
        """
        Evaluate these selectors for all slices, as far as that is not done yet.

        Return None if all are evaluated, otherwise after how many seconds to try again.
        """
        if not expressions:
            return None
        await self._wait_for_gates()
        retries: list[float] = []
        for expression in dict.fromkeys(expressions):
            # One at a time: pods with other selectors get their turn in between.
            async with self._turn:
                retry = await self._prepare(expression)
            if retry is not None:
                retries.append(retry)
        return min(retries, default=None)

    async def _wait_for_gates(self) -> None:
        try:
            async with asyncio.timeout(GATES_SECONDS):
                await self._gates_known.wait()
        except TimeoutError:
            await self.use(None)

    async def _prepare(self, expression: str) -> float | None:
        now = asyncio.get_running_loop().time()
        if (left := self._refused.get(expression, 0.0) - now) > 0:
            return left
        try:
            await self._evaluate(expression)
        except QuestionError as error:
            logger.warning(
                "a selector cannot be evaluated",
                extra={"expression": expression, "error": str(error)},
            )
            while len(self._refused) >= MAX_REFUSED:
                del self._refused[next(iter(self._refused))]
            self._refused[expression] = now + error.retry_seconds
            return error.retry_seconds
        except HelperError as error:
            self._problems.report(str(error))
            return error.retry_seconds
        self._refused.pop(expression, None)
        return None

    async def _evaluate(self, expression: str) -> None:
        index = self._world.selectors
        if unread := index.unread([expression]):
            reads = await asyncio.to_thread(self._selectors.reads, unread)
            self._problems.report(None)
            index.learn(dict(zip(unread, reads, strict=True)))
        while needed := self._needed(expression):
            for each, devices in needed.devices.items():
                outcomes = await asyncio.to_thread(evaluate, self._selectors, each, devices)
                self._problems.report(None)
                index.store(needed, {each: outcomes})

    def _needed(self, expression: str) -> Evaluations:
        world = self._world
        slices = [each.slice for each in world.reachable()]
        return world.selectors.needed([expression], slices, version=world.slices_revision)
