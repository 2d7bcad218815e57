"""
The claims engine of one driver: prepares and unprepares the claims of a pod as a batch.

A batch costs the same few steps whatever its size: fetch all claims, one transaction with the
intent, the drivers' work side by side, CDI files, one transaction with the result. A claim that
fails gets its own error, and the others go on. The front door makes sure that two calls for the
same claim never overlap; that is why there is no lock here but the one against
:mod:`.restore`.

It must not know gRPC, HTTP, SQLite, or the format of a CDI file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from drakit.cdi import InvalidEditsError
from drakit.device import AllocatedDevice, ClaimReference, Edits
from drakit.driver import DriverError, Node
from drakit.resource.claim import base_request
from drakit_nodeplugin.claims.allocation import Step, allocated_device, next_step, wanted_claim
from drakit_nodeplugin.claims.answers import PrepareAnswer, PreparedDevice
from drakit_nodeplugin.claims.checkpoint import Checkpoint, CheckpointError
from drakit_nodeplugin.claims.errors import (
    CheckpointFailedError,
    ClaimError,
    DeviceTakenError,
    DriverFailedError,
    SpecFailedError,
)
from drakit_nodeplugin.claims.locks import KeyedLocks
from drakit_nodeplugin.claims.source import ClaimSource, NoAnswerError
from drakit_nodeplugin.claims.specs import ClaimSpecs
from drakit_nodeplugin.claims.stored import StoredClaim, StoredDevice
from drakit_nodeplugin.endpoints.errors import EndpointStoppedError

__all__ = ("ClaimEngine", "Devices")

logger = logging.getLogger(__name__)

KNOWN_CLAIM_FETCH_SECONDS = 3.0
"""How long the API server is asked about a claim that the checkpoint holds as prepared; without
an answer the checkpoint's word is taken alone."""

NEW_CLAIM_FETCH_SECONDS = 15.0
"""How long it is asked about any other: a third of the 45 s that the kubelet waits."""


