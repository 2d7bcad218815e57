"""
Unprepares claims: releases the devices of a checkpoint entry, regardless of its state.

The same path serves the kubelet's unprepare, the rollback of a claim that failed halfway,
reallocated claims, entries left by a crash, and stale claims. It needs only the entry: neither the
API server nor the claim object is required.

    entry `unpreparing` -> driver -> CDI file removed -> entry removed

After a crash at any step, the work continues from the entry. A claim keeps its entry, and therefore
its devices, until its driver has confirmed the unprepare. :mod:`.queue` decides when to work on a
claim.

Does not depend on gRPC, HTTP or SQLite.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from drakit_driver.runtime.contract import CallError
from drakit_driver.runtime.failures import DeviceFailedError, EndpointStoppedError
from drakit_nodeplugin.claims.allocation import with_consumption
from drakit_nodeplugin.claims.errors import ClaimBusyError, ClaimError, SpecNotRemovedError
from drakit_nodeplugin.claims.work import (
    ClaimDependencies,
    ClaimResult,
    ClaimWork,
    call_driver,
    driver_failed,
    facts_of,
    not_stored,
)
from drakit_nodeplugin.state.checkpoint import CheckpointError
from drakit_nodeplugin.state.records import State, StoredClaim

logger = logging.getLogger(__name__)

REBUILD_SECONDS = 20.0
"""Maximum time to wait for the rebuild of a damaged checkpoint: half of a call's timeout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Undone:
    """The result of undoing a claim."""

    error: ClaimError | None = None
    """The error that prevents the removal of the entry. None if the entry is gone."""

    waiting: bool = False
    """Whether the driver is unavailable, or still releasing a device. New containers can no longer
    use the claim, but its devices remain held until the driver has confirmed the unprepare."""


