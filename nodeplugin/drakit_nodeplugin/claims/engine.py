"""
The claims engine of one driver: prepares and unprepares the claims of a pod as a batch.

One lock a claim, and none around all: a claim on which somebody works (the kubelet's other call,
the recovery after a crash, the collector of stale claims) is waited for alone, while the rest of
its batch goes on. What is done for a claim is :mod:`.prepare`'s and :mod:`.unprepare`'s.

It must not know gRPC, HTTP, SQLite, or the format of a CDI file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from drakit.device import ClaimReference
from drakit.resource.claim import base_request
from drakit_nodeplugin.claims.answers import Answer, PrepareAnswer, PreparedDevice
from drakit_nodeplugin.claims.checkpoint.records import State, StoredClaim
from drakit_nodeplugin.claims.checkpoint.store import CheckpointError
from drakit_nodeplugin.claims.errors import (
    CheckpointFailedError,
    ClaimBusyError,
    ClaimError,
    SpecNotRemovedError,
)
from drakit_nodeplugin.claims.locks import KeyedLocks
from drakit_nodeplugin.claims.parts import EngineParts, foreign_work
from drakit_nodeplugin.claims.prepare import Preparing
from drakit_nodeplugin.claims.unprepare import Undoing, Undone

__all__ = ("ClaimEngine",)

logger = logging.getLogger(__name__)

REBUILD_SECONDS = 20.0
"""How long work waits for the rebuild of a checkpoint that was damaged: half of a call's time."""

_Run = Callable[[Sequence[ClaimReference], Answer], Awaitable[None]]