class Devices(Protocol):
    """What the engine needs of a driver."""

    async def prepare(self, claim: ClaimReference, device: AllocatedDevice) -> Edits:
        """Make a device ready; raises DriverError, EndpointStoppedError."""
        ...

    async def unprepare(self, claim: ClaimReference, device: AllocatedDevice) -> None:
        """Undo it; raises DriverError, EndpointStoppedError."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """A claim of a batch that is to be prepared."""

    claim: StoredClaim
    step: Step
    old: StoredClaim | None


class ClaimEngine:
    """Implements :class:`.answers.ClaimService` for one driver."""

    def __init__(
        self,
        *,
        driver: str,
        node: Node,
        boot_id: str,
        checkpoint: Checkpoint,
        source: ClaimSource,
        devices: Devices,
        specs: ClaimSpecs,
    ) -> None:
        self._driver = driver
        self._node = node
        self._boot_id = boot_id
        self._checkpoint = checkpoint
        self._source = source
        self._devices = devices
        self._specs = specs
        self.locks = KeyedLocks()
        """Held per UID while its files or its row change."""

    # ------------------------------------------------------------ prepare

    async def prepare(self, claims: Sequence[ClaimReference]) -> Mapping[str, PrepareAnswer]:
        """Prepare the claims of a pod; every UID is answered once."""
        async with AsyncExitStack() as held:
            for uid in sorted({claim.uid for claim in claims}):
                await held.enter_async_context(self.locks.hold(uid))
            try:
                return await self._prepare(claims)
            except CheckpointError as error:
                return {
                    claim.uid: PrepareAnswer(
                        error=str(CheckpointFailedError(claim=str(claim), cause=str(error)))
                    )
                    for claim in claims
                }

    async def _prepare(self, claims: Sequence[ClaimReference]) -> Mapping[str, PrepareAnswer]:
        known = await self._checkpoint.find([claim.uid for claim in claims])
        failed: dict[str, ClaimError] = {}
        ready: dict[str, StoredClaim] = {}
        work: list[_Work] = []
        wanted = await asyncio.gather(*(self._wanted(c, known.get(c.uid)) for c in claims))
        for reference, new in zip(claims, wanted, strict=True):
            if isinstance(new, ClaimError):
                failed[reference.uid] = new
                continue
            old = known.get(reference.uid)
            step = next_step(old, new=new)
            if step is Step.ANSWER and old is not None:
                ready[old.uid] = old
            else:
                work.append(_Work(claim=new, step=step, old=old))

        work = await self._undo_replaced(work, failed)
        work = await self._begin(work, failed)
        ready.update(await self._prepare_devices(work, failed))
        await self._write_specs(ready, failed)
        done = [ready[w.claim.uid] for w in work if w.claim.uid in ready]
        await self._checkpoint.write(done)
        for error in failed.values():
            logger.warning(
                "claim not prepared", extra={"reason": error.reason, "error": str(error)}
            )
        return {uid: PrepareAnswer(error=str(error)) for uid, error in failed.items()} | {
            uid: PrepareAnswer(devices=self._answer(claim)) for uid, claim in ready.items()
        }

    async def _wanted(
        self, reference: ClaimReference, old: StoredClaim | None
    ) -> StoredClaim | ClaimError:
        current = old is not None and old.state == "prepared" and old.boot_id == self._boot_id
        timeout_seconds = KNOWN_CLAIM_FETCH_SECONDS if current else NEW_CLAIM_FETCH_SECONDS
        try:
            claim = await self._source.fetch(reference, timeout_seconds=timeout_seconds)
            return wanted_claim(
                claim,
                reference=reference,
                driver=self._driver,
                node=self._node.name,
                labels=self._node.labels,
                boot_id=self._boot_id,
            )
        except NoAnswerError as error:
            return old if current and old is not None else error
        except ClaimError as error:
            return error

    async def _undo_replaced(self, work: list[_Work], failed: dict[str, ClaimError]) -> list[_Work]:
        """Free the devices that a claim had before it was allocated anew."""
        kept: list[_Work] = []
        for item in work:
            if item.step is Step.REPLACE and item.old is not None:
                error = await self._undo(item.old)
                if error is not None:
                    failed[item.claim.uid] = error
                    continue
            kept.append(item)
        return kept

    async def _begin(self, work: list[_Work], failed: dict[str, ClaimError]) -> list[_Work]:
        """Write the intent; leave out what wants a device that another claim holds."""
        if not work:
            return work
        held = await self._checkpoint.begin([item.claim for item in work])
        for item in work:
            if (taken := held.get(item.claim.uid)) is not None:
                failed[item.claim.uid] = DeviceTakenError(
                    claim=str(item.claim),
                    request=taken.device.request,
                    device=taken.device.device,
                    holder=str(taken.holder),
                )
        return [item for item in work if item.claim.uid not in held]

    async def _prepare_devices(
        self, work: list[_Work], failed: dict[str, ClaimError]
    ) -> dict[str, StoredClaim]:
        results = await asyncio.gather(*(self._prepare_claim(item.claim) for item in work))
        ready: dict[str, StoredClaim] = {}
        for item, result in zip(work, results, strict=True):
            if isinstance(result, ClaimError):
                failed[item.claim.uid] = result
            else:
                ready[item.claim.uid] = result
        return ready

    async def _prepare_claim(self, claim: StoredClaim) -> StoredClaim | ClaimError:
        results = await asyncio.gather(*(self._prepare_device(claim, d) for d in claim.devices))
        edits: list[Edits] = []
        for result in results:
            if isinstance(result, ClaimError):
                return result
            edits.append(result)
        try:
            spec = self._specs.build(claim.uid, edits)
        except InvalidEditsError as error:
            return SpecFailedError(claim=str(claim), cause=str(error))
        return replace(claim, state="prepared", cdi_spec=spec)

    async def _prepare_device(self, claim: StoredClaim, device: StoredDevice) -> Edits | ClaimError:
        try:
            return await self._devices.prepare(_reference(claim), allocated_device(device))
        except (DriverError, EndpointStoppedError) as error:
            return _driver_failed(claim, device, error)

    async def _write_specs(
        self, ready: dict[str, StoredClaim], failed: dict[str, ClaimError]
    ) -> None:
        specs = {uid: claim.cdi_spec or "" for uid, claim in ready.items()}
        for uid, error in (await self._specs.write(specs)).items():
            failed[uid] = SpecFailedError(claim=str(ready.pop(uid)), cause=str(error))

    def _answer(self, claim: StoredClaim) -> tuple[PreparedDevice, ...]:
        return tuple(
            PreparedDevice(
                requests=(base_request(device.request),),
                pool=device.pool,
                device=device.device,
                cdi_ids=(self._specs.cdi_id(claim.uid, index),),
                share_id=device.share_id,
            )
            for index, device in enumerate(claim.devices)
        )

    # ------------------------------------------------------------ unprepare

    async def unprepare(self, claims: Sequence[ClaimReference]) -> Mapping[str, str | None]:
        """Unprepare claims from the checkpoint alone; one that is not known is no error."""
        uids = sorted({claim.uid for claim in claims})
        async with AsyncExitStack() as held:
            for uid in uids:
                await held.enter_async_context(self.locks.hold(uid))
            try:
                known = await self._checkpoint.find(uids)
                undone = await self._undo_all(list(known.values()))
                # A file without a row is what a crash or a damaged checkpoint has left.
                strange = await self._specs.remove([uid for uid in uids if uid not in known])
            except CheckpointError as error:
                return {
                    claim.uid: str(CheckpointFailedError(claim=str(claim), cause=str(error)))
                    for claim in claims
                }
        errors = {uid: str(error) for uid, error in (*undone.items(), *strange.items())}
        return {uid: errors.get(uid) for uid in uids}

    async def finish(self) -> int:
        """
        Go on with unprepares that were answered while the driver was away, or that a crash cut.

        Gives the number of claims that are still not undone. Called again and again by the daemon.
        """
        left = 0
        for claim in await self._checkpoint.in_state("unpreparing"):
            async with self.locks.hold(claim.uid):
                current = (await self._checkpoint.find([claim.uid])).get(claim.uid)
                if current is not None and current.state == "unpreparing":
                    await self._undo_all([current])
                    left += claim.uid in await self._checkpoint.find([claim.uid])
        return left

    async def _undo_all(self, claims: Collection[StoredClaim]) -> Mapping[str, ClaimError]:
        begun = [replace(c, state="unpreparing") for c in claims if c.state != "unpreparing"]
        await self._checkpoint.write(begun)
        results = await asyncio.gather(*(self._undo_devices(claim) for claim in claims))
        failed: dict[str, ClaimError] = {}
        done: list[str] = []
        for claim, result in zip(claims, results, strict=True):
            if result is None:
                done.append(claim.uid)
            elif not isinstance(result.__cause__, EndpointStoppedError):
                failed[claim.uid] = result
            else:
                # The containers are gone, so the pod may go. The device is kept from others until
                # the driver is back and has confirmed. It is said once, not at each attempt.
                logger.log(
                    logging.DEBUG if claim.state == "unpreparing" else logging.WARNING,
                    "claim stays unpreparing until its driver is back",
                    extra={"claim": str(claim), "claim_uid": claim.uid, "error": str(result)},
                )
        removed = [c.uid for c in claims if c.uid not in failed]
        for uid, error in (await self._specs.remove(removed)).items():
            name = next(str(claim) for claim in claims if claim.uid == uid)
            failed[uid] = SpecFailedError(claim=name, cause=str(error))
        await self._checkpoint.delete([uid for uid in done if uid not in failed])
        for error in failed.values():
            logger.warning("claim not unprepared", extra={"error": str(error)})
        return failed

    async def _undo(self, claim: StoredClaim) -> ClaimError | None:
        failed = await self._undo_all([claim])
        if claim.uid in failed:
            return failed[claim.uid]
        if claim.uid in await self._checkpoint.find([claim.uid]):
            cause = "its former devices are not released yet, because their driver is away"
            device = claim.devices[0]
            return DriverFailedError(
                claim=str(claim), request=device.request, device=device.device, cause=cause
            )
        return None

    async def _undo_devices(self, claim: StoredClaim) -> ClaimError | None:
        results = await asyncio.gather(*(self._undo_device(claim, d) for d in claim.devices))
        return next((result for result in results if result is not None), None)

    async def _undo_device(self, claim: StoredClaim, device: StoredDevice) -> ClaimError | None:
        try:
            await self._devices.unprepare(_reference(claim), allocated_device(device))
        except (DriverError, EndpointStoppedError) as error:
            return _driver_failed(claim, device, error)
        return None


def _reference(claim: StoredClaim) -> ClaimReference:
    return ClaimReference(namespace=claim.namespace, name=claim.name, uid=claim.uid)


def _driver_failed(claim: StoredClaim, device: StoredDevice, cause: Exception) -> DriverFailedError:
    error = DriverFailedError(
        claim=str(claim), request=device.request, device=device.device, cause=str(cause)
    )
    error.__cause__ = cause
    return error
