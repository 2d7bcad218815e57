"""
Undoing: what leads from an entry of the checkpoint, in whatever state, to a free device.

The same path serves the kubelet's unprepare, the rollback of a claim that failed halfway, a claim
that was allocated anew, what a crash left, and stale claims. It needs the entry alone: no API
server, no claim object.

    entry `unpreparing` -> driver -> CDI file removed -> entry removed

A crash anywhere between leaves an entry from which it goes on. What a driver has not confirmed
keeps its entry, and so its device. Who asks, and what is answered, is :mod:`.engine`'s.

It must not know gRPC, HTTP, SQLite, or the format of a CDI file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeAlias

from drakit_nodeplugin.claims.allocation import allocated_devices, with_consumption
from drakit_nodeplugin.claims.checkpoint.records import StoredClaim
from drakit_nodeplugin.claims.checkpoint.store import CheckpointError
from drakit_nodeplugin.claims.errors import ClaimBusyError, ClaimError, SpecNotRemovedError
from drakit_nodeplugin.claims.parts import (
    EngineParts,
    driver_failed,
    error_of,
    facts_of,
    not_stored,
    reference_of,
)
from drakit_nodeplugin.claims.waves import waves
from drakit_nodeplugin.endpoints.errors import DeviceFailedError, EndpointStoppedError

__all__ = ("Undoing", "Undone")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Undone:
    """How far a claim was undone."""

    error: ClaimError | None = None
    """Why its entry is still there; None if it is gone."""

    waiting: bool = False
    """The driver is away: containers get nothing of the claim any more, but its devices stay held
    until the driver has confirmed."""

    fenced: bool = False
    """The entry is not the one that was to be undone: somebody else has changed or removed it."""


Done = Callable[[str, Undone], None]

_Result: TypeAlias = ClaimError | None
"""Why a driver has not undone a claim."""


class Undoing:
    """Undoes claims of one driver. Who calls holds their locks."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    async def undo(self, claims: Collection[StoredClaim], done: Done) -> None:
        """Undo claims side by side; `done` is called once for each, as soon as it is known."""
        if not claims:
            return
        claims = await self._begin(claims, done)
        works = {claim.uid: self._undo_devices(claim) for claim in claims}
        entries = {claim.uid: claim for claim in claims}
        async with aclosing(waves(works)) as groups:
            async for group in groups:
                results: dict[str, _Result] = {}
                for uid, result in group.items():
                    if isinstance(result, BaseException):
                        result = error_of(entries[uid], result)
                    results[uid] = result
                await self._settle([entries[uid] for uid in group], results, done)

    async def undo_one(self, claim: StoredClaim) -> Undone:
        """Undo one claim."""
        results: list[Undone] = []
        await self.undo([claim], lambda _, undone: results.append(undone))
        return results[0]

    async def _begin(self, claims: Collection[StoredClaim], done: Done) -> list[StoredClaim]:
        """Store the intent, where a driver will be called and this process has not stored it."""
        checkpoint = self._parts.checkpoint
        due: list[StoredClaim] = []
        begun: list[StoredClaim] = []
        for claim in claims:
            known = claim.state == "unpreparing" and claim.owner == checkpoint.owner
            if known or not self._needs_driver(claim):
                begun.append(claim)
            else:
                due.append(replace(claim, state="unpreparing"))
        try:
            outcome = await checkpoint.write(due, hardware=self._parts.inventories.hardware())
        except CheckpointError as error:
            for claim in due:
                done(claim.uid, Undone(error=not_stored(claim, error)))
            return begun
        for claim in due:
            if claim.uid not in outcome.written:
                done(claim.uid, Undone(error=_changed(claim), fenced=True))
        return [*begun, *outcome.written.values()]

    def _needs_driver(self, claim: StoredClaim) -> bool:
        """Tell whether something may be to undo: then as now, for a driver can be replaced by one
        that has no side effects any more, or by one that has."""
        return claim.side_effects or self._parts.devices.traits.side_effects

    async def _settle(
        self, claims: Collection[StoredClaim], results: Mapping[str, _Result], done: Done
    ) -> None:
        """Remove files and entries of the claims whose driver has confirmed, in one step each."""
        undone = {uid: Undone(error=result) for uid, result in results.items()}
        for uid, result in results.items():
            if result is not None and isinstance(result.__cause__, EndpointStoppedError):
                undone[uid] = Undone(error=result, waiting=True)
        without_file = [uid for uid, state in undone.items() if not state.error or state.waiting]
        unremoved = await self._parts.specs.remove(without_file)
        for claim in claims:
            if claim.uid in unremoved:
                cause = str(unremoved[claim.uid])
                error = SpecNotRemovedError(claim=str(claim), cause=cause)
                undone[claim.uid] = Undone(error=error)
        gone = [claim for claim in claims if undone[claim.uid].error is None]
        try:
            fenced = await self._parts.checkpoint.delete(gone)
        except CheckpointError as error:
            for claim in gone:
                undone[claim.uid] = Undone(error=not_stored(claim, error))
        else:
            for claim in gone:
                if claim.uid in fenced:
                    undone[claim.uid] = Undone(error=_changed(claim), fenced=True)
        if told := [claim for claim in gone if undone[claim.uid].error is None]:
            logger.info("claims unprepared", extra=facts_of(self._parts.driver, told))
        for uid, state in undone.items():
            done(uid, state)

    async def _undo_devices(self, claim: StoredClaim) -> ClaimError | None:
        if not self._needs_driver(claim):
            return None
        if any(device.consumes is None for device in claim.devices):
            # A rebuilt entry: the counter sets of its devices keep other calls away.
            hardware = self._parts.inventories.hardware()
            claim, _ = with_consumption(claim, hardware, former=claim)
        # Nothing is awaited before: claims that begin in one turn are one batch for the driver.
        try:
            await self._parts.devices.unprepare(reference_of(claim), allocated_devices(claim))
        except (DeviceFailedError, EndpointStoppedError) as error:
            return driver_failed(claim, error)
        return None


def _changed(claim: StoredClaim) -> ClaimError:
    return ClaimBusyError(claim=str(claim), cause="its entry was changed while it was undone")
