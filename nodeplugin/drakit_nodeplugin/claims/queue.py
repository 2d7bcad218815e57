"""
One queue per claim: all work on a claim of one driver waits here for its turn.

The kubelet's deadline ends only the call: the work belongs to the queue and continues. A call joins
the last operation in the claim's queue if both are the same. Any other call waits for its turn, and
an unprepare abandons the prepares before it. Recovery, second prepares, the restorer of CDI files
and the collector of stale claims take turns in the same queues. Claims of one call share a batch,
but each has its own answer: a slow claim delays the others only until the call's timeout.

:mod:`.prepare` and :mod:`.unprepare` do the work on a claim; :mod:`drakit_nodeplugin.kubelet.dra`
handles malformed claims and the kubelet's messages.

It must not know gRPC, sockets, or how a claim is prepared.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from drakit import logs
from drakit.device import ClaimReference
from drakit_nodeplugin.claims.errors import FaultError
from drakit_nodeplugin.claims.unprepare import Undone
from drakit_nodeplugin.claims.work import (
    GERUND,
    ClaimAnswer,
    ClaimWork,
    Operation,
    all_answered,
)
from drakit_nodeplugin.state.records import State, StoredClaim

__all__ = ("NOT_DONE", "ClaimObserver", "ClaimQueue", "Engine")

logger = logging.getLogger(__name__)

MAX_WAITING = 4
"""Turns that may wait in a claim's queue before a call is refused. A pod's restart needs three:
prepare, unprepare, prepare. A queue only grows longer if a driver hangs."""

SLOW_SECONDS = 180.0
"""The time after which work is reported as slow: two of the kubelet's attempts, 90 s apart."""

NOT_DONE = "NotDone"
"""The reason of an answer that proves nothing about the claim: its work continues, or was
canceled."""


class Engine(Protocol):
    """Prepares and unprepares claims. The queue calls it when the turn of a claim has come."""

    async def prepare(self, works: Sequence[ClaimWork]) -> None:
        """Prepare a batch; every answer is resolved, each as soon as its claim is done."""
        ...

    async def prepare_again(self, works: Sequence[ClaimWork]) -> None:
        """Prepare claims that are prepared a second time, with new edits; every answer is resolved.
        A claim that is not prepared needs nothing, and its answer has no devices."""
        ...

    async def unprepare(self, works: Sequence[ClaimWork]) -> None:
        """Unprepare a batch; not being prepared is success. Answers are without devices."""
        ...

    def undo_left(
        self, uids: Collection[str], *, state: State
    ) -> AsyncGenerator[Mapping[str, Undone]]:
        """Undo entries that were left in a state; yield each result as soon as it is known."""
        ...

    async def collect(self, stale: StoredClaim) -> bool:
        """Unprepare a claim that has not changed since it was read; return whether it is gone."""
        ...


class ClaimObserver(Protocol):
    """Observes the results of the kubelet's calls; returns at once, and raises nothing."""

    def finished(
        self, claim: ClaimReference, operation: Operation, answer: ClaimAnswer, seconds: float
    ) -> None:
        """An operation ended, `seconds` after the kubelet requested it."""
        ...

    def lasts(self, claim: ClaimReference, operation: Operation) -> None:
        """An operation has lasted for :data:`SLOW_SECONDS`."""
        ...


@dataclass(eq=False, kw_only=True, slots=True)
class _Turn:
    """A place in a claim's queue: a call's work, or another user that needs the claim alone."""

    uid: str
    work: ClaimWork | None = None
    asked_at: float = 0.0
    request_id: str = "-"
    late: bool = False
    """A caller was asked to call again."""

    context: contextvars.Context | None = None
    """The context of work that had to wait: it keeps the id of the request that began it."""

    ready: asyncio.Future[None] | None = None
    """Resolved when the turn of another user has come."""


