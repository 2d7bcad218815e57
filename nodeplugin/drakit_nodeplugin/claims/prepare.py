"""
Preparing: what leads from the claims of a pod to devices that its containers can use.

A batch costs the same few steps whatever its size:

    entries read -> claims fetched -> intent stored -> driver -> result stored -> CDI files

The result is stored before the files are written, so that no file is ever without an entry; a
crash in between leaves an entry whose file is restored. The intent, which tells after a crash what
a driver may have begun, is left out where a driver has nothing to undo. A claim that fails gets an
error of its own and is undone; the others go on.

Who waits for whom is :mod:`.engine`'s, undoing :mod:`.unprepare`'s.

It must not know gRPC, HTTP, SQLite, or the format of a CDI file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from drakit.cdi import InvalidEditsError
from drakit.device import ClaimReference
from drakit_nodeplugin.claims.allocation import (
    Step,
    allocated_devices,
    next_step,
    wanted_claim,
    with_consumption,
)
from drakit_nodeplugin.claims.checkpoint.records import StoredClaim, StoredDevice
from drakit_nodeplugin.claims.checkpoint.store import CheckpointError, Outcome
from drakit_nodeplugin.claims.errors import (
    AbandonedError,
    CheckpointFailedError,
    ClaimError,
    ClaimFetchError,
    ClaimGoneError,
    DeviceNotListedError,
    DriverFailedError,
    SpecFailedError,
)
from drakit_nodeplugin.claims.parts import (
    EngineParts,
    driver_failed,
    error_of,
    facts_of,
    foreign_work,
    not_stored,
    prepared,
    reference_of,
    refused,
)
from drakit_nodeplugin.claims.unprepare import Undoing
from drakit_nodeplugin.claims.waves import waves
from drakit_nodeplugin.devices.hardware import Hardware
from drakit_nodeplugin.endpoints.errors import DeviceFailedError, EndpointStoppedError

__all__ = ("Preparing", "Settle")

logger = logging.getLogger(__name__)

KNOWN_CLAIM_FETCH_SECONDS = 3.0
"""How long the API server is asked about a claim that the checkpoint holds as prepared; without
a usable answer, only the checkpoint counts."""

NEW_CLAIM_FETCH_SECONDS = 15.0
"""How long it is asked about any other: a third of the 45 s that the kubelet waits."""

LISTED_SECONDS = 2.0
"""How long to wait for a device that the driver does not list: after a start, its inventory may be
slow, and the kubelet asks again only after 90 s."""

Settle = Callable[[str, StoredClaim | ClaimError], None]
"""Takes what became of one claim: the prepared claim, or why it is not prepared."""

_Made: TypeAlias = StoredClaim | ClaimError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """A claim of a batch that is to be prepared."""

    claim: StoredClaim
    """With the generation of its entry, if it has one."""

    former: StoredClaim | None = None
    """The entry that it already has."""

    in_use: bool = False
    """It was prepared in this boot, and containers may use it: what fails now must not take it
    from them."""


class Preparing:
    """Prepares claims of one driver. Who calls holds their locks."""

    def __init__(self, parts: EngineParts, undoing: Undoing) -> None:
        self._parts = parts
        self._undoing = undoing
        self._calls: dict[str, asyncio.Task[Any]] = {}
        """The drivers' work by UID, while it can be given up."""
        self._abandoned: set[str] = set()

    def abandon(self, uid: str) -> None:
        """Give up a claim that is being prepared, or is about to be; it ends with an error."""
        self._abandoned.add(uid)
        if (call := self._calls.get(uid)) is not None:
            call.cancel()

    def ended(self, uid: str) -> None:
        """The claim is answered: what is asked from now on is asked anew."""
        self._abandoned.discard(uid)

    async def prepare(self, claims: Sequence[ClaimReference], settle: Settle) -> None:
        """Prepare the claims of a pod; `settle` is called once for each, as soon as it is known."""
        try:
            known = await self._parts.checkpoint.find([claim.uid for claim in claims])
        except CheckpointError as error:
            for claim in claims:
                settle(claim.uid, CheckpointFailedError(claim=str(claim), cause=str(error)))
            return
        wanted = await asyncio.gather(*(self._wanted(c, known.get(c.uid)) for c in claims))
        current: list[tuple[StoredClaim, StoredClaim]] = []
        due: list[_Work] = []
        replaced: list[tuple[StoredClaim, StoredClaim]] = []
        for new in wanted:
            if isinstance(new, tuple):
                settle(*new)
                continue
            old = known.get(new.uid)
            match next_step(old, new=new), old:
                case Step.ANSWER, StoredClaim():
                    current.append((old, new))
                case Step.REPEAT, StoredClaim():
                    due.append(self._again(old, new))
                case ((Step.REPLACE | Step.UNDO), StoredClaim()):
                    replaced.append((old, new))
                case _:
                    due.append(_Work(claim=new))
        async with asyncio.TaskGroup() as group:
            if current:
                group.create_task(self._answer_current(current, settle))
            if replaced:
                group.create_task(self._replace(replaced, settle))
            if due:
                await self._work(due, settle)

    # ------------------------------------------------------------ what is wanted

    async def _wanted(
        self, reference: ClaimReference, old: StoredClaim | None
    ) -> StoredClaim | tuple[str, ClaimError]:
        # The requests of an entry that only the kubelet confirmed are unknown.
        known = old is not None and self._in_use(old) and old.rebuilt != "listed"
        usable = old if known else None
        timeout_seconds = NEW_CLAIM_FETCH_SECONDS if usable is None else KNOWN_CLAIM_FETCH_SECONDS
        try:
            busy = old and await foreign_work(old, self._parts.instances)
            if busy is not None:
                return reference.uid, busy
            claim = await self._parts.source.fetch(reference, timeout_seconds=timeout_seconds)
            return wanted_claim(
                claim,
                reference=reference,
                driver=self._parts.driver,
                node=self._parts.node.name,
                labels=self._parts.node.labels,
                boot_id=self._parts.boot_id,
                limits=self._parts.limits,
                side_effects=self._parts.devices.traits.side_effects,
            )
        except ClaimGoneError as error:
            return reference.uid, error
        except ClaimFetchError as error:
            # No answer, a refusal and an invalid answer prove nothing about the claim.
            if usable is None:
                return reference.uid, error
            logger.warning(
                "claim cannot be read and is answered from the checkpoint",
                extra={"claim": str(reference), "claim_uid": reference.uid, "error": str(error)},
            )
            return usable
        except ClaimError as error:
            # Its frames hold the claim as read, which can take 20 MiB of memory.
            return reference.uid, error.with_traceback(None)

    def _in_use(self, old: StoredClaim) -> bool:
        """Return whether containers may have the devices."""
        return old.state == "prepared" and old.boot_id == self._parts.boot_id

    def _again(self, old: StoredClaim, new: StoredClaim) -> _Work:
        claim = replace(new, generation=old.generation)
        return _Work(claim=claim, former=old, in_use=self._in_use(old))

    # ------------------------------------------------------------ what is prepared already

    async def _answer_current(
        self, claims: Collection[tuple[StoredClaim, StoredClaim]], settle: Settle
    ) -> None:
        """Answer without the driver, after all that must be there was seen or made again."""
        if not self._parts.devices.traits.checks:
            await self._confirm([old for old, _ in claims], settle)
            return
        entries = {old.uid: (old, new) for old, new in claims}
        works = {uid: self._check(old) for uid, (old, _) in entries.items()}
        async with (
            asyncio.TaskGroup() as group,
            aclosing(waves(works, tasks=self._calls)) as results,
        ):
            async for ended in results:
                fine: list[StoredClaim] = []
                broken: list[_Work] = []
                for uid, result in ended.items():
                    old, new = entries[uid]
                    if result is True:
                        fine.append(old)
                    elif result is False:
                        broken.append(self._again(old, new))
                    else:
                        settle(uid, self._why(old, result))
                group.create_task(self._confirm(fine, settle))
                group.create_task(self._work(broken, settle))

    async def _confirm(self, claims: Collection[StoredClaim], settle: Settle) -> None:
        failed = await self._write_specs(claims)
        for claim in claims:
            settle(claim.uid, failed.get(claim.uid, claim))

    async def _check(self, claim: StoredClaim) -> bool | ClaimError:
        if claim.uid in self._abandoned:
            return AbandonedError(claim=str(claim))
        try:
            return await self._parts.devices.check(reference_of(claim), allocated_devices(claim))
        except EndpointStoppedError:
            # What is prepared stays usable while its driver is away.
            return True

    # ------------------------------------------------------------ what was allocated anew

    async def _replace(
        self, claims: Collection[tuple[StoredClaim, StoredClaim]], settle: Settle
    ) -> None:
        """Free what each claim had before it was allocated anew, then prepare it."""
        await asyncio.gather(*(self._replace_one(old, new, settle) for old, new in claims))

    async def _replace_one(self, old: StoredClaim, new: StoredClaim, settle: Settle) -> None:
        undone = await self._undoing.undo_one(old)
        if undone.error is None:
            await self._work([_Work(claim=new)], settle)
        elif undone.waiting:
            cause = "its former devices are not released yet, because their driver is away"
            settle(old.uid, DriverFailedError(claim=str(old), cause=cause))
        else:
            settle(old.uid, undone.error)

    # ------------------------------------------------------------ the work

    async def _work(self, due: Collection[_Work], settle: Settle) -> None:
        """Intent, driver, result and CDI files of claims that need all of it."""
        if not due:
            return
        works = {work.claim.uid: work for work in due}
        if (away := self._parts.devices.away()) is not None:
            # Before anything is stored: there would be nothing to undo, and nobody to confirm it.
            for uid, work in works.items():
                settle(uid, driver_failed(work.claim, away))
            return
        hardware = await self._complete(works, settle)
        if self._parts.devices.traits.side_effects or not self._alone():
            await self._begin(works, settle, hardware)
        calls = {uid: self._call_driver(work.claim) for uid, work in works.items()}
        async with (
            asyncio.TaskGroup() as group,
            aclosing(waves(calls, tasks=self._calls)) as results,
        ):
            async for ended in results:
                made: list[StoredClaim] = []
                for uid, result in ended.items():
                    if isinstance(result, StoredClaim):
                        made.append(result)
                        continue
                    error = self._why(works[uid].claim, result)
                    group.create_task(self._roll_back(works[uid], error, settle))
                group.create_task(self._keep(made, works, settle, hardware))

    async def _complete(self, works: dict[str, _Work], settle: Settle) -> Hardware | None:
        """
        Record the consumption of devices; remove unlisted devices' claims from `works`.

        A claim that containers already use is prepared again in any case.
        """
        inventories = self._parts.inventories
        hardware = inventories.hardware()
        completed, missing = _completed(works, hardware)
        if missing:
            with suppress(TimeoutError):
                async with asyncio.timeout(LISTED_SECONDS):
                    while missing:
                        await inventories.revision.after(inventories.revision.number)
                        hardware = inventories.hardware()
                        completed, missing = _completed(works, hardware)
        works.update(completed)
        away = self._parts.devices.away()
        for uid, device in missing.items():
            claim = works.pop(uid).claim
            if away is not None:
                settle(uid, driver_failed(claim, away))
                continue
            error = DeviceNotListedError(
                claim=str(claim),
                request=device.request,
                device=device.device,
                driver=self._parts.driver,
            )
            settle(uid, error)
        return hardware

    def _alone(self) -> bool:
        """
        Tell whether no other process can undo a claim while we prepare it.

        Only then an entry may be stored without an intent: else it might be the late end of what
        was unprepared there meanwhile, and nothing would tell.
        """
        return self._parts.instances.alone() and self._parts.checkpoint.alone

    async def _begin(
        self, works: dict[str, _Work], settle: Settle, hardware: Hardware | None
    ) -> None:
        """Store the intents; leave out of `works` what cannot be begun."""
        new = {uid: work for uid, work in works.items() if not work.in_use}
        try:
            outcome = await self._parts.checkpoint.write(
                [work.claim for work in new.values()],
                hardware=hardware,
            )
        except CheckpointError as error:
            for uid, work in new.items():
                settle(uid, not_stored(work.claim, error))
                del works[uid]
            return
        for uid, work in new.items():
            if uid in outcome.written:
                works[uid] = replace(work, claim=outcome.written[uid])
                continue
            del works[uid]
            settle(uid, self._refused(work.claim, outcome))

    async def _call_driver(self, claim: StoredClaim) -> _Made:
        """Let the driver prepare a claim's devices, and make its CDI spec."""
        if claim.uid in self._abandoned:
            return AbandonedError(claim=str(claim))
        # Nothing is awaited before: claims that begin in one turn are one batch for the driver.
        try:
            edits = await self._parts.devices.prepare(reference_of(claim), allocated_devices(claim))
        except (DeviceFailedError, EndpointStoppedError) as error:
            return driver_failed(claim, error)
        try:
            text = self._parts.specs.build(claim.uid, edits)
        except InvalidEditsError as error:
            return SpecFailedError(claim=str(claim), cause=str(error))
        return prepared(claim, edits, cdi_spec=text)

    def _why(self, claim: StoredClaim, result: object) -> ClaimError:
        """Tell why a work did not end well."""
        if isinstance(result, asyncio.CancelledError) and claim.uid in self._abandoned:
            return AbandonedError(claim=str(claim))
        assert isinstance(result, BaseException)
        return error_of(claim, result)

    async def _roll_back(self, work: _Work, error: ClaimError, settle: Settle) -> None:
        """
        Undo a claim that failed halfway, then settle it with its error.

        One that was given up is undone by the unprepare that waits for it. What cannot be undone
        now keeps its entry, from which :mod:`.recovery` goes on.
        """
        claim = work.claim
        stored = claim.generation > 0 and not work.in_use
        if stored and not isinstance(error, AbandonedError):
            undone = await self._undoing.undo_one(claim)
            if undone.fenced:
                await self._undo_late(claim)
        settle(claim.uid, error)

    async def _keep(
        self,
        made: Collection[StoredClaim],
        works: Mapping[str, _Work],
        settle: Settle,
        hardware: Hardware | None,
    ) -> None:
        """Store what was prepared, write its CDI files, settle it."""
        if not made:
            return
        try:
            outcome = await self._parts.checkpoint.write(made, hardware=hardware)
        except CheckpointError as error:
            await asyncio.gather(
                *(
                    self._roll_back(works[claim.uid], not_stored(claim, error), settle)
                    for claim in made
                )
            )
            return
        written = outcome.written
        failed = await self._write_specs(written.values())
        if done := [claim for uid, claim in written.items() if uid not in failed]:
            logger.info("claims prepared", extra=facts_of(self._parts.driver, done))
        for claim in done:
            settle(claim.uid, claim)
        late = [claim for claim in made if claim.uid not in written]
        await asyncio.gather(
            *(
                self._roll_back(replace(works[uid], claim=written[uid]), error, settle)
                for uid, error in failed.items()
            ),
            *(self._refuse_late(claim, self._refused(claim, outcome), settle) for claim in late),
        )

    def _refused(self, claim: StoredClaim, outcome: Outcome) -> ClaimError:
        return refused(claim, outcome, name_all_holders=self._parts.name_all_holders)

    async def _refuse_late(self, claim: StoredClaim, error: ClaimError, settle: Settle) -> None:
        await self._undo_late(claim)
        settle(claim.uid, error)

    async def _undo_late(self, claim: StoredClaim) -> None:
        """
        Take back what was done for a claim whose entry is not ours any more.

        An unprepare came first, in another process or by hand. A new entry keeps the devices while
        the driver is asked; it cannot be made if the claim was begun anew, or another claim has
        one of the devices now, and then they are not ours to touch.
        """
        if not self._parts.devices.traits.side_effects:
            return
        undone = await self._undoing.undo_one(replace(claim, generation=0))
        if undone.error is not None:
            logger.warning(
                "late prepare is not taken back",
                extra={"claim": str(claim), "claim_uid": claim.uid, "error": str(undone.error)},
            )

    async def _write_specs(self, claims: Collection[StoredClaim]) -> Mapping[str, ClaimError]:
        texts = {claim.uid: claim.cdi_spec or "" for claim in claims}
        failed = await self._parts.specs.write(texts)
        return {
            claim.uid: SpecFailedError(claim=str(claim), cause=str(failed[claim.uid]))
            for claim in claims
            if claim.uid in failed
        }


def _completed(
    works: Mapping[str, _Work], hardware: Hardware | None
) -> tuple[Mapping[str, _Work], Mapping[str, StoredDevice]]:
    """Return works with the consumption of their devices, and an unlisted device for each work
    that cannot continue."""
    completed: dict[str, _Work] = {}
    missing: dict[str, StoredDevice] = {}
    for uid, work in works.items():
        claim, unlisted = with_consumption(work.claim, hardware, former=work.former)
        completed[uid] = replace(work, claim=claim)
        if unlisted is not None and not work.in_use:
            missing[uid] = unlisted
    return completed, missing
