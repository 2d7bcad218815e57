"""
Recovery: finishes what a crash, or a driver that was unavailable, left unfinished.

An entry `preparing` without a process that works on it is undone: the kubelet got no answer for it,
and asks again for what it still wants. An entry `unpreparing` is finished. Both wait for the driver
if it is unavailable. They are found at the start, and at most a few seconds after any write.

:mod:`.unprepare` undoes a claim; :mod:`.stale` decides whether a prepared one is still wanted. It
must not know drivers, the API server or gRPC.
"""

from __future__ import annotations

import asyncio
import logging

from drakit_nodeplugin.claims.checkpoint.records import StoredClaim
from drakit_nodeplugin.claims.checkpoint.store import Checkpoint, CheckpointError
from drakit_nodeplugin.claims.engine import ClaimEngine
from drakit_nodeplugin.claims.unprepare import Undone
from drakit_nodeplugin.file_poller import FilePoller

__all__ = ("Recovery",)

logger = logging.getLogger(__name__)

ROUNDS = 5
"""Rounds of the poller, a second each, between two checks: a driver that was unavailable starts
again within a second to a minute."""


class Recovery:
    """Finishes the entries of one driver on which no process works."""

    def __init__(self, *, checkpoint: Checkpoint, engine: ClaimEngine) -> None:
        self._checkpoint = checkpoint
        self._engine = engine
        self._logged: set[str] = set()
        """UIDs whose failure is in the log: once is enough, until it ends."""

        self._failed: set[str] = set()
        """UIDs that failed although the driver was available: each is retried alone. A driver that
        takes claims together gives one answer for all, and one that hangs would keep all others
        from ever being undone."""

        self._watch = checkpoint.watch()
        self._left = True
        """Whether the last check left an entry, or failed."""

    async def recover(self) -> int:
        """Check once; return how many entries are still unfinished."""
        left: dict[str, StoredClaim] = {}
        undone = 0
        for state in ("preparing", "unpreparing"):
            claims = {claim.uid: claim for claim in await self._checkpoint.in_state(state)}
            left |= claims
            alone = [[uid] for uid in sorted(claims.keys() & self._failed)]
            together = sorted(claims.keys() - self._failed)
            for uids in (together, *alone) if together else alone:
                for uid, result in (await self._engine.undo_left(uids, state=state)).items():
                    self._log(claims[uid], result)
                    undone += result.error is None
                    if result.error is not None and not result.waiting:
                        self._failed.add(uid)
        self._logged &= left.keys()
        self._failed &= left.keys()
        return len(left) - undone

    async def run(self, poller: FilePoller) -> None:
        """
        Check while any entry is unfinished, and after each write; a failed check is logged.

        A check does not wait for the one before, which may hang with a driver for minutes while it
        holds its claims.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._check())
                await poller.until(self._due, rounds=ROUNDS)

    def _due(self) -> bool:
        """Return whether a check may find something. Blocks."""
        return self._watch.changed() or self._left

    async def _check(self) -> None:
        self._left = True
        try:
            self._left = await self.recover() > 0
        except CheckpointError as error:
            logger.error("entries cannot be recovered", extra={"error": str(error)})
        except Exception:
            logger.exception("check for unfinished entries failed")

    def _log(self, claim: StoredClaim, undone: Undone) -> None:
        facts = {"claim": str(claim), "claim_uid": claim.uid, "state": claim.state}
        if undone.error is None:
            logger.warning("unfinished claim is undone", extra=facts)
        elif claim.uid not in self._logged:
            self._logged.add(claim.uid)
            logger.warning(
                "unfinished claim is not undone yet", extra=facts | {"error": str(undone.error)}
            )