class ClaimQueue:
    """The queues of one driver's claims."""

    def __init__(
        self, driver: str, engine: Engine, *, observers: Sequence[ClaimObserver] = ()
    ) -> None:
        self._driver = driver
        self._engine = engine
        self._observers = observers
        self._queues: dict[str, deque[_Turn]] = {}
        """Queues by claim UID. The first turn of a queue owns the claim. A queue is never empty."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._emptied = asyncio.Event()
        """Set when the last queue is gone."""

    # ------------------------------------------------------------ the kubelet's calls

    async def ask(
        self, operation: Operation, claims: Sequence[ClaimReference], *, timeout_seconds: float
    ) -> Mapping[str, ClaimAnswer]:
        """
        Return each claim's answer; after the timeout, report that its work is still in flight.

        UIDs must be unique. If the caller is canceled, the work continues.
        """
        turns = self._join_or_begin(operation, claims)
        if works := [work for _, work in turns.values() if work.answer is None]:
            await all_answered(works, timeout_seconds=timeout_seconds)
        return {claim.uid: self._answer(operation, claim, turns.get(claim.uid)) for claim in claims}

    async def drain(self, *, timeout_seconds: float | None = None) -> bool:
        """
        Wait until nothing is in flight, including calls that come meanwhile; return whether that
        came in time. No other user gets a turn from now on.
        """
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while self._queues:
                    self._emptied.clear()
                    await self._emptied.wait()
        return not self._queues

    async def cancel(self) -> None:
        """Cancel the work in flight. The checkpoint contains what it began, and the next active
        instance finishes or undoes it."""
        if not (left := self._works()):
            return
        facts = {"driver": self._driver, "works": len(left)}
        logger.warning("work in flight canceled by the shutdown", extra=facts)
        for queue in self._queues.values():
            for turn in list(queue)[1:]:  # these must not begin when the first of their queue ends
                if turn.work is not None:
                    self._interrupt(turn.work)
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    def _works(self) -> list[ClaimWork]:
        turns = (turn for queue in self._queues.values() for turn in queue)
        return [turn.work for turn in turns if turn.work is not None]

    # ------------------------------------------------------------ work without a call

    async def undo_left(self, uids: Collection[str], *, state: State) -> Mapping[str, Undone]:
        """
        Undo entries that a crash, or a driver that was unavailable, has left in a state.

        The result omits claims that need nothing: work on them is in flight, or they have left that
        state.
        """
        held = [uid for uid in uids if self.take(uid)]
        undone: dict[str, Undone] = {}
        try:
            async with aclosing(self._engine.undo_left(held, state=state)) as groups:
                async for group in groups:
                    undone |= group
                    # The driver may take minutes for another claim; calls for this one continue.
                    for uid in group:
                        self.release(uid)
        finally:
            for uid in held:
                if uid not in undone:
                    self.release(uid)
        return undone

    async def prepare_again(self, claim: ClaimReference) -> ClaimAnswer:
        """Prepare a prepared claim a second time, after all earlier turns. Calls of the kubelet for
        it wait meanwhile; an unprepare abandons this work."""
        if self._draining:
            return _not_done(claim, "its driver is about to stop")
        turn, work = self._new("prepare", claim, again=True)
        answered: asyncio.Future[ClaimAnswer] = asyncio.get_running_loop().create_future()

        def set_answer(answer: ClaimAnswer) -> None:
            if not answered.done():  # the caller may have been canceled
                answered.set_result(answer)

        work.callbacks.append(set_answer)
        if self._add(turn):
            self._begin([turn])
        else:
            turn.context = contextvars.copy_context()
        return await answered

    async def collect(self, stale: StoredClaim) -> bool:
        """Unprepare a claim that the kubelet forgot, unless it has changed since it was read;
        return whether it is gone."""
        if self._draining:
            return False
        async with self.hold(stale.uid):
            return await self._engine.collect(stale)

    def held(self, uid: str) -> bool:
        """Return whether work on a claim is in flight."""
        return uid in self._queues

    def take(self, uid: str) -> bool:
        """Take the turn of a claim if no work on it is in flight; :meth:`release` ends it."""
        return not self._draining and uid not in self._queues and self._add(_Turn(uid=uid))

    def release(self, uid: str) -> None:
        """End a turn that was taken."""
        self._leave(self._queues[uid][0])

    @asynccontextmanager
    async def hold(self, uid: str) -> AsyncGenerator[None]:
        """Hold a claim alone, after all earlier turns."""
        turn = _Turn(uid=uid)
        try:
            if not self._add(turn):
                turn.ready = asyncio.get_running_loop().create_future()
                await turn.ready
            yield
        finally:
            self._leave(turn)

    # ------------------------------------------------------------ queues

    def _add(self, turn: _Turn) -> bool:
        """Add a turn to its queue; return whether it has come."""
        queue = self._queues.get(turn.uid)
        if queue is None:
            self._queues[turn.uid] = deque((turn,))
            return True
        queue.append(turn)
        return False

    def _leave(self, turn: _Turn) -> None:
        """End a turn, whether it has come or not; the next one begins."""
        queue = self._queues[turn.uid]
        first = queue[0] is turn
        queue.remove(turn)
        if not queue:
            del self._queues[turn.uid]
            if not self._queues:
                self._emptied.set()
        elif first:
            following = queue[0]
            if following.work is not None:
                self._begin([following])
            elif following.ready is not None and not following.ready.done():
                following.ready.set_result(None)

    # ------------------------------------------------------------ work

    def _join_or_begin(
        self, operation: Operation, claims: Sequence[ClaimReference]
    ) -> dict[str, tuple[_Turn, ClaimWork]]:
        """Find or begin the work of each claim; one is missing if its queue is full."""
        turns: dict[str, tuple[_Turn, ClaimWork]] = {}
        free: list[_Turn] = []
        joined: set[str] = set()
        for claim in claims:
            queue = self._queues.get(claim.uid, ())
            last = queue[-1] if queue else None
            if last is not None and last.work is not None and last.work.joins(operation):
                turns[claim.uid] = last, last.work
                joined.add(last.request_id)
                continue
            if len(queue) > MAX_WAITING:
                continue
            if operation == "unprepare":
                for turn in queue:
                    if turn.work is not None and turn.work.operation == "prepare":
                        turn.work.abandon()
            turn, _ = turns[claim.uid] = self._new(operation, claim)
            if self._add(turn):
                free.append(turn)
            else:
                turn.context = contextvars.copy_context()
        for request_id in sorted(joined):
            facts = {"driver": self._driver, "began_by": request_id}
            logger.info("call joins work in flight", extra=facts)
        if free:
            self._begin(free)
        return turns

    def _new(
        self, operation: Operation, claim: ClaimReference, *, again: bool = False
    ) -> tuple[_Turn, ClaimWork]:
        work = ClaimWork(operation=operation, claim=claim, again=again)
        turn = _Turn(
            uid=claim.uid,
            work=work,
            asked_at=asyncio.get_running_loop().time(),
            request_id=logs.request_id.get(),
        )
        work.callbacks.append(lambda answer: self._finished(turn, work, answer))
        return turn, work

    def _begin(self, turns: Sequence[_Turn]) -> None:
        works = [turn.work for turn in turns if turn.work is not None]
        operation = works[0].operation
        task = asyncio.get_running_loop().create_task(
            self._run(operation, works),
            name=f"{operation} {self._driver}",
            context=turns[0].context,
        )
        self._tasks.add(task)
        # A callback, not a `finally` of the task: that would not run if the task is canceled
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
        except Exception as error:
            # The engine answers every expected failure; anything else is a bug in our own code, and
            # must not keep the kubelet without an answer. Its text may hold anything: log only.
            facts = {"driver": self._driver, "operation": operation}
            logger.exception("engine failed", extra=facts)
            for work in works:
                if work.answer is None:
                    work.refuse(FaultError(claim=str(work.claim), cause=error))
        finally:
            slow.cancel()

    def _ended(self, task: asyncio.Task[None], works: Sequence[ClaimWork]) -> None:
        self._tasks.discard(task)
        for work in works:
            if work.answer is not None:
                continue
            if task.cancelled():
                self._interrupt(work)
                continue
            facts = {"driver": self._driver, "claim": str(work.claim), "claim_uid": work.claim.uid}
            logger.error("engine returned no answer for a claim", extra=facts)
            text = (
                "the node plugin produced no result for it; this is a bug in the node plugin; see"
            )
            error = f"claim {work.claim}: {text} its log on this node"
            work.finish(ClaimAnswer(error=error, reason=FaultError.reason))

    def _interrupt(self, work: ClaimWork) -> None:
        doing = GERUND[work.operation]
        text = f"{doing} it was interrupted because the node plugin stopped; the kubelet retries"
        work.finish(_not_done(work.claim, text))

    def _report_slow(self, works: Sequence[ClaimWork]) -> None:
        for work in works:
            if work.answer is None:
                for observer in self._observers:
                    observer.lasts(work.claim, work.operation)

    # ------------------------------------------------------------ answers

    def _finished(self, turn: _Turn, work: ClaimWork, answer: ClaimAnswer) -> None:
        self._leave(turn)
        seconds = asyncio.get_running_loop().time() - turn.asked_at
        if turn.late:
            logger.info(
                "work in flight ended after its call",
                extra={
                    "driver": self._driver,
                    "operation": work.operation,
                    "claim": str(work.claim),
                    "claim_uid": turn.uid,
                    "seconds": round(seconds, 3),
                },
            )
        # A second prepare of a claim that is not prepared did nothing, and shows nothing.
        nothing = work.again and answer.error is None and not answer.devices
        if answer.reason != NOT_DONE and not nothing:
            for observer in self._observers:
                observer.finished(work.claim, work.operation, answer, seconds)

    def _answer(
        self,
        operation: Operation,
        claim: ClaimReference,
        found: tuple[_Turn, ClaimWork] | None,
    ) -> ClaimAnswer:
        if found is None:
            text = "too many calls for this claim are in flight; check the log of driver "
            return _not_done(claim, text + self._driver)
        turn, work = found
        if work.answer is None:
            turn.late = True
            text = (
                f"driver {self._driver} is still {GERUND[operation]} this claim; the work "
                "continues, and the kubelet retries"
            )
            return _not_done(claim, text)
        return work.answer


def _not_done(claim: ClaimReference, text: str) -> ClaimAnswer:
    return ClaimAnswer(error=f"claim {claim}: {text}", reason=NOT_DONE)
