"""
Prepares the claims of a pod, so that its containers can use their devices.

A batch takes the same few steps, regardless of its size:

    entries read -> claims fetched -> intent stored -> driver -> result stored, CDI files written

The result is stored before the files are written, so that every file has an entry. If a crash
leaves an entry without its file, the file is restored. After a crash, the intent shows which work a
driver may have begun. Drivers that have nothing to undo do not need an intent. A claim that fails
gets its own error and is undone, and the other claims continue.

:mod:`.queue` decides when to work on a claim; :mod:`.unprepare` undoes claims.

Does not depend on gRPC, HTTP or SQLite.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from drakit.device import Mount, PreparedDevice
from drakit_driver.runtime.contract import CallError
from drakit_driver.runtime.failures import DeviceFailedError, EndpointStoppedError
from drakit_formats.cdi import InvalidEditsError
from drakit_formats.resource.device import attributes_body, published_attributes
from drakit_formats.resource.metadata import DeviceMetadata, InvalidMetadataError, request_bodies
from drakit_formats.resource.objects import children
from drakit_formats.resource.status import has_status, network_data_body
from drakit_nodeplugin.claims.allocation import Step, next_step, wanted_claim, with_consumption
from drakit_nodeplugin.claims.errors import (
    AbandonedError,
    ClaimError,
    ClaimFetchError,
    ClaimGoneError,
    ClaimTooLargeError,
    DeviceGoneError,
    DeviceNotListedError,
    DriverFailedError,
    FaultError,
    SpecFailedError,
)
from drakit_nodeplugin.claims.unprepare import Unpreparing
from drakit_nodeplugin.claims.work import (
    ClaimResult,
    ClaimWork,
    call_driver,
    driver_failed,
    facts_of,
    not_stored,
    prepared_devices,
    refused,
    run_concurrently,
)
from drakit_nodeplugin.state.checkpoint import CheckpointError, WriteOutcome
from drakit_nodeplugin.state.device_numbers import with_former_nodes
from drakit_nodeplugin.state.holds import Hardware
from drakit_nodeplugin.state.records import StoredClaim, StoredDevice, StoredNode

logger = logging.getLogger(__name__)

KNOWN_CLAIM_FETCH_SECONDS = 3.0
"""Time limit for reading a claim that is prepared according to the checkpoint. Without a usable
response, the plugin relies on the checkpoint."""

NEW_CLAIM_FETCH_SECONDS = 15.0
"""Time limit for reading any other claim: a third of the 45 s that the kubelet waits."""

LISTED_SECONDS = 2.0
"""Maximum time to wait for a device that the driver does not list. After a start, the inventory may
be late, and the kubelet would retry only after 90 s."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Due:
    """A claim in a batch that the driver must prepare."""

    work: ClaimWork
    claim: StoredClaim
    """The claim, with the generation of its entry if it has one."""

    former: StoredClaim | None = None
    """The claim's existing entry."""

    in_use: bool = False
    """Whether the claim was prepared in this boot. If so, containers may be using it, and must keep
    it if the prepare fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """A claim to prepare, with its current entry. If the API server did not return the claim, `new`
    is also the entry."""

    work: ClaimWork
    new: StoredClaim
    old: StoredClaim


class Preparing(Unpreparing):
    """Prepares and unprepares claims of one driver. Called by :class:`.queue.ClaimQueue`."""

    async def prepare(self, works: Sequence[ClaimWork]) -> None:
        """Prepare the claims of a pod. Each claim gets its result as soon as its own work is
        done."""
        known = await self._find(works)
        if known is None:
            return
        wanted = await run_concurrently([self._wanted(w, known.get(w.claim.uid)) for w in works])
        current: list[_Wanted] = []
        replaced: list[_Wanted] = []
        due: list[_Due] = []
        for work, new in zip(works, wanted, strict=True):
            old = known.get(work.claim.uid)
            if isinstance(new, ClaimError):
                self._refuse(work, new)
                continue
            match next_step(old, new=new), old:
                case Step.CONFIRM, StoredClaim():
                    current.append(_Wanted(work=work, new=new, old=old))
                case Step.REPEAT, StoredClaim():
                    due.append(self._again(work, old, new))
                case ((Step.REPLACE | Step.UNDO), StoredClaim()):
                    replaced.append(_Wanted(work=work, new=new, old=old))
                case _:
                    due.append(_Due(work=work, claim=new))
        await run_concurrently(
            [
                *([self._confirm_current(current)] if current else ()),
                *([self._work(due)] if due else ()),
                *(self._replace(each) for each in replaced),
            ]
        )

    async def prepare_again(self, works: Sequence[ClaimWork]) -> None:
        """
        Prepare claims that are already prepared in this boot a second time, without an unprepare.

        First the row gets the new edits, and then the CDI file. After a crash in between, the file
        is replaced at the next start. Claims that are no longer prepared are skipped. Claims whose
        requests and configs are unknown are also skipped, because they are prepared when the
        kubelet requests them.
        """
        known = await self._find(works)
        if known is None:
            return
        due: list[_Due] = []
        for work in works:
            old = known.get(work.claim.uid)
            if old is not None and self._in_use(old) and old.rebuilt != "listed":
                due.append(_Due(work=work, claim=old, former=old, in_use=True))
            else:
                work.finish(ClaimResult())
        if due:
            await self._work(due)

    # ------------------------------------------------------------ results

    def _refuse(self, work: ClaimWork, error: ClaimError) -> None:
        logger.warning(
            "claim not prepared",
            extra={"claim_uid": work.claim.uid, "reason": error.reason, "error": str(error)},
        )
        work.refuse(error)

    def _is_abandoned(self, work: ClaimWork, claim: StoredClaim) -> bool:
        """Return whether the work on a claim was abandoned. If so, set an error as its result."""
        if work.abandoned:
            self._refuse(work, AbandonedError(claim=str(claim)))
        return work.abandoned

    async def _find(self, works: Sequence[ClaimWork]) -> Mapping[str, StoredClaim] | None:
        """Return the entries of claims. If the checkpoint cannot be read, set errors for all claims
        and return None."""
        for work in works:
            work.begin_step("checkpoint")
        if not await self.is_complete(works):
            return None
        try:
            return await self._parts.checkpoint.find([work.claim.uid for work in works])
        except CheckpointError as error:
            for work in works:
                self._refuse(work, not_stored(work.claim, error))
            return None

    # ------------------------------------------------------------ claims to prepare

    async def _wanted(self, work: ClaimWork, old: StoredClaim | None) -> StoredClaim | ClaimError:
        work.begin_step("fetch")
        reference = work.claim
        # If an entry is known only from the kubelet's list, its requests are unknown.
        known = old is not None and self._in_use(old) and old.rebuilt != "listed"
        usable = old if known else None
        timeout_seconds = NEW_CLAIM_FETCH_SECONDS if usable is None else KNOWN_CLAIM_FETCH_SECONDS
        try:
            claim = await self._parts.source.fetch(reference, timeout_seconds=timeout_seconds)
            entries = children(claim.body, "status", "devices")
            work.had_status = any(each.get("driver") == self._parts.driver for each in entries)
            wanted = partial(
                wanted_claim,
                claim,
                reference=reference,
                driver=self._parts.driver,
                node=self._parts.node.name,
                labels=self._parts.node.labels,
                boot_id=self._parts.boot_id,
                limits=self._parts.limits,
                side_effects=self._parts.devices.traits.side_effects,
            )
            try:
                return wanted(data=self._parts.devices.traits.claim_data)
            except ClaimTooLargeError:
                # Don't fail a claim that is already prepared: it does not need the driver. Its data
                # may have become too large since, or a backend that is not connected yet may not
                # need the data.
                if usable is None or next_step(usable, new=wanted()) is not Step.CONFIRM:
                    raise
                return usable
        except ClaimGoneError as error:
            return error
        except ClaimFetchError as error:
            # A missing response, a rejection or an invalid response proves nothing about the claim.
            if usable is None:
                return error
            logger.warning(
                "claim cannot be read; the checkpoint is used instead",
                extra={"claim": str(reference), "claim_uid": reference.uid, "error": str(error)},
            )
            return usable
        except ClaimError as error:
            # Drop the traceback, because its frames refer to the claim object, which can take 20
            # MiB of memory.
            return error.with_traceback(None)
        except Exception:  # a bug must not affect the other claims
            return self._fault(reference)

    def _fault(self, claim: object) -> FaultError:
        logger.exception("engine failed", extra={"driver": self._parts.driver, "claim": str(claim)})
        return FaultError(claim=str(claim))

    def _in_use(self, old: StoredClaim) -> bool:
        """Return whether containers may be using the claim's devices."""
        return old.state == "prepared" and old.boot_id == self._parts.boot_id

    def _again(self, work: ClaimWork, old: StoredClaim, new: StoredClaim) -> _Due:
        claim = replace(new, generation=old.generation)
        return _Due(work=work, claim=claim, former=old, in_use=self._in_use(old))

    # ------------------------------------------------------------ prepared claims

    async def _confirm_current(self, current: Sequence[_Wanted]) -> None:
        """Return the results of prepared claims, after verifying or restoring entries and CDI
        files. If the driver cannot confirm that a claim is still usable, prepare it again."""
        if not self._parts.devices.traits.checks:
            await self._confirm(current)
            return
        entries = {each.old.uid: each for each in current}
        async with asyncio.TaskGroup() as group:

            async def on_results(results: Mapping[str, bool | CallError]) -> None:
                fine: list[_Wanted] = []
                broken: list[_Due] = []
                for uid, result in results.items():
                    each = entries[uid]
                    if self._is_abandoned(each.work, each.old):
                        continue
                    # A prepared claim remains usable while its driver is unavailable.
                    if result is True or isinstance(result, EndpointStoppedError):
                        fine.append(each)
                        continue
                    if isinstance(result, DeviceFailedError):
                        # If the check fails, the state of the device is unknown.
                        facts = {"claim_uid": uid, "error": str(result)}
                        logger.warning(
                            "driver cannot check a claim",
                            extra=facts | {"driver": self._parts.driver},
                        )
                    broken.append(self._again(each.work, each.old, each.new))
                if fine:
                    group.create_task(self._confirm(fine))
                if broken:
                    group.create_task(self._work(broken))

            await call_driver(
                self._parts,
                "check",
                self._parts.devices.check,
                [each.old for each in current],
                on_results,
                works={uid: each.work for uid, each in entries.items()},
            )

    async def _confirm(self, current: Sequence[_Wanted]) -> None:
        """Verify entries and CDI files, and return results."""
        for each in current:
            each.work.begin_step("checkpoint")
        try:
            outcome = await self._parts.checkpoint.confirm([each.old for each in current])
        except CheckpointError as error:
            for each in current:
                self._refuse(each.work, not_stored(each.old, error))
            return
        for each in current:
            uid = each.old.uid
            if uid in outcome.file_errors or uid in outcome.changed:
                self._refuse(each.work, self._refused(each.old, outcome))
            else:
                devices = prepared_devices(each.old, self._parts.specs)
                each.work.finish(ClaimResult(devices=devices))

    # ------------------------------------------------------------ reallocated claims

    async def _replace(self, wanted: _Wanted) -> None:
        """Release the devices of a claim's earlier allocation, and then prepare the claim."""
        wanted.work.begin_step("undo")
        undone = await self.undo_one(wanted.old)
        if undone.error is None:
            await self._work([_Due(work=wanted.work, claim=wanted.new)])
        elif undone.waiting:
            cause = (
                "the devices of the previous allocation are still held, because their driver is "
                "unavailable or is still releasing them; the kubelet retries"
            )
            self._refuse(wanted.work, DriverFailedError(claim=str(wanted.old), cause=cause))
        else:
            self._refuse(wanted.work, undone.error)

    # ------------------------------------------------------------ the work

    async def _work(self, claims: Collection[_Due]) -> None:
        """Prepare claims with the driver: store the intent, call the driver, store the result,
        write CDI files."""
        if (unavailable := self._parts.devices.unavailable()) is not None:
            # Refuse the claims now, before anything is stored. Otherwise, no driver could confirm
            # the rollback.
            for each in claims:
                self._refuse(each.work, driver_failed(each.claim, unavailable))
            return
        due: dict[str, _Due] = {}
        for each in claims:
            if (gone := self._gone(each)) is None:
                due[each.claim.uid] = each
            else:
                self._refuse(each.work, self._device_error(each, gone, DeviceGoneError))
        for each in due.values():
            each.work.begin_step("wait")
        hardware = await self._await_listed(due)
        for each in due.values():
            each.work.begin_step("checkpoint")
        if self._parts.devices.traits.side_effects:
            # Store the intents before waiting, so that a claim whose device is held by another
            # claim fails immediately.
            await self._store_intents(due, hardware)
        if not due:
            return
        # Don't make claims wait for the rollback of another claim, which can take a long time in
        # the driver.
        async with asyncio.TaskGroup() as rollbacks:
            await call_driver(
                self._parts,
                "prepare",
                self._parts.devices.prepare,
                [each.claim for each in due.values()],
                partial(self._keep, due, hardware, rollbacks),
                works={uid: each.work for uid, each in due.items()},
            )

    def _device_error(
        self,
        due: _Due,
        device: StoredDevice,
        kind: type[DeviceGoneError | DeviceNotListedError],
    ) -> ClaimError:
        return kind(
            claim=str(due.claim),
            request=device.request,
            device=device.device,
            driver=self._parts.driver,
        )

    async def _await_listed(self, due: dict[str, _Due]) -> Hardware | None:
        """
        Record the consumption of devices, and remove claims with unlisted devices from `due`, after
        waiting for these devices.

        A claim that containers already use is always prepared.
        """
        parts, inventories = self._parts, self._parts.inventories
        # Devices in pools that do not belong to this node are not in any inventory.
        node = parts.node.name if parts.devices.traits.network_devices else None
        hardware: Hardware | None = None
        missing: dict[str, StoredDevice] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(LISTED_SECONDS):
                while True:
                    hardware = inventories.hardware()
                    missing = {}
                    for uid, each in due.items():
                        each.claim, unlisted = with_consumption(
                            each.claim, hardware, node=node, former=each.former
                        )
                        if unlisted is not None and not each.in_use:
                            missing[uid] = unlisted
                    if not missing:
                        return hardware
                    await inventories.revision.after(inventories.revision.number)
        unavailable = parts.devices.unavailable()
        for uid, device in missing.items():
            each = due.pop(uid)
            error = (
                self._device_error(each, device, DeviceNotListedError)
                if unavailable is None
                else driver_failed(each.claim, unavailable)
            )
            self._refuse(each.work, error)
        return hardware

    async def _store_intents(self, due: dict[str, _Due], hardware: Hardware | None) -> None:
        """Store the intents. Remove the claims that cannot begin from `due`."""
        new = {uid: each for uid, each in due.items() if not each.in_use}
        if not new:
            return
        try:
            outcome = await self._parts.checkpoint.write(
                [each.claim for each in new.values()], hardware=hardware
            )
        except CheckpointError as error:
            for uid, each in new.items():
                self._refuse(each.work, not_stored(each.claim, error))
                del due[uid]
            return
        for uid, each in new.items():
            if uid in outcome.written:
                each.claim = outcome.written[uid]
                continue
            del due[uid]
            self._refuse(each.work, self._refused(each.claim, outcome))

    def _prepared(
        self, due: _Due, result: Sequence[PreparedDevice] | CallError
    ) -> StoredClaim | ClaimError:
        """Return the prepared claim with its CDI spec, which is created from the driver's
        result."""
        claim = due.claim
        if due.work.abandoned:
            return AbandonedError(claim=str(claim))
        if isinstance(result, DeviceFailedError | EndpointStoppedError):
            return driver_failed(claim, result)
        edits = [each.edits for each in result]
        try:
            mounts: Mapping[int, Mount] = {}
            if claim.metadata or self._parts.devices.traits.metadata_files:
                claim = self._with_metadata(due, result)
                mounts = self._parts.metadata.mounts(claim)
            text = self._parts.specs.build(claim.uid, edits, mounts=mounts)
        except InvalidMetadataError as error:
            return DriverFailedError(claim=str(claim), cause=str(error))
        except InvalidEditsError as error:
            return SpecFailedError(claim=str(claim), cause=str(error))
        devices = claim.devices
        if any(edit.cdi_devices for edit in edits) or any(device.cdi_devices for device in devices):
            devices = tuple(
                replace(device, cdi_devices=tuple(dict.fromkeys(edit.cdi_devices)))
                for device, edit in zip(devices, edits, strict=True)
            )
        nodes = [
            tuple(
                [
                    StoredNode(type=n.type, major=n.major, minor=n.minor, identity=n.identity)
                    for n in edit.device_nodes
                    if n.identity and n.type and n.major is not None and n.minor is not None
                ]
            )
            for edit in edits
        ]
        # Containers keep the device numbers that they were started with.
        former = _nodes(due.former) if due.in_use and due.former is not None else {}
        if former or any(nodes):
            devices = tuple(
                replace(device, nodes=with_former_nodes(new, former.get(_key(device), ())))
                for device, new in zip(devices, nodes, strict=True)
            )
        return replace(claim, state="prepared", cdi_spec=text, devices=devices, rebuilt=None)

    def _with_metadata(self, due: _Due, result: Sequence[PreparedDevice]) -> StoredClaim:
        """Return the claim with the content of its metadata files. Raises InvalidMetadataError."""
        parts, claim = self._parts, due.claim
        if not parts.devices.traits.metadata_files:
            return replace(claim, metadata={})
        devices: list[DeviceMetadata] = []
        for device, prepared in zip(claim.devices, result, strict=True):
            listed = parts.inventories.device(device.pool, device.device)
            attributes = {} if listed is None else published_attributes(listed)
            network = prepared.network_data
            devices.append(
                DeviceMetadata(
                    driver=parts.driver,
                    pool=device.pool,
                    device=device.device,
                    request=device.request,
                    attributes=attributes | attributes_body(prepared.attributes),
                    network_data=None if network is None else network_data_body(network),
                )
            )
        metadata = request_bodies(devices)
        former = due.former
        generation = former.metadata_generation if former is not None else 0
        if former is None or former.metadata != metadata:
            generation += 1
        return replace(claim, metadata=metadata, metadata_generation=generation)

    async def _keep(
        self,
        due: Mapping[str, _Due],
        hardware: Hardware | None,
        rollbacks: asyncio.TaskGroup,
        results: Mapping[str, Sequence[PreparedDevice] | CallError],
    ) -> None:
        """Store the claims that the driver has prepared, write their CDI files, and return the
        results. Roll back the claims that fail."""
        prepared: list[StoredClaim] = []
        for uid, result in results.items():
            due[uid].work.begin_step("checkpoint")
            try:
                made = self._prepared(due[uid], result)
            except Exception:  # a bug must not affect the other claims
                made = self._fault(due[uid].claim)
            if isinstance(made, StoredClaim):
                prepared.append(made)
            else:
                rollbacks.create_task(self._roll_back(due[uid], made))
        try:
            outcome = await self._parts.checkpoint.write(prepared, hardware=hardware, files=True)
        except CheckpointError as error:
            for claim in prepared:
                rollbacks.create_task(self._roll_back(due[claim.uid], not_stored(claim, error)))
            return
        done: list[StoredClaim] = []
        for uid, claim in outcome.written.items():
            if uid in outcome.file_errors:
                continue
            # Check for vanished devices only after the write: from then on, a device that vanishes
            # gets a taint, because a claim holds it.
            if (gone := self._vanished(due[uid])) is None:
                done.append(claim)
            else:
                due[uid].claim = claim
                error = self._device_error(due[uid], gone, DeviceGoneError)
                rollbacks.create_task(self._roll_back(due[uid], error))
        if done:
            logger.info("claims prepared", extra=facts_of(self._parts.driver, done))
        for claim in done:
            former, result = due[claim.uid].former, results[claim.uid]
            # Keep the results only if they contain more than edits. None of these results is an
            # error.
            given = (
                ()
                if isinstance(result, DeviceFailedError | EndpointStoppedError)
                else tuple(result)
            )
            answer = ClaimResult(
                devices=prepared_devices(claim, self._parts.specs),
                prepared=given if any(has_status(e) or e.attributes for e in given) else (),
                had_status=due[claim.uid].work.had_status,
                renumbered=() if former is None else _renumbered(former, claim),
            )
            due[claim.uid].work.finish(answer)
        for claim in prepared:
            each = due[claim.uid]
            if claim.uid in outcome.written and claim.uid not in outcome.file_errors:
                continue
            each.claim = outcome.written.get(claim.uid, each.claim)
            rollbacks.create_task(self._roll_back(each, self._refused(claim, outcome)))

    def _vanished(self, due: _Due) -> StoredDevice | None:
        """Return a device that the driver no longer lists. Return None if the driver is
        unavailable, because its devices are then unknown."""
        parts = self._parts
        if due.in_use or parts.devices.unavailable() is not None:
            return None
        node = parts.node.name if parts.devices.traits.network_devices else None
        hardware = parts.inventories.hardware()
        _, unlisted = with_consumption(due.claim, hardware, node=node, former=None)
        return unlisted or self._gone(due)

    def _gone(self, due: _Due) -> StoredDevice | None:
        """Return a device that is published although the driver no longer lists it. Return None for
        a claim that containers are using, which is always prepared."""
        is_gone = self._parts.inventories.is_gone
        devices = () if due.in_use else due.claim.devices
        return next((each for each in devices if is_gone(each.pool, each.device)), None)

    def _refused(self, claim: StoredClaim, outcome: WriteOutcome) -> ClaimError:
        return refused(claim, outcome, name_all_holders=self._parts.name_all_holders)

    async def _roll_back(self, due: _Due, error: ClaimError) -> None:
        """
        Undo a claim that failed halfway, and then set its error as the result. An abandoned claim
        is undone by the unprepare that is waiting for the work to end. If a claim cannot be undone
        now, its entry remains, and :mod:`.recovery` continues from it.
        """
        due.work.begin_step("undo")
        stored = due.claim.generation > 0 and not due.in_use
        if stored and not isinstance(error, AbandonedError):
            await self.undo_one(due.claim)
        self._refuse(due.work, error)