class ClaimEngine:
    """Implements :class:`.answers.ClaimService` for one driver."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._undoing = Undoing(parts)
        self._preparing = Preparing(parts, self._undoing)
        self.locks = KeyedLocks()
        """Held per UID while a claim's entry, files or devices change."""
        self.rebuilt = asyncio.Event()
        """Set once all was done to make up for damage of the checkpoint. Until then nothing is
        answered: what is not in it yet must be neither given away nor called unprepared."""

    # ------------------------------------------------------------ the kubelet's calls

    async def prepare(self, claims: Sequence[ClaimReference], answer: Answer) -> None:
        """Prepare the claims of a pod; every UID is answered once."""
        await self._by_locks(claims, answer, self._prepare)

    async def unprepare(self, claims: Sequence[ClaimReference], answer: Answer) -> None:
        """Unprepare claims from the checkpoint alone; one that is not known is no error."""
        await self._by_locks(claims, answer, self._unprepare)

    def abandon(self, uid: str) -> None:
        """Give up a claim that is being prepared."""
        self._preparing.abandon(uid)

    # ------------------------------------------------------------ work that nobody asked for

    async def undo_left(self, uids: Collection[str], *, state: State) -> Mapping[str, Undone]:
        """
        Undo entries that a crash, or a driver that was away, has left in a state.

        Left out of the answer is what needs nothing: somebody works on the claim, here or in
        another process, or it has left that state.
        """
        held = [uid for uid in uids if self.locks.take(uid)]
        undone: dict[str, Undone] = {}
        try:
            found = await self._parts.checkpoint.find(held)
            left = [
                claim
                for claim in found.values()
                if claim.state == state and await foreign_work(claim, self._parts.instances) is None
            ]
            await self._undoing.undo(left, undone.__setitem__)
        finally:
            for uid in held:
                self.locks.release(uid)
        return undone

    async def collect(self, stale: StoredClaim) -> bool:
        """
        Unprepare a claim of which nobody will ask that, unless it has changed since it was read.

        Gives whether it is gone.
        """
        async with self.locks.hold(stale.uid):
            claim = (await self._parts.checkpoint.find([stale.uid])).get(stale.uid)
            if claim is None or claim.generation != stale.generation:
                return False
            if await foreign_work(claim, self._parts.instances) is not None:
                return False
            return (await self._undoing.undo_one(claim)).error is None

    # ------------------------------------------------------------ locks

    async def _by_locks(self, claims: Sequence[ClaimReference], answer: Answer, run: _Run) -> None:
        """Run the claims whose locks are free as one batch, and each other one by itself."""
        free = [claim for claim in claims if self.locks.take(claim.uid)]
        if len(free) == len(claims):
            await self._locked(free, answer, run)
            return
        taken = {claim.uid for claim in free}
        async with asyncio.TaskGroup() as group:
            if free:
                group.create_task(self._locked(free, answer, run))
            for claim in claims:
                if claim.uid not in taken:
                    group.create_task(self._wait_and_run(claim, answer, run))

    async def _wait_and_run(self, claim: ClaimReference, answer: Answer, run: _Run) -> None:
        await self.locks.acquire(claim.uid)
        await self._locked([claim], answer, run)

    async def _locked(self, claims: Sequence[ClaimReference], answer: Answer, run: _Run) -> None:
        """Run claims whose locks we hold; each is released as soon as it is answered."""
        held = {claim.uid for claim in claims}

        def release_and_answer(uid: str, said: PrepareAnswer) -> None:
            held.remove(uid)
            self.locks.release(uid)
            answer(uid, said)

        try:
            await run(claims, release_and_answer)
        finally:
            for uid in held:
                self._preparing.ended(uid)
                self.locks.release(uid)

    # ------------------------------------------------------------ answers

    async def _prepare(self, claims: Sequence[ClaimReference], answer: Answer) -> None:
        def settle(uid: str, result: StoredClaim | ClaimError) -> None:
            self._preparing.ended(uid)
            if isinstance(result, StoredClaim):
                answer(uid, PrepareAnswer(devices=self._devices(result)))
                return
            logger.warning(
                "claim not prepared",
                extra={"claim_uid": uid, "reason": result.reason, "error": str(result)},
            )
            answer(uid, _refusal(result))

        if not await self._is_complete():
            for claim in claims:
                settle(claim.uid, _incomplete(claim))
            return
        await self._preparing.prepare(claims, settle)

    async def _unprepare(self, claims: Sequence[ClaimReference], answer: Answer) -> None:
        names = {claim.uid: str(claim) for claim in claims}
        if not await self._is_complete():
            for claim in claims:
                answer(claim.uid, _refusal(_incomplete(claim)))
            return
        try:
            known = await self._parts.checkpoint.find(names)
        except CheckpointError as error:
            for uid, name in names.items():
                answer(uid, _refusal(CheckpointFailedError(claim=name, cause=str(error))))
            return
        due: list[StoredClaim] = []
        for uid, claim in known.items():
            busy = await foreign_work(claim, self._parts.instances)
            if busy is not None:
                answer(uid, _refusal(busy))
            else:
                due.append(claim)
        await self._undo_unknown([uid for uid in names if uid not in known], names, answer)

        def done(uid: str, undone: Undone) -> None:
            if undone.error is None:
                answer(uid, PrepareAnswer())
            elif undone.waiting:
                # The containers are gone, so the pod may go. The devices are kept from others
                # until the driver is back and has confirmed.
                logger.warning(
                    "claim stays unpreparing until its driver is back",
                    extra={"claim": names[uid], "claim_uid": uid, "error": str(undone.error)},
                )
                answer(uid, PrepareAnswer())
            else:
                logger.warning(
                    "claim not unprepared",
                    extra={
                        "claim": names[uid],
                        "claim_uid": uid,
                        "reason": undone.error.reason,
                        "error": str(undone.error),
                    },
                )
                answer(uid, _refusal(undone.error))

        await self._undoing.undo(due, done)

    async def _undo_unknown(
        self, uids: Sequence[str], names: dict[str, str], answer: Answer
    ) -> None:
        """Not being prepared is success; a file without an entry is what damage has left."""
        if not uids:
            return
        failed = await self._parts.specs.remove(uids)
        for uid in uids:
            if uid in failed:
                error = SpecNotRemovedError(claim=names[uid], cause=str(failed[uid]))
                answer(uid, _refusal(error))
            else:
                answer(uid, PrepareAnswer())

    async def _is_complete(self) -> bool:
        if self._parts.checkpoint.damage is None:
            return True
        try:
            async with asyncio.timeout(REBUILD_SECONDS):
                await self.rebuilt.wait()
        except TimeoutError:
            return False
        return True

    def _devices(self, claim: StoredClaim) -> tuple[PreparedDevice, ...]:
        # A container has all devices of a claim, or those of a request. The kubelet hands a name on
        # as often as it stands there: so it must stand once in each request that needs it.
        told: set[tuple[str, str]] = set()
        devices: list[PreparedDevice] = []
        for index, device in enumerate(claim.devices):
            request = base_request(device.request)
            others = [name for name in device.cdi_devices if (request, name) not in told]
            told.update((request, name) for name in others)
            devices.append(
                PreparedDevice(
                    requests=(request,),
                    pool=device.pool,
                    device=device.device,
                    cdi_ids=(self._parts.specs.cdi_id(claim.uid, index), *others),
                    share_id=device.share_id,
                )
            )
        return tuple(devices)


def _refusal(error: ClaimError) -> PrepareAnswer:
    return PrepareAnswer(error=str(error), reason=error.reason)


def _incomplete(claim: ClaimReference) -> ClaimError:
    cause = "the checkpoint was damaged and is still being rebuilt"
    return ClaimBusyError(claim=str(claim), cause=cause)
