"""
Evaluates the selectors that a pod's explanation needs, before the pod is explained, and keeps their
results.

The evaluator may block for seconds, so it runs in a thread. Its queries and results are plain data.
Each selector is evaluated separately. A selector that fails is treated as not evaluated: the pods
that need it get no Event about it, and are explained again when another attempt may succeed.

There is one evaluator, and anyone can write slow selectors. Therefore, it gets one query at a time,
with about as many devices as it can process in 50 ms. The queue decides whose query is next. A
selector that took too long is cached by its expression.

Does not depend on pods or queues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from drakit_daemon.logs import ProblemLog
from drakit_explain.cel.helper import HelperError, LateError, QueryError
from drakit_explain.model import SliceFacts
from drakit_explain.recent import keep
from drakit_explain.selectors import (
    SELECTOR_SECONDS,
    Evaluations,
    FeatureGates,
    SelectorResult,
    Selectors,
    evaluate,
)
from drakit_explain.world import World

logger = logging.getLogger(__name__)

GATES_SECONDS = 5.0
"""How long to wait for the cluster's feature gates. After that, they are treated as unknown."""

MAX_REMEMBERED = 512
"""Maximum number of selectors to cache that do not have a result or take too long. The oldest are
dropped first."""

EXPENSIVE_SECONDS = 300.0
"""How long a selector that took too long for some devices is treated as too expensive for all
others. Devices change far more often than selectors."""

FIRST_SECONDS = 0.25
"""How long to wait for a result of a selector in its first attempt. If there is none, its namespace
is charged for the attempt, so other namespaces get their turn before the next attempt, which has
`SELECTOR_SECONDS`."""

TURN_SECONDS = 0.05
"""How long selectors are evaluated before another object gets its turn. If 200 namespaces have
equally many queries, each gets a turn within 10 s."""

FIRST_DEVICES = 2
"""How many devices to evaluate a selector for at first, because each can take 20 ms."""

LONGEST_SECONDS = 1.0
"""The time limit for a query about up to 2,000 devices, after which a selector is too expensive."""

TOO_EXPENSIVE = SelectorResult(unknown="the selector takes too much time", expensive=True)

MAX_PARTS = 256
"""Maximum number of selectors with an interrupted evaluation. The evaluation of the oldest ones
starts from the beginning."""

MAX_OF_OBJECT = 64
"""Maximum number of distinct selectors of an object, including those of its classes. An object with
more is not evaluated. A pod with 16 claims can have 131,072."""


class Missing(NamedTuple):
    """A query of the evaluator: the fields that a selector reads, or its results for some
    devices."""

    expression: str
    needed: Evaluations | None = None


@dataclass(slots=True)
class _Part:
    """The results of an interrupted evaluation, for the first devices."""

    devices: Sequence[Mapping[str, Any]]
    outcomes: list[SelectorResult] = field(default_factory=list[SelectorResult])
    seconds: float = 0.0


