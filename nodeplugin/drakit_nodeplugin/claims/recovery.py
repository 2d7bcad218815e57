"""
What a crash, or a driver that was away, has left: found at the start, and a few seconds after any
write at the latest.

An entry `preparing` without a process that works on it is undone: nobody was told that it is
prepared, and the kubelet asks again for what it still wants. An entry `unpreparing` is finished.
Both wait for the driver if it is away.

How a claim is undone is :mod:`.unprepare`'s; whether a prepared one is still wanted,
:mod:`.stale`'s. It must not know drivers, the API server or gRPC.
"""

from __future__ import annotations

import asyncio
import logging

from drakit_nodeplugin.claims.checkpoint.records import StoredClaim
from drakit_nodeplugin.claims.checkpoint.store import Checkpoint, CheckpointError
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.claims.unprepare import Undone
from drakit_nodeplugin.file_poller import FilePoller

__all__ = ("Recovery",)

logger = logging.getLogger(__name__)

ROUNDS = 5
"""A second each, between two looks: a driver that was away is started again within a second to a
minute."""


class Recovery:
    """Undoes what nobody works on."""

    def __init__(self, *, checkpoint: Checkpoint, queue: ClaimQueue) -> None:
        self._checkpoint = checkpoint
        self._queue = queue
        self._told: set[str] = set()
        """UIDs whose failure was said: once is enough, until it ends."""

        self._failed: set[str] = set()
        """UIDs that failed though the driver was there: each is tried by itself from then on. A
        driver that takes claims together gives one answer for all, and one that hangs would keep
        all others from ever being undone."""

        self._watch = checkpoint.watch()
        self._left = True
        """Whether something was left at the last look, or that look failed."""

    async def recover(self) -> int:
        """Look once; give how many entries are still to be undone."""
        left: dict[str, StoredClaim] = {}
        undone = 0
        for state in ("preparing", "unpreparing"):
            claims = {claim.uid: claim for claim in await self._checkpoint.in_state(state)}
            left |= claims
            alone = [[uid] for uid in sorted(claims.keys() & self._failed)]
            together = sorted(claims.keys() - self._failed)
            for uids in (together, *alone) if together else alone:
                for uid, result in (await self._queue.undo_left(uids, state=state)).items():
                    self._tell(claims[uid], result)
                    undone += result.error is None
                    if result.error is not None and not result.waiting:
                        self._failed.add(uid)
        self._told &= left.keys()
        self._failed &= left.keys()
        return len(left) - undone

    async def run(self, looks: FilePoller) -> None:
        """
        Look again and again for as long as anything is left, and whenever something was written; a
        look that fails is logged and the next one made.

        A look does not wait for the one before: that may hang with a driver for minutes, and its
        claims are locked meanwhile.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._look())
                await looks.until(self._due, rounds=ROUNDS)

    def _due(self) -> bool:
        """Tell whether a look may find something. Blocks."""
        return self._watch.changed() or self._left

    async def _look(self) -> None:
        self._left = True
        try:
            self._left = await self.recover() > 0
        except CheckpointError as error:
            logger.error("entries cannot be recovered", extra={"error": str(error)})
        except Exception:
            logger.exception("a look for what was left failed")

    def _tell(self, claim: StoredClaim, undone: Undone) -> None:
        facts = {"claim": str(claim), "claim_uid": claim.uid, "state": claim.state}
        if undone.error is None:
            logger.warning("claim that was left is undone", extra=facts)
        elif claim.uid not in self._told:
            self._told.add(claim.uid)
            logger.warning(
                "claim that was left is not undone yet", extra=facts | {"error": str(undone.error)}
            )
