"""
Selectors evaluated for the store: what a pod's explanation needs, before it is explained.

The evaluator may block for seconds, so it runs in a thread; its questions and outcomes are plain
data. Each selector is evaluated alone. One that fails counts as not evaluated: the pods that need
it get no Event about it, and are explained again when another attempt may succeed.

There is one evaluator, and anyone can write selectors that take long. So the time of evaluations is
a budget of the namespace that asks, and a selector that took too long is remembered by its text.

It must not know pods, queues, or how CEL is evaluated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from drakit_daemon.logs import ProblemLog
from drakit_explain.cel.helper import HelperError, QuestionError
from drakit_explain.recent import keep
from drakit_explain.selectors import Evaluations, FeatureGates, Outcome, Selectors, evaluate
from drakit_explain.world import World
from drakit_operator.budgets import TimeBudgets, Turns

logger = logging.getLogger(__name__)

GATES_SECONDS = 5.0
"""Longest wait for the cluster's feature gates; afterwards they count as unknown."""

MAX_REMEMBERED = 512
"""Selectors that the evaluator does not answer, or that take too long, and that are remembered for
that reason; the oldest go first."""

EXPENSIVE_SECONDS = 300.0
"""Time in which a selector that took too long for some devices counts as such for all others: they
change far more often than selectors."""

BUDGET_SECONDS = 15.0
"""Seconds of evaluation for a namespace at once: some expressions for 200,000 devices. An evaluator
that hangs takes 10 s."""

BUDGET_SHARE = 0.25
"""Seconds of evaluation that come back to a namespace each second."""

BUSY_SECONDS = 0.5
"""Pause of an object while another one of its namespace waits for the evaluator."""

BUSY_STEP_SECONDS = 0.01
"""What is added for each other object that has such a pause: thousands must not poll at once."""

MAX_OF_OBJECT = 64
"""Different selectors of one object, those of its classes included; with more, the object is not
evaluated. A pod of 16 claims can have 131,072."""

P = ParamSpec("P")
Answered = TypeVar("Answered")


class BusyError(Exception):
    """Another object of the namespace waits for the evaluator."""

    def __init__(self, retry_seconds: float) -> None:
        super().__init__("another object of the namespace waits for the evaluator")
        self.retry_seconds: float = retry_seconds


class SelectorEvaluation:
    """Keeps the outcomes of selectors up to date. Not for threads."""

    def __init__(
        self, world: World, selectors: Selectors, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        :param clock: measures evaluations, in seconds.
        """
        self._world = world
        self._selectors = selectors
        self._clock = clock
        self._budgets = TimeBudgets(seconds=BUDGET_SECONDS, share=BUDGET_SHARE)
        self._turns = Turns(self._budgets)
        self._pauses = TimeBudgets(seconds=0, share=1)
        """The pauses of objects, as if they were work: each comes after the others."""

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
        async with self._turns.turn(""):
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

    async def prepare(self, expressions: Sequence[str], *, namespace: str = "") -> float | None:
        """
        Evaluate these selectors for all slices, as far as that is not done yet.

        Return None if all are evaluated, otherwise after how many seconds to try again.

        :param namespace: the time is taken from its budget.
        :raises BusyError: another object of the namespace waits.
        """
        wanted = dict.fromkeys(expressions)
        if not wanted or len(wanted) > MAX_OF_OBJECT:
            return None
        await self._wait_for_gates()
        retries: list[float] = []
        for expression in wanted:
            if not self._is_missing(expression):
                continue
            if namespace and self._turns.is_waiting(namespace):
                # The workers are for other namespaces, too.
                self._pauses.charge(namespace, BUSY_STEP_SECONDS)
                raise BusyError(BUSY_SECONDS + self._pauses.used_seconds(namespace))
            # One at a time: pods with other selectors get their turn in between.
            async with self._turns.turn(namespace):
                retry = await self._prepare(expression, namespace)
            if retry is not None:
                retries.append(retry)
        return min(retries, default=None)

    def lost(self, expressions: Sequence[str]) -> bool:
        """Return whether outcomes were dropped for those of other objects after `prepare`."""
        wanted = dict.fromkeys(expressions)
        if len(wanted) > MAX_OF_OBJECT:
            return False
        return any(each not in self._refused for each in self._world.selectors.unread(wanted))

    def _is_missing(self, expression: str) -> bool:
        """Return whether the evaluator must be asked about a selector."""
        return bool(self._world.selectors.unread([expression]) or self._needed(expression))

    async def _wait_for_gates(self) -> None:
        try:
            async with asyncio.timeout(GATES_SECONDS):
                await self._gates_known.wait()
        except TimeoutError:
            await self.use(None)

    async def _prepare(self, expression: str, namespace: str) -> float | None:
        now = asyncio.get_running_loop().time()
        if (left := self._refused.get(expression, 0.0) - now) > 0:
            return left
        try:
            left = await self._evaluate(expression, namespace)
        except QuestionError as error:
            logger.warning(
                "a selector cannot be evaluated",
                extra={"expression": expression, "error": str(error)},
            )
            keep(self._refused, expression, now + error.retry_seconds, limit=MAX_REMEMBERED)
            return error.retry_seconds
        except HelperError as error:
            self._problems.report(str(error))
            return error.retry_seconds
        self._refused.pop(expression, None)
        return left

    async def _evaluate(self, expression: str, namespace: str) -> float | None:
        """Evaluate for all slices; return after how many seconds to go on, None if it is done."""
        index = self._world.selectors
        if unread := index.unread([expression]):
            if (left := self._budgets.wait_seconds(namespace)) > 0:
                return left
            reads = await self._ask(namespace, self._selectors.reads, unread)
            index.learn(dict(zip(unread, reads, strict=True)), owner=namespace)
        while needed := self._needed(expression):
            # Each time: one question takes a second at most, but there may be a hundred.
            if (left := self._budgets.wait_seconds(namespace)) > 0:
                return left
            for each, devices in needed.devices.items():
                index.store(needed, {each: await self._outcomes(each, devices, namespace)})
        return None

    async def _outcomes(
        self, expression: str, devices: Sequence[Mapping[str, Any]], namespace: str
    ) -> Sequence[Outcome]:
        now = asyncio.get_running_loop().time()
        until, outcome = self._expensive.get(expression, (0.0, Outcome()))
        if until > now:
            return [outcome] * len(devices)
        outcomes = await self._ask(namespace, evaluate, self._selectors, expression, devices)
        if outcomes and outcomes[-1].expensive:
            entry = now + EXPENSIVE_SECONDS, outcomes[-1]
            keep(self._expensive, expression, entry, limit=MAX_REMEMBERED)
        return outcomes

    async def _ask(
        self, namespace: str, question: Callable[P, Answered], *args: P.args, **kwargs: P.kwargs
    ) -> Answered:
        """Ask the evaluator in a thread, and take the time from the namespace's budget."""
        began = self._clock()
        try:
            answer = await asyncio.to_thread(question, *args, **kwargs)
        finally:
            self._budgets.charge(namespace, self._clock() - began)
        self._problems.report(None)
        return answer

    def _needed(self, expression: str) -> Evaluations:
        world = self._world
        slices = [each.slice for each in world.reachable()]
        return world.selectors.needed([expression], slices, version=world.slices_revision)
