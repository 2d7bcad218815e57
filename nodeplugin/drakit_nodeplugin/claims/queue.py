"""
The claim queue of one driver, in which all work on claims waits for its turn.

The kubelet's deadline ends only the call. The queue owns the work, which continues. A call joins
the last operation in the claim's queue if both are of the same kind. Any other call waits for its
turn, and an unprepare abandons the prepares before it. Recovery, second prepares, the CDI file
restorer and the stale claim collector take turns in the same queue. The claims of one call share a
batch, but each has a separate result. A slow claim delays the other claims only until the call's
timeout.

:mod:`drakit_driver.runtime.order` implements the order. :mod:`.prepare` and :mod:`.unprepare` do
the work on a claim, and order driver calls by hardware. :mod:`drakit_nodeplugin.kubelet.dra`
handles malformed claims and the kubelet's messages.

Does not depend on gRPC or sockets.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from drakit.device import ClaimReference
from drakit_daemon import logs
from drakit_driver.runtime.order import Order, Place, claim_key
from drakit_nodeplugin.claims.errors import FaultError
from drakit_nodeplugin.claims.prepare import Preparing
from drakit_nodeplugin.claims.unprepare import Undone
from drakit_nodeplugin.claims.work import (
    GERUND,
    ClaimResult,
    ClaimWork,
    Operation,
    Step,
    waits_for_hardware,
)
from drakit_nodeplugin.state.records import State, StoredClaim

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

MAX_WAITING = 4
"""Maximum number of turns that wait in a claim's queue. Further calls are refused. A pod restart
needs three turns: prepare, unprepare, prepare. Longer queues occur only if a driver hangs."""

SLOW_SECONDS = 180.0
"""How long work must take to be reported as slow. This corresponds to two attempts by the kubelet,
90 s apart."""

RESTART = (
    "restart the driver's pod on this node, which is the node plugin's if the driver runs in it"
)
"""The remedy for a driver that hangs, for messages."""

NOT_DONE = "NotDone"
"""The reason in a result that does not show the outcome for the claim, because its work continues
or was canceled."""


class ClaimObserver(Protocol):
    """Observes the results of the kubelet's calls and of second prepares. Methods must return
    immediately, and must not raise."""

    def finished(
        self, claim: ClaimReference, operation: Operation, answer: ClaimResult, seconds: float
    ) -> None:
        """Called when an operation has ended, `seconds` after it was requested."""
        ...

    def lasts(self, claim: ClaimReference, operation: Operation) -> None:
        """Called when an operation has been running for :data:`SLOW_SECONDS`."""
        ...


@dataclass(eq=False, kw_only=True, slots=True)
class _WorkTurn(Place):
    """A turn for the work of a call, or for a second prepare."""

    work: ClaimWork
    asked_at: float
    request_id: str
    context: contextvars.Context
    """The context of the work, which contains the ID of the request that began it."""

    late: bool = False
    """Whether a caller has been asked to retry."""


class ClaimQueue:
    """The claim queue of one driver."""

    def __init__(
        self,
        driver: str,
        engine: Preparing,
        *,
        order: Order,
        observers: Sequence[ClaimObserver] = (),
        on_steps: Callable[[Mapping[Step, float]], None] = lambda _: None,
    ) -> None:
        """
        :param engine: the engine. It must use the same `order` for the hardware of claims.
        :param on_steps: called after each prepare with the duration of each step in seconds.
        """
        self._driver = driver
        self._engine = engine
        self._order = order
        self._observers = observers
        self._on_steps = on_steps
        self._tasks: set[asyncio.Task[Any]] = set()
        self._draining = False

    # ------------------------------------------------------------ the kubelet's calls

    async def ask(
        self, operation: Operation, claims: Sequence[ClaimReference], *, timeout_seconds: float
    ) -> Mapping[str, ClaimResult]:
        """
        Return each claim's result. If the work on a claim is still in flight after the timeout, its
        result reports this.

        UIDs must be unique. If the caller is canceled, the work continues.
        """
        turns = self._join_or_begin(operation, claims)
        works = {uid: turn.work for uid, turn in turns.items()}
        if waiting := [work.finished for work in works.values() if work.result is None]:
            await asyncio.wait(waiting, timeout=timeout_seconds)
        answers: dict[str, ClaimResult] = {}
        for claim in claims:
            work = works.get(claim.uid)
            answer = None if work is None else work.result
            answers[claim.uid] = answer or self._not_yet(operation, claim, turns.get(claim.uid))
        return answers

    async def drain(self, *, timeout_seconds: float | None = None) -> bool:
        """
        Wait until no work is in flight, including the work of calls that arrive in the meantime.
        Return False on a timeout. From now on, only calls get turns.
        """
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not self._order.idle.is_set():
                    await self._order.idle.wait()
        return self._order.idle.is_set()

    async def cancel(self) -> None:
        """Cancel the work in flight. The checkpoint contains the work that has begun, and the next
        active instance finishes or undoes it."""
        left = self._work_turns()
        if not self._tasks and not left:
            return
        facts = {"driver": self._driver, "works": len(left)}
        logger.warning("work in flight canceled by the shutdown", extra=facts)
        for turn in left:
            # A waiting turn must not start when the turn before it ends.
            if turn.behind:
                self._interrupt(turn.work)
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        for turn in self._work_turns():  # the driver may take longer to end its calls
            self._interrupt(turn.work)

    def _work_turns(self) -> list[_WorkTurn]:
        """Return the turns of unfinished work."""
        return [turn for turn in self._order.places() if isinstance(turn, _WorkTurn)]

    # ------------------------------------------------------------ work without a call

    async def undo_left(self, uids: Collection[str], *, state: State) -> Mapping[str, Undone]:
        """
        Undo entries that a crash or an unavailable driver has left in a state.

        The result does not include claims that need not be undone, because work on them is in
        flight, or because they have left that state.
        """
        held = [uid for uid in uids if self.take(uid)]
        undone: dict[str, Undone] = {}

        def settled(results: Mapping[str, Undone]) -> None:
            undone.update(results)
            # Let calls for this claim continue now, because the driver may take minutes for another
            # claim.
            for uid in results:
                self.release(uid)

        def ended() -> None:
            for uid in held:
                if uid not in undone:
                    self.release(uid)

        await self._shield(self._engine.undo_left(held, state=state, settled=settled), ended=ended)
        return undone

    async def _shield(
        self, work: Coroutine[Any, Any, ResultT], *, ended: Callable[[], None]
    ) -> ResultT:
        """Run work in a task of the queue, and always call `ended` afterwards. If the caller is
        canceled, the work continues, because a driver call can take a long time. :meth:`cancel`
        ends the work."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[ResultT]) -> None:
            self._tasks.discard(task)
            ended()
            if not task.cancelled() and (error := task.exception()) is not None and is_left:
                facts = {"driver": self._driver, "error": str(error)}
                logger.error("work without a call failed", extra=facts)

        is_left = False
        task.add_done_callback(done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            is_left = True
            raise

    async def prepare_again(self, claim: ClaimReference) -> ClaimResult:
        """Prepare a prepared claim a second time, after all earlier turns. Calls from the kubelet
        for the claim wait in the meantime. An unprepare abandons this work."""
        if self._draining:
            return _not_done(claim, "its driver is about to stop")
        turn = self._new("prepare", claim, again=True)
        if self._order.enter(turn):
            self._begin([turn])
        await asyncio.wait([turn.work.finished])
        assert turn.work.result is not None
        return turn.work.result

    async def collect(self, stale: StoredClaim) -> bool:
        """Unprepare a claim that the kubelet has forgotten, unless its entry has changed since it
        was read. Return whether this call removed the entry."""
        if not self.take(stale.uid):
            return False
        return await self._shield(
            self._engine.collect(stale), ended=lambda: self.release(stale.uid)
        )

    def held(self, uid: str) -> bool:
        """Return whether work on a claim is in flight."""
        return not self._order.is_free([claim_key(uid)])

    def take(self, uid: str) -> bool:
        """Take the turn of a claim if no work on it is in flight. :meth:`release` ends the turn."""
        if self._draining or self.held(uid):
            return False
        return self._order.enter(Place(keys=[claim_key(uid)]))

    def release(self, uid: str) -> None:
        """End a turn from :meth:`take`."""
        self._order.leave(self._order.line(claim_key(uid))[0])

    # ------------------------------------------------------------ work

    def _join_or_begin(
        self, operation: Operation, claims: Sequence[ClaimReference]
    ) -> dict[str, _WorkTurn]:
        """Join or begin the work on each claim. A claim is missing from the result if its queue is
        full."""
        turns: dict[str, _WorkTurn] = {}
        free: list[_WorkTurn] = []
        joined: set[str] = set()
        for claim in claims:
            before = self._order.line(claim_key(claim.uid))
            last = before[-1] if before else None
            # Don't join a second prepare: if it fails, the claim remains usable, so its result must
            # not become the result of a call.
            if (
                isinstance(last, _WorkTurn)
                and last.work.operation == operation
                and not last.work.again
            ):
                turns[claim.uid] = last
                joined.add(last.request_id)
                continue
            if len(before) > MAX_WAITING:
                continue
            if operation == "unprepare":
                for turn in before:
                    if isinstance(turn, _WorkTurn) and turn.work.operation == "prepare":
                        turn.work.abandon()
            turn = turns[claim.uid] = self._new(operation, claim)
            if self._order.enter(turn):
                free.append(turn)
        for request_id in sorted(joined):
            facts = {"driver": self._driver, "began_by": request_id}
            logger.info("call joins work in flight", extra=facts)
        if free:
            self._begin(free)
        return turns

    def _new(
        self, operation: Operation, claim: ClaimReference, *, again: bool = False
    ) -> _WorkTurn:
        turn = _WorkTurn(
            keys=[claim_key(claim.uid)],
            on_turn=lambda: self._begin([turn]),
            work=ClaimWork(operation=operation, claim=claim, again=again),
            asked_at=asyncio.get_running_loop().time(),
            request_id=logs.request_id.get(),
            context=contextvars.copy_context(),
        )
        turn.work.on_result = lambda answer: self._finished(turn, answer)
        return turn

    def _begin(self, turns: Sequence[_WorkTurn]) -> None:
        works = [turn.work for turn in turns]
        operation = works[0].operation
        task = asyncio.get_running_loop().create_task(
            self._run(operation, works),
            name=f"{operation} {self._driver}",
            context=turns[0].context,
        )
        self._tasks.add(task)
        # Use a callback, because a `finally` in the task would not run if the task is canceled
        # before its first step.
        task.add_done_callback(lambda task: self._ended(task, works))

    async def _run(self, operation: Operation, works: Sequence[ClaimWork]) -> None:
        slow = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._report_slow, works)
        try:
            if works[0].again:
                await self._engine.prepare_again(works)
            elif operation == "prepare":
                await self._engine.prepare(works)
            else:
                await self._engine.unprepare(works)
        except Exception:
            # The engine handles every expected failure. Any other exception is a bug in the plugin,
            # but the kubelet must still get a response. Log the exception's message, but don't
            # return it, because it may contain anything.
            facts = {"driver": self._driver, "operation": operation}
            logger.exception("engine failed", extra=facts)
            for work in works:
                if work.result is None:
                    work.refuse(FaultError(claim=str(work.claim)))
        finally:
            slow.cancel()

    def _ended(self, task: asyncio.Task[None], works: Sequence[ClaimWork]) -> None:
        self._tasks.discard(task)
        for work in works:
            if work.result is not None:
                continue
            if task.cancelled():
                self._interrupt(work)
                continue
            facts = {"driver": self._driver, "claim": str(work.claim), "claim_uid": work.claim.uid}
            logger.error("engine returned no result for a claim", extra=facts)
            work.refuse(FaultError(claim=str(work.claim)))

    def _interrupt(self, work: ClaimWork) -> None:
        doing = GERUND[work.operation]
        text = f"the node plugin stopped while {doing} the claim; the kubelet retries"
        work.finish(_not_done(work.claim, text))

    def _report_slow(self, works: Sequence[ClaimWork]) -> None:
        for work in works:
            if work.result is None:
                for observer in self._observers:
                    observer.lasts(work.claim, work.operation)

    # ------------------------------------------------------------ results

    def _finished(self, turn: _WorkTurn, answer: ClaimResult) -> None:
        work = turn.work
        self._order.leave(turn)
        seconds = asyncio.get_running_loop().time() - turn.asked_at
        if turn.late:
            logger.info(
                "work in flight ended after its call",
                extra={
                    "driver": self._driver,
                    "operation": work.operation,
                    "claim": str(work.claim),
                    "claim_uid": work.claim.uid,
                    "seconds": round(seconds, 3),
                },
            )
        # A second prepare of a claim that is not prepared does nothing, so its result means
        # nothing.
        nothing = work.again and answer.error is None and not answer.devices
        if answer.reason == NOT_DONE or nothing:
            return
        if work.operation == "prepare":
            self._on_steps(work.step_seconds)
        for observer in self._observers:
            try:
                observer.finished(work.claim, work.operation, answer, seconds)
            # even if an observer has a bug, the kubelet must get a response
            except Exception:
                facts = {"driver": self._driver, "claim": str(work.claim)}
                logger.exception("result could not be reported", extra=facts)

    def _not_yet(
        self, operation: Operation, claim: ClaimReference, turn: _WorkTurn | None
    ) -> ClaimResult:
        if turn is None:
            text = "too many calls for this claim are in flight; check the log of driver "
            return _not_done(claim, text + self._driver)
        turn.late = True
        text = f"driver {self._driver} is still {GERUND[operation]} this claim"
        if waits_for_hardware(self._order, claim.uid):
            text += ", which waits for a device that the driver is working on for another claim"
        text += "; the work continues, and the kubelet retries"
        if asyncio.get_running_loop().time() - turn.asked_at > SLOW_SECONDS:
            text += f"; if this persists, {RESTART}"
        return _not_done(claim, text)


def _not_done(claim: ClaimReference, text: str) -> ClaimResult:
    return ClaimResult(error=f"claim {claim}: {text}", reason=NOT_DONE)
