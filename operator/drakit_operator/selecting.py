"""
Selectors evaluated for the store: what a pod's explanation needs, before it is explained.

The evaluator may block for seconds, so it runs in a thread; its questions and outcomes are plain
data. If it fails, the selectors count as not evaluated, and the pods that need them get no Event.

It must not know pods, queues, or how CEL is evaluated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from drakit.cel.helper import HelperError
from drakit.explain.selectors import Selectors, evaluate
from drakit.explain.world import World
from drakit.logs import ProblemLog

__all__ = ("SelectorEvaluation",)

logger = logging.getLogger(__name__)


class SelectorEvaluation:
    """Keeps the outcomes of selectors up to date. Not for threads."""

    def __init__(self, world: World, selectors: Selectors) -> None:
        self._world = world
        self._selectors = selectors
        self._turn = asyncio.Lock()
        self._problems = ProblemLog(
            logger, "selectors cannot be evaluated", recovered="selectors are evaluated again"
        )

    async def prepare(self, expressions: Sequence[str]) -> None:
        """Evaluate these selectors for all slices, as far as that is not done yet."""
        async with self._turn:
            try:
                await self._prepare(expressions)
            except HelperError as error:
                self._problems.report(str(error))
            else:
                self._problems.report(None)

    async def _prepare(self, expressions: Sequence[str]) -> None:
        index = self._world.selectors
        if unread := index.unread(expressions):
            reads = await asyncio.to_thread(self._selectors.reads, unread)
            index.learn(dict(zip(unread, reads, strict=True)))
        slices = [each.slice for each in self._world.reachable()]
        for expression in dict.fromkeys(expressions):
            work = index.work([expression], slices)
            if work:
                index.store(work, await asyncio.to_thread(evaluate, self._selectors, work))
            await asyncio.sleep(0)  # a scan of a large cluster takes a tenth of a second