class SelectorEvaluation:
    """Keeps the results of selectors up to date. Not thread-safe."""

    def __init__(self, world: World, selectors: Selectors) -> None:
        self._world = world
        self._selectors = selectors
        self._asking = asyncio.Lock()
        self._revision = -1
        self._slices: list[SliceFacts] = []
        self._unavailable_until = 0.0
        """The time at which the failed evaluator is used again (loop clock)."""

        self._gates: FeatureGates | None = None
        self._gates_known = asyncio.Event()
        self._refused: dict[str, float] = {}
        """Selectors for which the evaluator has no result, with the time at which each is evaluated
        again (loop clock)."""

        self._late: dict[str, str] = {}
        """Selectors whose first attempt did not produce a result in time, with the namespace that
        was charged."""

        self._parts: dict[str, _Part] = {}
        """Selectors that are evaluated only for some devices of a query."""

        self._expensive: dict[str, tuple[float, SelectorResult]] = {}
        """Selectors that took too long, with the time until which they are too expensive (loop
        clock), and their result for all devices."""

        self._problems = ProblemLog(
            logger, "selectors cannot be evaluated", recovered="selectors are evaluated again"
        )

    async def use(self, gates: FeatureGates | None) -> bool:
        """
        Evaluate with these feature gates from now on. None means that they are unknown.

        If the gates are unknown, the known ones stay in effect. Return whether known results were
        dropped.
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
                self._late.clear()
                self._parts.clear()
            self._gates_known.set()
        return dropped

    def missing(self, expressions: Sequence[str]) -> tuple[Missing | None, float | None]:
        """Return the next query for the evaluator, if any. Otherwise, return the seconds until a
        selector without a result can be evaluated again, if there is one."""
        wanted, now = dict.fromkeys(expressions), asyncio.get_running_loop().time()
        times: list[float] = []
        for each in wanted if len(wanted) <= MAX_OF_OBJECT else ():
            if (refused_until := self._refused.get(each, 0.0)) > now:
                times.append(refused_until)
                continue
            unread = self._world.selectors.unread([each])
            needed = None if unread else self._needed(each)
            if unread or needed is not None:
                if self._unavailable_until <= now:
                    return Missing(each, needed), None
                times.append(self._unavailable_until)
        return None, min((at - now for at in times), default=None)

    async def ask(self, missing: Missing, *, namespace: str) -> None:
        """
        Run one query of the evaluator, and store the result.

        :param namespace: the namespace that is charged for the memory of the result.
        """
        await self._wait_for_gates()
        async with self._asking:
            now, expression = asyncio.get_running_loop().time(), missing.expression
            has_paid = self._late.get(expression) == namespace
            seconds = SELECTOR_SECONDS if has_paid else FIRST_SECONDS
            try:
                await self._ask(missing, namespace, seconds)
            except QueryError as error:
                if isinstance(error, LateError) and not has_paid:
                    payer = self._late.get(expression, namespace)
                    keep(self._late, expression, payer, limit=MAX_REMEMBERED)
                    return
                self._late.pop(expression, None)
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
                self._late.pop(expression, None)

    def lost(self, expressions: Sequence[str]) -> bool:
        """Return whether results were dropped, since `missing` returned no query, to make room for
        those of other objects."""
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

    async def _ask(self, missing: Missing, namespace: str, seconds: float) -> None:
        index, expression = self._world.selectors, missing.expression
        if missing.needed is None:
            reads = await asyncio.to_thread(self._selectors.reads, [expression], seconds=seconds)
            index.learn(dict(zip([expression], reads, strict=True)), owner=namespace)
            return
        outcomes = await self._outcomes(expression, missing.needed.devices, seconds)
        if len(outcomes) == len(missing.needed.devices):
            index.store(missing.needed, outcomes)

    async def _outcomes(
        self, expression: str, devices: Sequence[Mapping[str, Any]], seconds: float
    ) -> Sequence[SelectorResult]:
        """Evaluate a selector for the first devices among these that do not have a result yet."""
        now = asyncio.get_running_loop().time()
        until, outcome = self._expensive.get(expression, (0.0, SelectorResult()))
        if until > now:
            return [outcome] * len(devices)
        part = self._parts.pop(expression, None)
        if part is None or part.devices != devices:
            part = _Part(devices)
        spent, number = 0.0, FIRST_DEVICES
        while len(part.outcomes) < len(devices) and spent < TURN_SECONDS:
            if part.seconds > 0:
                left = (TURN_SECONDS - spent) * len(part.outcomes) / part.seconds
                number = max(int(left), FIRST_DEVICES)
            done = len(part.outcomes)
            began = time.monotonic()
            query = devices[done : done + number]
            part.outcomes += await asyncio.to_thread(
                evaluate, self._selectors, expression, query, seconds=seconds
            )
            took = time.monotonic() - began
            spent, part.seconds = spent + took, part.seconds + took
            last = TOO_EXPENSIVE if part.seconds > LONGEST_SECONDS else part.outcomes[-1]
            if last.expensive:
                entry = now + EXPENSIVE_SECONDS, last
                keep(self._expensive, expression, entry, limit=MAX_REMEMBERED)
                return [*part.outcomes, *[last] * (len(devices) - len(part.outcomes))]
        if len(part.outcomes) < len(devices):
            keep(self._parts, expression, part, limit=MAX_PARTS)
        return part.outcomes

    def _needed(self, expression: str) -> Evaluations | None:
        world = self._world
        if self._revision != world.slices_revision:
            self._revision, self._slices = world.slices_revision, list(world.slices())
        return world.selectors.needed(expression, self._slices, version=world.slices_revision)
