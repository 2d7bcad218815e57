"""
Keeps the CDI files of one driver in agreement with the checkpoint: restores lost files of prepared
claims, and removes files that have no entry.

**Lost files.** The running kubelet does not ask again for a claim that it holds as prepared, so a
deleted file would be missed only when a container restarts. It must be back within 2 s: files and
entries are compared whenever the directory has changed.

**Orphans.** An entry is written before its file and deleted after it, so a file without an entry
shows that entries were lost. Its containers may be running: the file is removed only after a grace
period without a sign of use. Files of other programs are never removed.

:mod:`.cdi_files` reads and writes files. It must not know drivers, the API server or gRPC.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

from drakit_nodeplugin.claims.checkpoint.store import CheckpointError
from drakit_nodeplugin.claims.kubeletview import Grace, KubeletView, PodView, Unclaimed
from drakit_nodeplugin.claims.locks import KeyedLocks
from drakit_nodeplugin.claims.parts import EngineParts
from drakit_nodeplugin.claims.spectexts import SpecTexts
from drakit_nodeplugin.file_poller import FilePoller, FileWatch

__all__ = ("OrphanRemover", "SpecRestorer")

logger = logging.getLogger(__name__)

BATCH = 200
"""Files that are written at once: their texts are in memory then."""

TICK_SECONDS = 0.05
"""Within which two changes may have the same time: more than the longest tick of a kernel in use
(10 ms)."""


class SpecRestorer:
    """Restores the lost CDI files of one driver's prepared claims."""

    def __init__(
        self,
        parts: EngineParts,
        *,
        directory: Path,
        locks: KeyedLocks,
        on_restored: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._checkpoint = parts.checkpoint
        self._specs = parts.specs
        self._boot_id = parts.boot_id
        self._locks = locks
        self._on_restored = on_restored
        self._watch = FileWatch(directory, settled_seconds=TICK_SECONDS)
        self._missing = False
        """Whether the last comparison found a missing file, or failed."""

    async def restore(self) -> int:
        """
        Write the missing files, and return their number.

        Only claims of this boot: after a reboot their devices must be prepared again first, and
        the kubelet asks for that.
        """
        prepared = await self._checkpoint.uids(state="prepared", boot_id=self._boot_id)
        missing = prepared - await self._specs.present()
        self._missing = bool(missing)
        restored = 0
        # The file of a claim that is being worked on is not lost.
        with _free(self._locks, missing) as uids:
            for start in range(0, len(uids), BATCH):
                restored += await self._restore(uids[start : start + BATCH])
        self._on_restored(restored)
        return restored

    async def _restore(self, uids: Sequence[str]) -> int:
        found = (await self._checkpoint.find(uids)).values()
        lost = {c.uid: c for c in found if c.state == "prepared" and c.cdi_spec is not None}
        failed = await self._specs.write({uid: c.cdi_spec or "" for uid, c in lost.items()})
        for uid, claim in lost.items():
            facts = {"claim": str(claim), "claim_uid": uid}
            if uid in failed:
                logger.error("CDI file not restored", extra=facts | {"error": str(failed[uid])})
            else:
                logger.warning("lost CDI file restored", extra=facts)
        return len(lost) - len(failed)

    async def run(self, poller: FilePoller) -> None:
        """Compare whenever the directory has changed; a failure is logged, and tried again."""
        while True:
            await poller.until(lambda: self._watch.changed() or self._missing)
            self._missing = True
            try:
                await self.restore()
            except (CheckpointError, OSError) as error:
                logger.error("CDI files cannot be checked", extra={"error": str(error)})


class OrphanRemover:
    """Removes the CDI files of one driver that have no entry."""

    def __init__(
        self,
        parts: EngineParts,
        *,
        texts: SpecTexts,
        locks: KeyedLocks,
        kubelet: KubeletView,
        grace: Grace,
    ) -> None:
        self._driver = parts.driver
        self._checkpoint = parts.checkpoint
        self._specs = parts.specs
        self._texts = texts
        self._locks = locks
        self._kubelet = kubelet
        self._grace = grace
        self._unclaimed: dict[str, Unclaimed] = {}
        """Files without an entry, by UID."""

    async def poll(self) -> int:
        """
        Remove the files whose grace period is over; return their number.

        Raises CheckpointError, OSError.
        """
        # Files first: the entry of each one existed when it was written.
        files = await self._specs.present()
        orphans = files - await self._checkpoint.uids() if files else files
        if not orphans:
            self._unclaimed.clear()
            return 0
        claims = await self._kubelet.listed()
        if claims.pods is PodView.PARTIAL:
            self._unclaimed.clear()
            return 0
        self._unclaimed = {
            uid: known.again(claims)
            if (known := self._unclaimed.get(uid))
            else Unclaimed.first(claims)
            for uid in orphans - claims.uids
        }
        due = {uid for uid, each in self._unclaimed.items() if each.due(claims, self._grace)}
        with _free(self._locks, due) as uids:
            return sum([await self._remove(uid) for uid in uids])

    async def _remove(self, uid: str) -> bool:
        if await self._checkpoint.find([uid]) or await self._texts.read(uid) is None:
            return False
        facts = {"driver": self._driver, "claim_uid": uid}
        if failed := await self._specs.remove([uid]):
            logger.error(
                "orphaned CDI file cannot be removed", extra=facts | {"error": str(failed[uid])}
            )
            return False
        del self._unclaimed[uid]
        logger.warning("orphaned CDI file removed", extra=facts)
        return True


@contextmanager
def _free(locks: KeyedLocks, uids: Iterable[str]) -> Generator[list[str]]:
    """Hold the locks of those claims that nothing works on at the moment."""
    held = [uid for uid in sorted(uids) if locks.take(uid)]
    try:
        yield held
    finally:
        for uid in held:
            locks.release(uid)