def _key(device: StoredDevice) -> tuple[str, str, str | None]:
    return device.pool, device.device, device.share_id


def _nodes(claim: StoredClaim) -> dict[tuple[str, str, str | None], tuple[StoredNode, ...]]:
    return {_key(device): device.nodes for device in claim.devices if device.nodes}


def _renumbered(former: StoredClaim, claim: StoredClaim) -> tuple[str, ...]:
    """Return a clause for each device whose number changed while its claim was in use."""
    clauses: list[str] = []
    known = _nodes(former) if former.boot_id == claim.boot_id else {}
    for device in claim.devices:
        before, now = _numbers(known.get(_key(device), ())), _numbers(device.nodes)
        # Compare numbers, not identities: hardware can have several device nodes, some of which
        # keep their numbers, and its identity can change together with a number, for example when
        # firmware is loaded.
        new = [text for text in now if text not in before]
        old = [text for text in before if text not in now]
        if new and old:
            noun = "number" if len(old) == len(new) == 1 else "numbers"
            clauses.append(
                f"the device {noun} of {device.device} changed from {', '.join(old)} to "
                f"{', '.join(new)}"
            )
    return tuple(clauses)


def _numbers(nodes: Sequence[StoredNode]) -> list[str]:
    """Return the current numbers as strings, without duplicates."""
    current = [f"{each.type} {each.major}:{each.minor}" for each in nodes if each.current]
    return list(dict.fromkeys(current))
