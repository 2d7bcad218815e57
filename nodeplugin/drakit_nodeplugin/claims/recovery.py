"""
Recovery: finishes what a crash left unfinished, and repairs CDI files that do not match the
checkpoint.

**Unfinished claims.** An entry `preparing` without a process that works on it is undone: the
kubelet got no answer for it, and asks again if it still needs the claim. An entry `unpreparing` is
finished. Both wait for the driver if it is unavailable. They are found at the start, and at most a
few seconds after any write.

**Lost and outdated CDI files.** The running kubelet does not ask again for a claim that it holds as
prepared, so a deleted file would be missed only when a container restarts. It is restored within
2 s: files and entries are compared whenever the directory has changed. At the start, the contents
are compared as well: a claim that was being prepared a second time has its new row before its new
file.

**Orphaned CDI files.** An entry is written before its file and deleted after it, so a file without
an entry shows that entries were lost. Its containers may be running: the file is removed only after
a grace period without a sign of use. Files of other programs are never removed.

:mod:`.unprepare` undoes a claim; :mod:`.stale` decides whether a prepared one is still wanted;
:mod:`.cdi_files` reads and writes files. It must not know drivers, the API server or gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from drakit_nodeplugin.claims.checkpoint.records import StoredClaim
from drakit_nodeplugin.claims.checkpoint.store import Checkpoint, CheckpointError
from drakit_nodeplugin.claims.kubeletview import Grace, KubeletView, PodView, Unclaimed
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.claims.unprepare import Undone
from drakit_nodeplugin.claims.work import EngineParts
from drakit_nodeplugin.file_poller import FilePoller, FileWatch

__all__ = ("OrphanRemover", "Recovery", "SpecRestorer")

logger = logging.getLogger(__name__)

ROUNDS = 5
"""Rounds of the poller, a second each, between two checks: a driver that was unavailable starts
again within a second to a minute."""

BATCH = 200
"""Files that are written at once: their texts are in memory then."""

TICK_SECONDS = 0.05
"""Two changes within this time may have the same timestamp. It is longer than the longest tick of
common kernels (10 ms)."""


class Recovery:
    """Finishes the entries of one driver on which no process works."""

    def __init__(self, *, checkpoint: Checkpoint, queue: ClaimQueue) -> None:
        self._checkpoint = checkpoint
        self._queue = queue
        self._logged: set[str] = set()
        """UIDs whose failure was logged. It is logged once, until the claim succeeds."""

        self._failed: set[str] = set()
        """UIDs that failed although the driver was available: each is retried alone. A driver that
        takes claims together returns one answer for all, so one claim that hangs would block all
        others."""

        self._watch = checkpoint.watch()
        self._left = True
        """Whether the last check left an entry, or failed."""

    async def recover(self) -> int:
        """Check once; return the number of entries that are still unfinished."""
        left: dict[str, StoredClaim] = {}
        undone = 0
        for state in ("preparing", "unpreparing"):
            claims = {claim.uid: claim for claim in await self._checkpoint.in_state(state)}
            left |= claims
            alone = [[uid] for uid in sorted(claims.keys() & self._failed)]
            together = sorted(claims.keys() - self._failed)
            for uids in (together, *alone) if together else alone:
                for uid, result in (await self._queue.undo_left(uids, state=state)).items():
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
            logger.error("unfinished entries cannot be recovered", extra={"error": str(error)})
        except Exception:
            logger.exception("check for unfinished entries failed")

    def _log(self, claim: StoredClaim, undone: Undone) -> None:
        facts = {"claim": str(claim), "claim_uid": claim.uid, "state": claim.state}
        if undone.error is None:
            logger.warning("unfinished claim undone", extra=facts)
        elif claim.uid not in self._logged:
            self._logged.add(claim.uid)
            logger.warning(
                "unfinished claim not undone yet", extra=facts | {"error": str(undone.error)}
            )


class SpecRestorer:
    """Restores the lost CDI files of one driver's prepared claims."""

    def __init__(
        self,
        parts: EngineParts,
        *,
        directory: Path,
        queue: ClaimQueue,
        on_restored: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._checkpoint = parts.checkpoint
        self._specs = parts.specs
        self._boot_id = parts.boot_id
        self._queue = queue
        self._on_restored = on_restored
        self._watch = FileWatch(directory, settled_seconds=TICK_SECONDS)
        self._missing = False
        """Whether the last comparison found a missing file, or failed."""

    async def restore(self, *, compare: bool = False) -> int:
        """
        Write the missing files, and return their number. With `compare`, files whose content is not
        that of their row are replaced as well.

        Only claims of this boot: after a reboot their devices must be prepared again first, and
        the kubelet asks for that.
        """
        prepared = await self._checkpoint.uids(state="prepared", boot_id=self._boot_id)
        missing = prepared - await asyncio.to_thread(self._specs.uids)
        if compare:
            missing |= await self._outdated(prepared - missing)
        self._missing = bool(missing)
        restored = 0
        # The file of a claim that is being worked on is not lost.
        with _free(self._queue, missing) as uids:
            for start in range(0, len(uids), BATCH):
                restored += await self._restore(uids[start : start + BATCH])
        self._on_restored(restored)
        return restored

    async def _outdated(self, uids: Collection[str]) -> set[str]:
        """Return the claims whose file is not what their row says."""
        outdated: set[str] = set()
        ordered = sorted(uids)
        for start in range(0, len(ordered), BATCH):
            found = await self._checkpoint.find(ordered[start : start + BATCH])
            texts = {uid: claim.cdi_spec for uid, claim in found.items() if claim.cdi_spec}
            outdated |= await asyncio.to_thread(self._differing, texts)
        return outdated

    def _differing(self, texts: Mapping[str, str]) -> set[str]:
        differing: set[str] = set()
        for uid, text in texts.items():
            try:
                same = self._specs.read(uid) == text
            except OSError:
                same = False  # the write shows what is wrong, and for this claim alone
            if not same:
                differing.add(uid)
        return differing

    async def _restore(self, uids: Sequence[str]) -> int:
        found = (await self._checkpoint.find(uids)).values()
        lost = {c.uid: c for c in found if c.state == "prepared" and c.cdi_spec is not None}
        outcome = await self._checkpoint.confirm(lost.values())
        for uid in outcome.written:
            facts = {"claim": str(lost[uid]), "claim_uid": uid}
            if (error := outcome.unplaced.get(uid)) is not None:
                logger.error("CDI file not restored", extra=facts | {"error": str(error)})
            else:
                logger.warning("lost or outdated CDI file restored", extra=facts)
        return len(outcome.written) - len(outcome.unplaced)

    async def run(self, poller: FilePoller) -> None:
        """Compare whenever the directory has changed; a failed comparison is logged and retried."""
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
        queue: ClaimQueue,
        kubelet: KubeletView,
        grace: Grace,
    ) -> None:
        self._driver = parts.driver
        self._checkpoint = parts.checkpoint
        self._specs = parts.specs
        self._queue = queue
        self._kubelet = kubelet
        self._grace = grace
        self._unclaimed: dict[str, Unclaimed] = {}
        """Files without an entry, by UID."""

    async def poll(self) -> int:
        """
        Remove the files whose grace period is over; return their number.

        Raises CheckpointError, OSError.
        """
        orphans = await self._checkpoint.orphans()
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
        with _free(self._queue, due) as uids:
            return sum([await self._remove(uid) for uid in uids])

    async def _remove(self, uid: str) -> bool:
        # A file that could not be read may be another program's.
        if await asyncio.to_thread(self._specs.read, uid) is None:
            return False
        found, unremoved = await self._checkpoint.clear([uid])
        if found:
            return False
        facts = {"driver": self._driver, "claim_uid": uid}
        if unremoved:
            logger.error(
                "orphaned CDI file cannot be removed", extra=facts | {"error": str(unremoved[uid])}
            )
            return False
        del self._unclaimed[uid]
        logger.warning("orphaned CDI file removed", extra=facts)
        return True


@contextmanager
def _free(queue: ClaimQueue, uids: Iterable[str]) -> Generator[list[str]]:
    """Take the turns of the claims that no work is in flight for."""
    held = [uid for uid in sorted(uids) if queue.take(uid)]
    try:
        yield held
    finally:
        for uid in held:
            queue.release(uid)