class Unpreparing:
    """Undoes claims of one driver. The caller must hold the claims' turns (:mod:`.queue`)."""

    def __init__(self, parts: ClaimDependencies) -> None:
        self._parts = parts
        self.rebuilt = asyncio.Event()
        """Set once the first attempt to rebuild a damaged checkpoint has ended, even if it has
        failed."""

    async def unprepare(self, works: Sequence[ClaimWork]) -> None:
        """Unprepare claims for the kubelet, using only the checkpoint. Unprepare succeeds for an
        unknown claim."""
        if not await self.is_complete(works):
            return
        parts = self._parts
        asked = {work.claim.uid: work for work in works}
        try:
            known = dict(await parts.checkpoint.find(asked))
            if unknown := asked.keys() - known.keys():
                # After checkpoint damage, a file may exist without an entry.
                found, unremoved = await parts.checkpoint.clear(unknown)
                known |= found
                for uid in unknown - found.keys():
                    self._answer(asked[uid], _file_stays(asked[uid].claim, unremoved.get(uid)))
        except CheckpointError as error:
            for work in works:
                if work.result is None:
                    work.refuse(not_stored(work.claim, error))
            return

        def settled(results: Mapping[str, Undone]) -> None:
            for uid, undone in results.items():
                self._answer(asked[uid], undone)

        await self.undo(known.values(), settled)

    async def is_complete(self, works: Sequence[ClaimWork]) -> bool:
        """
        Wait for the first attempt to rebuild a damaged checkpoint. If that takes too long, set
        errors for the requested work, and return False.

        Devices whose entry is missing must not be prepared for other claims, and must not be
        reported as unprepared.
        """
        if self._parts.checkpoint.damage is None:
            return True
        try:
            async with asyncio.timeout(REBUILD_SECONDS):
                await self.rebuilt.wait()
        except TimeoutError:
            cause = "the checkpoint was damaged and is still being rebuilt"
            for work in works:
                work.refuse(ClaimBusyError(claim=str(work.claim), cause=cause))
            return False
        return True

    def _answer(self, work: ClaimWork, undone: Undone) -> None:
        if undone.error is None:
            work.finish(ClaimResult())
            return
        facts = {
            "claim": str(work.claim),
            "claim_uid": work.claim.uid,
            "error": str(undone.error),
        }
        if undone.waiting:
            # The containers are gone, so the pod can terminate. Other claims cannot get the devices
            # until the driver has confirmed.
            logger.warning("claim stays unpreparing until its driver confirms", extra=facts)
            work.finish(ClaimResult())
        else:
            facts["reason"] = undone.error.reason
            logger.warning("claim not unprepared", extra=facts)
            work.refuse(undone.error)

    async def undo_left(
        self,
        uids: Collection[str],
        *,
        state: State,
        settled: Callable[[Mapping[str, Undone]], None],
    ) -> None:
        """Undo entries that a crash or an unavailable driver has left in a state. Skip entries that
        are no longer in that state."""
        found = await self._parts.checkpoint.find(uids)
        await self.undo([claim for claim in found.values() if claim.state == state], settled)

    async def collect(self, stale: StoredClaim) -> bool:
        """Undo a claim that the kubelet will not unprepare, unless its entry has changed since it
        was read. Return whether this call removed the entry."""
        claim = (await self._parts.checkpoint.find([stale.uid])).get(stale.uid)
        if claim is None or claim.generation != stale.generation:
            return False
        return (await self.undo_one(claim)).error is None

    async def undo(
        self,
        claims: Collection[StoredClaim],
        settled: Callable[[Mapping[str, Undone]], None],
    ) -> None:
        """Undo claims concurrently. `settled` is called with groups of results, keyed by UID, as
        soon as they are known. Each claim is in exactly one group."""
        rolled_back = frozenset(claim.uid for claim in claims if claim.state == "preparing")
        begun, failed = await self._mark_unpreparing(claims)
        if failed:
            settled(failed)
        if free := [claim for claim in begun.values() if not self._needs_driver(claim)]:
            settled(await self._settle(free, {}, rolled_back))
        due = [
            self._with_consumption(claim) for claim in begun.values() if self._needs_driver(claim)
        ]

        async def on_results(results: Mapping[str, CallError | None]) -> None:
            errors = {
                uid: driver_failed(begun[uid], result)
                for uid, result in results.items()
                if result is not None
            }
            settled(await self._settle([begun[uid] for uid in results], errors, rolled_back))

        if due:
            call = self._parts.devices.unprepare
            await call_driver(self._parts, "unprepare", call, due, on_results)

    async def undo_one(self, claim: StoredClaim) -> Undone:
        undone: dict[str, Undone] = {}
        await self.undo([claim], undone.update)
        return undone[claim.uid]

    async def _mark_unpreparing(
        self, claims: Collection[StoredClaim]
    ) -> tuple[Mapping[str, StoredClaim], Mapping[str, Undone]]:
        """Store the intent to unprepare for claims that need a driver call, unless their entry
        already contains it."""
        checkpoint = self._parts.checkpoint
        due: list[StoredClaim] = []
        begun: dict[str, StoredClaim] = {}
        for claim in claims:
            if claim.state == "unpreparing" or not self._needs_driver(claim):
                begun[claim.uid] = claim
            else:
                due.append(replace(claim, state="unpreparing"))
        try:
            outcome = await checkpoint.write(due, hardware=self._parts.inventories.hardware())
        except CheckpointError as error:
            return begun, {claim.uid: Undone(error=not_stored(claim, error)) for claim in due}
        return {**begun, **outcome.written}, {
            claim.uid: Undone(error=_changed(claim))
            for claim in due
            if claim.uid not in outcome.written
        }

    def _needs_driver(self, claim: StoredClaim) -> bool:
        """Return whether there may be something to undo. Both the driver's traits at the time of
        the prepare and its current traits matter, because an update can add or remove side
        effects."""
        return claim.side_effects or self._parts.devices.traits.side_effects

    def _with_consumption(self, claim: StoredClaim) -> StoredClaim:
        """Complete a rebuilt entry with the consumption of its devices, because calls for the same
        counter sets must not overlap."""
        if any(device.consumes is None for device in claim.devices):
            parts = self._parts
            node = parts.node.name if parts.devices.traits.network_devices else None
            hardware = parts.inventories.hardware()
            claim, _ = with_consumption(claim, hardware, node=node, former=claim)
        return claim

    async def _settle(
        self,
        claims: Collection[StoredClaim],
        errors: Mapping[str, ClaimError],
        rolled_back: Collection[str],
    ) -> Mapping[str, Undone]:
        """In one step, remove the files and entries of the claims whose driver has confirmed the
        unprepare. The claims in `rolled_back` were never prepared."""
        undone = {claim.uid: Undone(error=errors.get(claim.uid)) for claim in claims}
        for uid, error in errors.items():
            # The pod can terminate although the driver has not confirmed the unprepare yet.
            cause = error.__cause__
            pending = isinstance(cause, DeviceFailedError) and cause.pending
            if pending or isinstance(cause, EndpointStoppedError):
                undone[uid] = Undone(error=error, waiting=True)
        gone = [claim for claim in claims if claim.uid not in errors]
        waiting = [uid for uid, state in undone.items() if state.waiting]
        try:
            changed, unremoved = await self._parts.checkpoint.release(gone, files_of=waiting)
        except CheckpointError as error:
            return undone | {claim.uid: Undone(error=not_stored(claim, error)) for claim in gone}
        for claim in claims:
            if claim.uid in unremoved:
                undone[claim.uid] = _file_stays(claim, unremoved[claim.uid])
            elif claim.uid in changed:
                undone[claim.uid] = Undone(error=_changed(claim))
        free = [claim for claim in gone if undone[claim.uid].error is None]
        if unprepared := [claim for claim in free if claim.uid not in rolled_back]:
            logger.info("claims unprepared", extra=facts_of(self._parts.driver, unprepared))
        if failed := [claim for claim in free if claim.uid in rolled_back]:
            logger.info("claims rolled back", extra=facts_of(self._parts.driver, failed))
        return undone


def _file_stays(claim: object, error: OSError | None) -> Undone:
    if error is None:
        return Undone()
    return Undone(error=SpecNotRemovedError(claim=str(claim), cause=str(error)))


def _changed(claim: StoredClaim) -> ClaimError:
    cause = "the entry in the checkpoint changed while the claim was unprepared"
    return ClaimBusyError(claim=str(claim), cause=cause)
