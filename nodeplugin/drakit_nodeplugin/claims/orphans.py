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

from drakit_nodeplugin.claims.checkpoint import Checkpoint
from drakit_nodeplugin.claims.kubeletview import KubeletClaims, KubeletView
from drakit_nodeplugin.claims.locks import KeyedLocks
from drakit_nodeplugin.claims.specs import ClaimSpecs
from drakit_nodeplugin.claims.spectexts import SpecTexts

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
        texts: SpecTexts,
        locks: KeyedLocks,
        kubelet: KubeletView,
        grace_seconds: float,
        unconfirmed_grace_seconds: float,
    ) -> None:
        self._driver = driver
        self._checkpoint = checkpoint
        self._specs = specs
        self._texts = texts
        self._locks = locks
        self._kubelet = kubelet
        self._grace_seconds = grace_seconds
        self._unconfirmed_grace_seconds = unconfirmed_grace_seconds
        self._seen: dict[str, float] = {}
        """Since when a file is seen without an entry, loop clock."""

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
        return await self._remove(orphans - _used(claims))

    async def look(self) -> int:
        """
        Remove what two looks, a grace period apart, have seen; give how many files that were.

        Raises CheckpointError, OSError.
        """
        orphans = await self._orphans()
        claims = await self._kubelet.listed() if orphans else None
        now = asyncio.get_running_loop().time()
        self._seen = {uid: self._seen.get(uid, now) for uid in orphans - _used(claims)}
        grace_seconds = self._grace_seconds
        confirmed = claims is not None and claims.containers_told
        if orphans and not confirmed and await self._entries_were_lost():
            grace_seconds = self._unconfirmed_grace_seconds
        return await self._remove(
            {uid for uid, since in self._seen.items() if now - since >= grace_seconds}
        )

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
            if self._locks.held(uid):
                continue  # somebody works on the claim: what is left of it is seen by the next look
            async with self._locks.hold(uid):
                removed += await self._remove_one(uid)
        return removed

    async def _remove_one(self, uid: str) -> bool:
        if await self._checkpoint.find([uid]) or await self._texts.read(uid) is None:
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


def _used(claims: KubeletClaims | None) -> frozenset[str]:
    return frozenset() if claims is None else claims.uids
