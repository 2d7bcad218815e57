"""
Selectors evaluated for the store: what a pod's explanation needs, before it is explained.

The evaluator may block for seconds, so it runs in a thread; its questions and outcomes are plain
data. Each selector is evaluated alone. One that fails counts as not evaluated: the pods that need
it get no Event about it, and are explained again when another attempt may succeed.

There is one evaluator, and anyone can write selectors that take long. So it is asked one question
at a time, about as many devices as take 50 ms, and the queue decides for which object. A selector
that took too long is remembered by its text.

Does not depend on pods, queues, or how CEL is evaluated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from drakit_daemon.logs import ProblemLog
from drakit_explain.cel.helper import HelperError, LateError, QuestionError
from drakit_explain.model import SliceFacts
from drakit_explain.recent import keep
from drakit_explain.selectors import (
    SELECTOR_SECONDS,
    Evaluations,
    FeatureGates,
    Outcome,
    Selectors,
    evaluate,
)
from drakit_explain.world import World

logger = logging.getLogger(__name__)

GATES_SECONDS = 5.0
"""Longest wait for the cluster's feature gates; afterwards they count as unknown."""

MAX_REMEMBERED = 512
"""Selectors that the evaluator does not answer, or that take too long, and that are remembered for
that reason; the oldest go first."""

EXPENSIVE_SECONDS = 300.0
"""Time in which a selector that took too long for some devices counts as such for all others: they
change far more often than selectors."""

FIRST_SECONDS = 0.25
"""Longest wait for an answer about a selector. If there is none, its namespace has paid for the
attempt, so that others come before the next one, which has `SELECTOR_SECONDS`."""

TURN_SECONDS = 0.05
"""Seconds of evaluation after which it is another object's turn. With 200 namespaces that have as
much to ask, each has a turn within 10 s."""

FIRST_DEVICES = 2
"""Devices for which a selector is evaluated first, because it can take 20 ms for each."""

LONGEST_SECONDS = 1.0
"""Seconds for a question of up to 2,000 devices, after which a selector counts as too expensive."""

TOO_EXPENSIVE = Outcome(unknown="the selector takes too much time", expensive=True)

MAX_PARTS = 256
"""Selectors whose evaluation is interrupted; the oldest start again."""

MAX_OF_OBJECT = 64
"""Different selectors of one object, those of its classes included; with more, the object is not
evaluated. A pod of 16 claims can have 131,072."""


class Missing(NamedTuple):
    """A question to the evaluator: what a selector reads, or its outcomes for some devices."""

    expression: str
    needed: Evaluations | None = None


@dataclass(slots=True)
class _Part:
    """The outcomes of a selector for the first of some devices."""

    devices: Sequence[Mapping[str, Any]]
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    seconds: float = 0.0


class SelectorEvaluation:
    """Keeps the outcomes of selectors up to date. Not thread-safe."""

    def __init__(self, world: World, selectors: Selectors) -> None:
        self._world = world
        self._selectors = selectors
        self._asking = asyncio.Lock()
        self._revision = -1
        self._slices: list[SliceFacts] = []
        self._unavailable_until = 0.0
        """When the evaluator, which has failed, is asked again (loop clock)."""

        self._gates: FeatureGates | None = None
        self._gates_known = asyncio.Event()
        self._refused: dict[str, float] = {}
        """Selectors that the evaluator does not answer; when each is asked again (loop clock)."""

        self._late: dict[str, str] = {}
        """Selectors whose first attempt had no answer in time, and the namespace that paid."""

        self._parts: dict[str, _Part] = {}
        """Selectors that are evaluated for some devices of a question only."""

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
                self._late.clear()
                self._parts.clear()
            self._gates_known.set()
        return dropped

    def missing(self, expressions: Sequence[str]) -> tuple[Missing | None, float | None]:
        """Return the next question that the evaluator can be asked now; without one, in how many
        seconds it can be asked about a selector that it did not evaluate, if there is one."""
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
        Ask the evaluator one question, and keep the answer.

        :param namespace: what the answer needs in memory is taken from its share.
        """
        await self._wait_for_gates()
        async with self._asking:
            now, expression = asyncio.get_running_loop().time(), missing.expression
            has_paid = self._late.get(expression) == namespace
            seconds = SELECTOR_SECONDS if has_paid else FIRST_SECONDS
            try:
                await self._ask(missing, namespace, seconds)
            except QuestionError as error:
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
    ) -> Sequence[Outcome]:
        """Evaluate a selector for the first of these devices that it is not evaluated for yet."""
        now = asyncio.get_running_loop().time()
        until, outcome = self._expensive.get(expression, (0.0, Outcome()))
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
            question = devices[done : done + number]
            part.outcomes += await asyncio.to_thread(
                evaluate, self._selectors, expression, question, seconds=seconds
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
