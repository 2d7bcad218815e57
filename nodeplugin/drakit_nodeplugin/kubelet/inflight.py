"""
Work in flight for the claims of one driver: who joins it, who waits for it, who gives up on it.

The kubelet's deadline ends a call, and nothing more: the work belongs to this registry and goes
on. Per claim UID, a call for the same operation joins the newest work; a call for the other one
waits for it and runs then. So the engine never sees two calls for one claim at a time.

It must not know gRPC, sockets, or how a claim is prepared.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from drakit import logs
from drakit.device import ClaimReference
from drakit_nodeplugin.claims.answers import PrepareAnswer

__all__ = ("Engine", "InFlight", "Operation")

logger = logging.getLogger(__name__)

Operation = Literal["prepare", "unprepare"]

Engine = Callable[[Sequence[ClaimReference]], Awaitable[Mapping[str, PrepareAnswer]]]
"""One operation of the engine; an unprepare answers without devices."""

MAX_WAITING = 4
"""How many works may stand in line for one claim. Prepare, unprepare and prepare again is
what a pod's restart makes; a longer line only grows behind a driver that hangs."""

_GERUND: Mapping[Operation, str] = {"prepare": "preparing", "unprepare": "unpreparing"}


@dataclass(eq=False, kw_only=True, slots=True)
class _Work:
    """One call of the engine, from its wait for the work before it to its answers."""

    operation: Operation
    claims: Sequence[ClaimReference]
    request_id: str
    before: _Work | None
    waiting: int
    answered_late: bool = False
    """Somebody was told to ask again."""

    task: asyncio.Task[Mapping[str, PrepareAnswer]] = field(init=False)


class InFlight:
    """The works of one driver, by the claim UIDs that they are for."""

    def __init__(self, engines: Mapping[Operation, Engine], *, driver: str) -> None:
        self._engines = engines
        self._driver = driver
        self._newest: dict[str, _Work] = {}
        self._tasks: set[asyncio.Task[Mapping[str, PrepareAnswer]]] = set()

    async def ask(
        self, operation: Operation, claims: Sequence[ClaimReference], *, timeout_seconds: float
    ) -> Mapping[str, PrepareAnswer]:
        """
        Answer for each claim what its work says, or after the timeout that it still goes on.

        UIDs must be unique. If the caller is cancelled, the works go on.
        """
        works = self._works(operation, claims)
        if tasks := {work.task for work in works.values()}:
            await asyncio.wait(tasks, timeout=timeout_seconds)
        answers: dict[str, PrepareAnswer] = {}
        for claim in claims:
            work = works.get(claim.uid)
            answers[claim.uid] = self._answer(operation, claim, work)
        return answers

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
        due: dict[_Work | None, list[ClaimReference]] = {}
        for claim in claims:
            newest = self._newest.get(claim.uid)
            if newest is not None and newest.operation == operation:
                works[claim.uid] = newest
            else:
                due.setdefault(newest, []).append(claim)
        for joined in {id(work): work for work in works.values()}.values():
            logger.info(
                "call joins work in flight",
                extra={"driver": self._driver, "began_by": joined.request_id},
            )
        for before, group in due.items():
            if before is not None and before.waiting >= MAX_WAITING:
                continue
            work = self._begin(operation, group, before=before)
            works.update((claim.uid, work) for claim in group)
        return works

    def _begin(
        self, operation: Operation, claims: Sequence[ClaimReference], *, before: _Work | None
    ) -> _Work:
        work = _Work(
            operation=operation,
            claims=claims,
            request_id=logs.request_id.get(),
            before=before,
            waiting=0 if before is None else before.waiting + 1,
        )
        for claim in claims:
            self._newest[claim.uid] = work
        work.task = asyncio.create_task(self._run(work), name=f"{operation} {self._driver}")
        self._tasks.add(work.task)
        work.task.add_done_callback(lambda _: self._ended(work))
        return work

    def _ended(self, work: _Work) -> None:
        # A callback, not a `finally` of the task: that would not run if the task is cancelled
        # before its first step.
        self._tasks.discard(work.task)
        for claim in work.claims:
            if self._newest.get(claim.uid) is work:
                del self._newest[claim.uid]

    # ------------------------------------------------------------ the work itself

    async def _run(self, work: _Work) -> Mapping[str, PrepareAnswer]:
        if work.before is not None:
            await asyncio.wait({work.before.task})
            work.before = None  # or the line would keep all its predecessors in memory
        began = asyncio.get_running_loop().time()
        try:
            answers = await self._engines[work.operation](work.claims)
        except Exception as error:
            # The engine answers what can go wrong; anything else is a fault in our own code, and
            # must not keep the kubelet without an answer. Its text may hold anything: log only.
            logger.exception(
                "engine failed", extra={"driver": self._driver, "operation": work.operation}
            )
            return {claim.uid: _fault(work.operation, claim, error) for claim in work.claims}
        if work.answered_late:
            seconds = round(asyncio.get_running_loop().time() - began, 3)
            logger.info(
                "work in flight ended after its call",
                extra={"driver": self._driver, "operation": work.operation, "seconds": seconds},
            )
        if surplus := answers.keys() - {claim.uid for claim in work.claims}:
            logger.error(
                "engine answered for claims that nobody asked for",
                extra={"driver": self._driver, "claims": len(surplus)},
            )
        return answers

    def _answer(
        self, operation: Operation, claim: ClaimReference, work: _Work | None
    ) -> PrepareAnswer:
        doing = _GERUND[operation]
        if work is None:
            return PrepareAnswer(
                error=f"claim {claim}: too many calls wait for work on it that does not end; look "
                f"at the driver {self._driver}"
            )
        if not work.task.done():
            work.answered_late = True
            return PrepareAnswer(
                error=f"claim {claim}: driver {self._driver} is still {doing} it; the work goes "
                f"on, and the kubelet asks again"
            )
        if work.task.cancelled():
            return PrepareAnswer(
                error=f"claim {claim}: {doing} it was interrupted by a stop of the node plugin; "
                f"the kubelet asks again"
            )
        answer = work.task.result().get(claim.uid)
        if answer is None:
            logger.error(
                "engine gave no answer for a claim",
                extra={"driver": self._driver, "claim": str(claim), "claim_uid": claim.uid},
            )
            return PrepareAnswer(
                error=f"claim {claim}: the node plugin has no answer for it; this is a fault of "
                f"the plugin, and its log on this node says more"
            )
        return answer


def _fault(operation: Operation, claim: ClaimReference, error: Exception) -> PrepareAnswer:
    return PrepareAnswer(
        error=f"claim {claim}: {_GERUND[operation]} it failed by a fault of the node plugin "
        f"({type(error).__name__}); its log on this node says more"
    )
