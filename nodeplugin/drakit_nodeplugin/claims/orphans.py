"""
CDI files without an entry in the checkpoint: what damage, or a power cut, has left of claims.

The entry of a claim is written before its file and goes after it, so such a file belongs to
nobody; unless the entries themselves were lost. A file that a container of the node uses is
therefore kept for as long as the kubelet lists its claim, and a file that somebody else wrote is
never touched.

When to look is :mod:`.stale`'s business. It must not know drivers, the API server or gRPC.
"""

from __future__ import annotations

import asyncio
import logging

from drakit_nodeplugin.claims.cdi_files import ClaimSpecs
from drakit_nodeplugin.claims.checkpoint.store import Checkpoint
from drakit_nodeplugin.claims.grace import Grace, Unclaimed
from drakit_nodeplugin.claims.kubeletview import KubeletClaims, KubeletView, PodView
from drakit_nodeplugin.claims.queue import ClaimQueue

__all__ = ("OrphanedSpecs",)

logger = logging.getLogger(__name__)


class OrphanedSpecs:
    """Removes the CDI files of one driver that belong to no entry."""

    def __init__(
        self,
        *,
        driver: str,
        checkpoint: Checkpoint,
        specs: ClaimSpecs,
        queue: ClaimQueue,
        kubelet: KubeletView,
        grace: Grace,
    ) -> None:
        self._driver = driver
        self._checkpoint = checkpoint
        self._specs = specs
        self._queue = queue
        self._kubelet = kubelet
        self._grace = grace
        self._seen: dict[str, Unclaimed] = {}
        """Files without an entry."""

    async def clean(self) -> int:
        """
        Remove what an earlier process left, at once; give how many files that were.

        For the start, before the kubelet is served. After damage nothing is removed: the files say
        which entries were lost. Raises CheckpointError, OSError.
        """
        orphans = await self._orphans()
        if not orphans or await self._entries_were_lost():
            return 0
        claims = await self._kubelet.listed()
        return await self._remove(orphans - claims.uids)

    async def look(self) -> int:
        """
        Remove what two looks, a grace period apart, have seen; give how many files that were.

        Raises CheckpointError, OSError.
        """
        orphans = await self._orphans()
        if not orphans:
            self._seen.clear()
            return 0
        claims = await self._kubelet.listed()
        lost = await self._entries_were_lost()
        if lost and claims.pods is PodView.PARTIAL:
            self._seen.clear()
            return 0
        self._seen = {
            uid: seen.again(claims) if (seen := self._seen.get(uid)) else Unclaimed.first(claims)
            for uid in orphans - claims.uids
        }
        return await self._remove(
            {uid for uid, seen in self._seen.items() if self._due(seen, claims, lost=lost)}
        )

    def _due(self, seen: Unclaimed, claims: KubeletClaims, *, lost: bool) -> bool:
        if lost:  # a running container may have it
            return seen.due(claims, self._grace)
        return claims.asked_at - seen.since >= self._grace.confirmed_seconds

    async def _orphans(self) -> set[str]:
        # Files first: the entry of each one was there when it was written.
        files = await self._specs.present()
        return files - await self._checkpoint.uids() if files else files

    async def _entries_were_lost(self) -> bool:
        """Tell whether a damaged database was set aside here, now or in an earlier life."""
        path = self._checkpoint.path
        return self._checkpoint.damage is not None or await asyncio.to_thread(
            lambda: any(path.parent.glob(f"{path.name}.damaged-*"))
        )

    async def _remove(self, uids: set[str]) -> int:
        removed = 0
        for uid in sorted(uids):
            if self._queue.held(uid):
                continue  # somebody works on the claim: what is left of it is seen by the next look
            async with self._queue.hold(uid):
                removed += await self._remove_one(uid)
        return removed

    async def _remove_one(self, uid: str) -> bool:
        if await self._checkpoint.find([uid]) or await self._specs.read(uid) is None:
            return False
        facts = {"driver": self._driver, "claim_uid": uid}
        if failed := await self._specs.remove([uid]):
            logger.error(
                "orphaned CDI file cannot be removed", extra=facts | {"error": str(failed[uid])}
            )
            return False
        self._seen.pop(uid, None)
        logger.warning("orphaned CDI file removed", extra=facts)
        return True
