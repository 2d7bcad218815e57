"""
Work in flight for the claims of one driver: who joins it, who waits for it, who gives up on it.

The kubelet's deadline ends a call, and nothing more: the work belongs to this registry and goes
on. Per claim UID, a call for the same operation joins the newest work; a call for the other one
waits for it and runs then, and an unprepare asks the engine to give up the prepare that it waits
for. Claims of one call share a batch of the engine, but each has an answer of its own: one that
takes long costs the others nothing but the wait for it, which ends with the call's time.

It must not know gRPC, sockets, or how a claim is prepared.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drakit import logs
from drakit.device import ClaimReference
from drakit_nodeplugin.claims.answers import GERUND, ClaimService, Operation, PrepareAnswer

__all__ = ("InFlight",)

logger = logging.getLogger(__name__)

MAX_WAITING = 4
"""How many works may stand in line for one claim. Prepare, unprepare and prepare again is
what a pod's restart makes; a longer line only grows behind a driver that hangs."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Work:
    """One operation on one claim, from its wait for the work before it to its answer."""

    operation: Operation
    claim: ClaimReference
    request_id: str
    before: _Work | None
    """The work that it still waits for."""

    began_at: float
    answered_late: bool = False
    """Somebody was told to ask again."""

    answer: asyncio.Future[PrepareAnswer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class InFlight:
    """The works of one driver, by the claim UIDs that they are for."""

    def __init__(self, claims: ClaimService, *, driver: str) -> None:
        self._claims = claims
        self._driver = driver
        self._newest: dict[str, _Work] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(
        self, operation: Operation, claims: Sequence[ClaimReference], *, timeout_seconds: float
    ) -> Mapping[str, PrepareAnswer]:
        """
        Answer for each claim what its work says, or after the timeout that it still goes on.

        UIDs must be unique. If the caller is cancelled, the works go on.
        """
        works = self._works(operation, claims)
        if answers := [work.answer for work in works.values() if not work.answer.done()]:
            await asyncio.wait(answers, timeout=timeout_seconds)
        return {claim.uid: self._answer(operation, claim, works.get(claim.uid)) for claim in claims}

    async def drain(self, *, timeout_seconds: float) -> None:
        """Let works end; stop those that have not ended then. What they began is in the
        checkpoint, and is finished or undone by the next instance."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(0.0, timeout_seconds))
        if left := set(self._tasks):
            logger.warning(
                "work in flight is cut by the stop",
                extra={"driver": self._driver, "works": len(left)},
            )
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=1.0)

    # ------------------------------------------------------------ which work answers a claim

    def _works(self, operation: Operation, claims: Sequence[ClaimReference]) -> dict[str, _Work]:
        """Find or begin the work of each claim; one is missing where the line is too long."""
        works: dict[str, _Work] = {}
        free: list[_Work] = []
        joined: set[str] = set()
        for claim in claims:
            newest = self._newest.get(claim.uid)
            if newest is not None and newest.operation == operation:
                works[claim.uid] = newest
                joined.add(newest.request_id)
                continue
            if newest is not None and _waiting(newest) >= MAX_WAITING:
                continue
            work = works[claim.uid] = self._add(operation, claim, before=newest)
            if newest is None:
                free.append(work)
            else:
                if operation == "unprepare":
                    self._claims.abandon(claim.uid)
                self._begin([work])
        for request_id in sorted(joined):
            logger.info(
                "call joins work in flight",
                extra={"driver": self._driver, "began_by": request_id},
            )
        if free:
            self._begin(free)
        return works

    def _add(self, operation: Operation, claim: ClaimReference, *, before: _Work | None) -> _Work:
        work = _Work(
            operation=operation,
            claim=claim,
            request_id=logs.request_id.get(),
            before=before,
            began_at=asyncio.get_running_loop().time(),
        )
        self._newest[claim.uid] = work
        return work

    def _begin(self, works: Sequence[_Work]) -> None:
        operation = works[0].operation
        task = asyncio.create_task(self._run(works), name=f"{operation} {self._driver}")
        self._tasks.add(task)
        # A callback, not a `finally` of the task: that would not run if the task is cancelled
        # before its first step.
        task.add_done_callback(lambda _: self._ended(task, works))

    def _ended(self, task: asyncio.Task[None], works: Sequence[_Work]) -> None:
        self._tasks.discard(task)
        for work in works:
            if work.answer.done():
                continue
            doing = GERUND[work.operation]
            if task.cancelled():
                text = f"{doing} it was interrupted by a stop of the node plugin; the kubelet asks"
                self._answered(work, _error(work.claim, f"{text} again"))
                continue
            logger.error(
                "engine gave no answer for a claim",
                extra={
                    "driver": self._driver,
                    "claim": str(work.claim),
                    "claim_uid": work.claim.uid,
                },
            )
            text = "the node plugin has no answer for it; this is a fault of the plugin, and its"
            self._answered(work, _error(work.claim, f"{text} log on this node says more"))

    # ------------------------------------------------------------ the work itself

    async def _run(self, works: Sequence[_Work]) -> None:
        before = works[0].before
        if before is not None:
            await asyncio.wait({before.answer})
            works[0].before = None  # or the line would keep all its predecessors in memory
        operation = works[0].operation
        asked = {work.claim.uid: work for work in works}

        def answer(uid: str, said: PrepareAnswer) -> None:
            if uid not in asked or asked[uid].answer.done():
                logger.error(
                    "engine answered for a claim that nobody asked for, or twice",
                    extra={"driver": self._driver, "claim_uid": uid},
                )
                return
            self._answered(asked[uid], said)

        engine = self._claims.prepare if operation == "prepare" else self._claims.unprepare
        try:
            await engine([work.claim for work in works], answer)
        except Exception as error:
            # The engine answers what can go wrong; anything else is a fault in our own code, and
            # must not keep the kubelet without an answer. Its text may hold anything: log only.
            logger.exception(
                "engine failed", extra={"driver": self._driver, "operation": operation}
            )
            for work in works:
                if not work.answer.done():
                    self._answered(work, _fault(operation, work.claim, error))

    def _answered(self, work: _Work, answer: PrepareAnswer) -> None:
        work.answer.set_result(answer)
        if self._newest.get(work.claim.uid) is work:
            del self._newest[work.claim.uid]
        if work.answered_late:
            seconds = round(asyncio.get_running_loop().time() - work.began_at, 3)
            logger.info(
                "work in flight ended after its call",
                extra={
                    "driver": self._driver,
                    "operation": work.operation,
                    "claim": str(work.claim),
                    "claim_uid": work.claim.uid,
                    "seconds": seconds,
                },
            )

    def _answer(
        self, operation: Operation, claim: ClaimReference, work: _Work | None
    ) -> PrepareAnswer:
        if work is None:
            return _error(
                claim,
                f"too many calls wait for work on it that does not end; look at the driver "
                f"{self._driver}",
            )
        if not work.answer.done():
            work.answered_late = True
            return _error(
                claim,
                f"driver {self._driver} is still {GERUND[operation]} it; the work goes on, and "
                f"the kubelet asks again",
            )
        return work.answer.result()


def _waiting(work: _Work) -> int:
    """Count the works of a line that wait, this one included."""
    count, before = 0, work.before
    while before is not None:
        count, before = count + 1, before.before
    return count


def _error(claim: ClaimReference, text: str) -> PrepareAnswer:
    return PrepareAnswer(error=f"claim {claim}: {text}", reason="NotDone")


def _fault(operation: Operation, claim: ClaimReference, error: Exception) -> PrepareAnswer:
    return PrepareAnswer(
        error=f"claim {claim}: {GERUND[operation]} it failed by a fault of the node plugin "
        f"({type(error).__name__}); its log on this node says more",
        reason="Fault",
    )
