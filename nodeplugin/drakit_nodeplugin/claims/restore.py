"""
Keeps the CDI files of prepared claims in place.

The running kubelet does not ask again for a claim that it holds as prepared, so a file that is
deleted would be missed only when a container is started again, and nobody would write it anew. It
must be back within 2 s. A poll of the directory's time of change costs less than what a missed or
overflowing inotify queue would take to get right; only if it has changed, files and entries are
compared.

It must not know drivers, the API server or gRPC.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from drakit_nodeplugin.claims.cdi_files import ClaimSpecs
from drakit_nodeplugin.claims.checkpoint.store import Checkpoint, CheckpointError
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.file_poller import FilePoller

__all__ = ("SpecRestorer",)

logger = logging.getLogger(__name__)

UNCHANGED_LOOKS = 60
"""After so many looks at an unchanged directory it is compared all the same: file systems keep the
time of change with different care."""

BATCH = 200
"""Files that are written at once: their texts are in memory then."""

TICK_NANOSECONDS = 50_000_000
"""More than the longest tick of a kernel in use (10 ms)."""


class SpecRestorer:
    """Writes the lost CDI files of one driver's prepared claims again."""

    def __init__(
        self,
        *,
        checkpoint: Checkpoint,
        specs: ClaimSpecs,
        boot_id: str,
        queue: ClaimQueue,
        on_restored: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._checkpoint = checkpoint
        self._specs = specs
        self._boot_id = boot_id
        self._queue = queue
        self._on_restored = on_restored
        self._seen: int | None = None
        """When the directory had last changed, as of the last look at which nothing was missing."""
        self._changed_at: int | None = None
        """The same, as of the last look."""
        self._unchanged = 0
        self._missing = False

    async def restore(self) -> int:
        """
        Write what is missing, and give how many files that were.

        Only claims of this boot: after a reboot their devices must be prepared again first, and
        the kubelet asks for that.
        """
        prepared = await self._checkpoint.uids(state="prepared", boot_id=self._boot_id)
        missing = prepared - await self._specs.present()
        self._missing = bool(missing)
        # Of a claim that is worked on the file is not lost but on its way.
        held = [uid for uid in missing if self._queue.take(uid)]
        restored = 0
        try:
            for start in range(0, len(held), BATCH):
                restored += await self._restore(held[start : start + BATCH])
        finally:
            for uid in held:
                self._queue.release(uid)
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
                logger.warning("CDI file was lost and is restored", extra=facts)
        return len(lost) - len(failed)

    async def run(self, looks: FilePoller) -> None:
        """Compare whenever the directory has changed; a failure is logged, and it is done again."""
        while True:
            await looks.until(self._due)
            self._unchanged = 0
            changed_at = self._changed_at
            try:
                await self.restore()
            except (CheckpointError, OSError) as error:
                logger.error("CDI files cannot be checked", extra={"error": str(error)})
            else:
                # Read before the comparison: what changed during it is seen by the next look.
                self._seen = None if self._missing or _just_now(changed_at) else changed_at

    def _due(self) -> bool:
        """Look at the directory, and tell whether it must be compared. Blocks."""
        self._changed_at = self._specs.changed_at()
        self._unchanged += 1
        return self._changed_at != self._seen or self._unchanged > UNCHANGED_LOOKS


def _just_now(changed_at: int | None) -> bool:
    """Tell a time of change that a second change may share: kernels count it in ticks."""
    return changed_at is not None and time.time_ns() - changed_at < TICK_NANOSECONDS
