"""
Selectors evaluated for the store: what a pod's explanation needs, before it is explained.

The evaluator may block for seconds, so it runs in a thread; its questions and outcomes are plain
data. Each selector is evaluated alone. One that fails counts as not evaluated: the pods that need
it get no Event about it, and are explained again when another attempt may succeed.

There is one evaluator, and anyone can write selectors that take long. So it is asked one question
at a time, which it answers in a second or two, and the queue decides for which object. A selector
that took too long is remembered by its text.

Does not depend on pods, queues, or how CEL is evaluated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from drakit_daemon.logs import ProblemLog
from drakit_explain.cel.helper import HelperError, QuestionError
from drakit_explain.model import SliceFacts
from drakit_explain.recent import keep
from drakit_explain.selectors import Evaluations, FeatureGates, Outcome, Selectors, evaluate
from drakit_explain.world import Reachable, World

logger = logging.getLogger(__name__)

GATES_SECONDS = 5.0
"""Longest wait for the cluster's feature gates; afterwards they count as unknown."""

MAX_REMEMBERED = 512
"""Selectors that the evaluator does not answer, or that take too long, and that are remembered for
that reason; the oldest go first."""

EXPENSIVE_SECONDS = 300.0
"""Time in which a selector that took too long for some devices counts as such for all others: they
change far more often than selectors."""

MAX_OF_OBJECT = 64
"""Different selectors of one object, those of its classes included; with more, the object is not
evaluated. A pod of 16 claims can have 131,072."""


class SelectorEvaluation:
    """Keeps the outcomes of selectors up to date. Not thread-safe."""

    def __init__(self, world: World, selectors: Selectors) -> None:
        self._world = world
        self._selectors = selectors
        self._asking = asyncio.Lock()
        self._reachable: Sequence[Reachable] = ()
        self._slices: list[SliceFacts] = []
        self._unavailable_until = 0.0
        """When the evaluator, which has failed, is asked again (loop clock)."""

        self._gates: FeatureGates | None = None
        self._gates_known = asyncio.Event()
        self._refused: dict[str, float] = {}
        """Selectors that the evaluator does not answer; when each is asked again (loop clock)."""

        self._expensive: dict[str, tuple[float, Outcome]] = {}
        """Selectors that took too long; until when (loop clock), and the outcome for devices."""

        self._problems = ProblemLog(
            logger, "selectors cannot be evaluated", recovered="selectors are evaluated again"
        )

    async def use(self, gates: FeatureGates | None) -> bool:
        """
        Evaluate with these feature gates from now on; None means that they are unknown.

        Gates that were known stay in force. Return whether known outcomes were dropped.
        """
        wanted = gates or self._gates or FeatureGates()
        async with self._asking:
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
                self._world.forget_outcomes()
                self._refused.clear()
                self._expensive.clear()
            self._gates_known.set()
        return dropped

    def first_missing(self, expressions: Sequence[str]) -> str | None:
        """Return the first selector about which the evaluator can be asked now; None if there is
        none."""
        wanted, now = dict.fromkeys(expressions), asyncio.get_running_loop().time()
        if len(wanted) > MAX_OF_OBJECT or self._unavailable_until > now:
            return None
        index = self._world.selectors
        for each in wanted:
            if self._refused.get(each, 0.0) <= now and (index.unread([each]) or self._needed(each)):
                return each
        return None

    def retry_seconds(self, expressions: Sequence[str]) -> float | None:
        """Return in how many seconds the evaluator can be asked about a selector that it did not
        evaluate; None if there is none."""
        wanted, now = dict.fromkeys(expressions), asyncio.get_running_loop().time()
        if len(wanted) > MAX_OF_OBJECT:
            return None
        index = self._world.selectors
        times = [self._refused[each] for each in wanted if each in self._refused]
        if self._unavailable_until > now and any(
            index.unread([each]) or self._needed(each) for each in wanted
        ):
            times.append(self._unavailable_until)
        return min((at - now for at in times if at > now), default=None)

    async def ask(self, expression: str, *, namespace: str) -> None:
        """
        Ask the evaluator one question about a selector, for the slices that need its answer.

        :param namespace: what the answer needs in memory is taken from its share.
        """
        await self._wait_for_gates()
        async with self._asking:
            now = asyncio.get_running_loop().time()
            try:
                await self._ask(expression, namespace)
            except QuestionError as error:
                logger.warning(
                    "a selector cannot be evaluated",
                    extra={"expression": expression, "error": str(error)},
                )
                keep(self._refused, expression, now + error.retry_seconds, limit=MAX_REMEMBERED)
            except HelperError as error:
                self._problems.report(str(error))
                self._unavailable_until = now + error.retry_seconds
            else:
                self._problems.report(None)
                self._refused.pop(expression, None)

    def lost(self, expressions: Sequence[str]) -> bool:
        """Return whether outcomes were dropped for those of other objects after `prepare`."""
        wanted = dict.fromkeys(expressions)
        if len(wanted) > MAX_OF_OBJECT:
            return False
        return any(each not in self._refused for each in self._world.selectors.unread(wanted))

    async def _wait_for_gates(self) -> None:
        try:
            async with asyncio.timeout(GATES_SECONDS):
                await self._gates_known.wait()
        except TimeoutError:
            await self.use(None)

    async def _ask(self, expression: str, namespace: str) -> None:
        index = self._world.selectors
        if unread := index.unread([expression]):
            reads = await asyncio.to_thread(self._selectors.reads, unread)
            index.learn(dict(zip(unread, reads, strict=True)), owner=namespace)
            return
        needed = self._needed(expression)
        for devices in needed.devices.values():
            index.store(needed, {expression: await self._outcomes(expression, devices)})

    async def _outcomes(
        self, expression: str, devices: Sequence[Mapping[str, Any]]
    ) -> Sequence[Outcome]:
        now = asyncio.get_running_loop().time()
        until, outcome = self._expensive.get(expression, (0.0, Outcome()))
        if until > now:
            return [outcome] * len(devices)
        outcomes = await asyncio.to_thread(evaluate, self._selectors, expression, devices)
        if outcomes and outcomes[-1].expensive:
            entry = now + EXPENSIVE_SECONDS, outcomes[-1]
            keep(self._expensive, expression, entry, limit=MAX_REMEMBERED)
        return outcomes

    def _needed(self, expression: str) -> Evaluations:
        world = self._world
        if self._reachable is not (reachable := world.reachable()):
            self._reachable, self._slices = reachable, [each.slice for each in reachable]
        return world.selectors.needed([expression], self._slices, version=world.slices_revision)
