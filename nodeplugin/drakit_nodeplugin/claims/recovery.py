"""
Recovery: finishes work that a crash interrupted, and repairs CDI files that do not match the
checkpoint.

**Unfinished claims.** A `preparing` entry without work in flight is undone: the kubelet did not get
a response for it, and calls again if it still needs the claim. An `unpreparing` entry is finished.
Both wait if the driver is unavailable. Recovery finds such entries at startup, and within a few
seconds after any write.

**Lost and outdated CDI files.** A running kubelet does not request a claim again that it considers
prepared, so a deleted file would cause an error only when a container restarts. The plugin restores
such a file within 2 s: it compares files and entries whenever the directory has changed. At
startup, it also compares the contents, because a second prepare stores the new row before it writes
the new file. The same applies to metadata files.

**Orphaned CDI files.** An entry is written before its file and deleted after it, so a file without
an entry shows that entries were lost. The containers of its claim may be running, so the plugin
removes the file only after a grace period during which no check has found the claim in use. Files
of other programs are never removed.

**Lost entries.** After the checkpoint was damaged, :class:`Rebuilder` restores the entries from the
sources that still contain them:

    kubelet's podresources   the claims that containers use, their devices, and the CDI devices of
                             others
    CDI files                the edits of those containers, and the device numbers in them
    API server               the rest of a claim: requests, configs, admin access

A claim that the kubelet lists and the API server confirms is rebuilt in full. Without the API
server's confirmation, its entry contains devices, but no requests or configs. This is sufficient to
keep other claims from getting the devices, and to unprepare the claim. The kubelet's calls wait for
a rebuild, but a rebuild never prevents the daemon from starting.
:mod:`drakit_nodeplugin.state.quarantine` decides whether entries were lost.

:mod:`.unprepare` undoes a claim; :mod:`.stale` decides whether a prepared claim is still needed;
:mod:`drakit_nodeplugin.state.cdi_files` reads and writes files. The module does not depend on
drivers, HTTP or gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import orjson

from drakit_formats.resource.objects import Object, children
from drakit_nodeplugin.changes import FilePoller, FileWatch
from drakit_nodeplugin.claims.allocation import device_keys, wanted_claim
from drakit_nodeplugin.claims.kubelet_claims import (
    KubeletClaims,
    KubeletClaimView,
    Unclaimed,
    names_of_others,
)
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.claims.unprepare import Undone
from drakit_nodeplugin.claims.work import ClaimDependencies, workers
from drakit_nodeplugin.config import StaleClaims
from drakit_nodeplugin.state.cdi_files import claim_uid
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from drakit_nodeplugin.state.podresources import PodView
from drakit_nodeplugin.state.records import State, StoredClaim, StoredDevice, StoredNode

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 5.0
"""Time between two checks. A driver that has stopped is restarted after one second to one
minute."""

BATCH = 200
"""Number of files to write at a time. The contents of all these files are in memory."""

TICK_SECONDS = 0.05
"""Two changes within this time may have the same timestamp. The value exceeds the longest tick of
common kernels (10 ms)."""


class Recovery:
    """Finishes the entries of one driver that have no work in flight."""

    def __init__(self, *, checkpoint: Checkpoint, queue: ClaimQueue) -> None:
        self._checkpoint = checkpoint
        self._queue = queue
        self._logged: set[str] = set()
        """The UIDs of claims whose failure has been logged. It is not logged again until the claim
        has succeeded."""

        self._failed: set[str] = set()
        """The UIDs of claims that failed although the driver was available. Each is retried
        separately. If a driver takes claims in batches, it returns one response for all of them, so
        a claim that hangs would block the others."""

        self._left = True
        """Whether the last check left unfinished entries or failed."""

    async def recover(self) -> int:
        """Check once. Return the number of entries that are still unfinished."""
        left: dict[str, StoredClaim] = {}
        undone = 0
        for state in ("preparing", "unpreparing"):
            claims = {claim.uid: claim for claim in await self._checkpoint.in_state(state)}
            left |= claims
            alone = [[uid] for uid in sorted(claims.keys() & self._failed)]
            together = sorted(claims.keys() - self._failed)
            for uids in (together, *alone) if together else alone:
                for uid, result in (await self._undo(uids, state)).items():
                    self._log(claims[uid], result)
                    undone += result.error is None
                    if result.error is not None and not result.waiting:
                        self._failed.add(uid)
        self._logged &= left.keys()
        self._failed &= left.keys()
        return len(left) - undone

    async def _undo(self, uids: Collection[str], state: State) -> Mapping[str, Undone]:
        """Undo entries. After an unexpected error, retry each entry separately."""
        try:
            return await self._queue.undo_left(uids, state=state)
        except CheckpointError:
            raise
        except Exception:  # a bug must not affect the other entries
            logger.exception("unfinished claims not undone", extra={"claim_uid": ", ".join(uids)})
            self._failed.update(uids)
            return {}

    async def run(self) -> None:
        """
        Check periodically while any entry is unfinished, and after each write. Log failed checks.

        A check does not wait for the previous one, which may hang in a driver for minutes, holding
        the turns of its claims.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                seen, self._left = self._checkpoint.revision.number, True
                group.create_task(self._check())
                await asyncio.sleep(PERIOD_SECONDS)
                if not self._left and self._checkpoint.revision.number == seen:
                    await self._checkpoint.revision.after(seen)
                    await asyncio.sleep(PERIOD_SECONDS)

    async def _check(self) -> None:
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
    """Restores lost CDI files of one driver's prepared claims."""

    def __init__(
        self,
        parts: ClaimDependencies,
        *,
        directory: Path,
        queue: ClaimQueue,
        on_restored: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._checkpoint = parts.checkpoint
        self._specs = parts.specs
        self._metadata = parts.metadata
        self._boot_id = parts.boot_id
        self._queue = queue
        self._on_restored = on_restored
        self._watch = FileWatch(directory, parts.metadata.directory, settled_seconds=TICK_SECONDS)
        self._missing = False
        """Whether the last comparison found a missing file or failed."""

    async def restore(self, *, compare: bool = False) -> int:
        """
        Write the missing files, and return how many were written. If `compare` is set, also replace
        files whose content does not match their row.

        Restores only the files of claims that were prepared in this boot. After a reboot, the
        devices must be prepared again first, at the kubelet's request.
        """
        prepared = await self._checkpoint.uids(state="prepared", boot_id=self._boot_id)
        missing = prepared - await asyncio.to_thread(self._specs.uids)
        unreadable: OSError | None = None
        try:
            missing |= prepared & await asyncio.to_thread(self._metadata.missing)
        except OSError as error:
            unreadable = error  # still restore the files of claims without metadata
        if compare:
            missing |= await self._outdated(prepared - missing)
        self._missing = bool(missing)
        restored = 0
        # Skip claims with work in flight, because their files are not lost.
        with _free(self._queue, missing) as uids:
            for start in range(0, len(uids), BATCH):
                restored += await self._restore(uids[start : start + BATCH])
        self._on_restored(restored)
        if unreadable is not None:
            raise unreadable
        return restored

    async def clean(self) -> None:
        """
        Remove half-written files, and metadata files that have neither an entry nor a CDI file.
        Call this before any work on claims. Raises CheckpointError, OSError.

        Such metadata files remain if entries are lost and the node reboots. Containers cannot
        access them, but nothing else would remove them.
        """
        await asyncio.to_thread(self._specs.clean)
        needed = await self._checkpoint.uids() | await asyncio.to_thread(self._specs.uids)
        await asyncio.to_thread(self._metadata.clean, needed)

    async def _outdated(self, uids: Collection[str]) -> set[str]:
        """Return the claims whose file does not match their row."""
        outdated: set[str] = set()
        ordered = sorted(uids)
        for start in range(0, len(ordered), BATCH):
            found = await self._checkpoint.find(ordered[start : start + BATCH])
            outdated |= await asyncio.to_thread(self._differing, [*found.values()])
        return outdated

    def _differing(self, claims: Collection[StoredClaim]) -> set[str]:
        differing: set[str] = set()
        for claim in claims:
            if not claim.cdi_spec:
                continue
            try:
                same = self._specs.read(claim.uid) == claim.cdi_spec
            except OSError:
                # Treat the file as outdated: the write reports the problem, for this claim only.
                same = False
            if not same or self._metadata.differs(claim):
                differing.add(claim.uid)
        return differing

    async def _restore(self, uids: Sequence[str]) -> int:
        found = (await self._checkpoint.find(uids)).values()
        lost = {c.uid: c for c in found if c.state == "prepared" and c.cdi_spec is not None}
        outcome = await self._checkpoint.confirm(lost.values())
        for uid in outcome.written:
            facts = {"claim": str(lost[uid]), "claim_uid": uid}
            if (error := outcome.file_errors.get(uid)) is not None:
                logger.error("CDI file not restored", extra=facts | {"error": str(error)})
            else:
                logger.warning("lost or outdated CDI file restored", extra=facts)
        return len(outcome.written) - len(outcome.file_errors)

    async def run(self, poller: FilePoller) -> None:
        """Until canceled, compare whenever the directory has changed. Log and retry failed
        comparisons."""
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
        parts: ClaimDependencies,
        *,
        queue: ClaimQueue,
        kubelet: KubeletClaimView,
        settings: StaleClaims,
    ) -> None:
        self._driver = parts.driver
        self._checkpoint = parts.checkpoint
        self._specs = parts.specs
        self._queue = queue
        self._kubelet = kubelet
        self._settings = settings
        self._unclaimed: dict[str, Unclaimed] = {}
        """The grace periods of files without an entry, keyed by UID."""

    async def poll(self) -> int:
        """
        Remove the files whose grace period has ended, and return how many were removed.

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
        due = {uid for uid, each in self._unclaimed.items() if each.due(claims, self._settings)}
        with _free(self._queue, due) as uids:
            return sum([await self._remove(uid) for uid in uids])

    async def _remove(self, uid: str) -> bool:
        # An unreadable file may belong to another program.
        with suppress(OSError):
            if await asyncio.to_thread(self._specs.read, uid) is not None:
                return await self._clear(uid)
        return False

    async def _clear(self, uid: str) -> bool:
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
    """Take the turns of the claims without work in flight, and yield their UIDs."""
    held = [uid for uid in sorted(uids) if queue.take(uid)]
    try:
        yield held
    finally:
        for uid in held:
            queue.release(uid)


# ---------------------------------------------------------------- lost entries

REBUILD_SECONDS = 15.0
"""Time limit for one attempt to rebuild. The kubelet's calls, which have a timeout of 45 s, wait
for it."""

FETCH_SECONDS = 7.0
"""Time limit for reading all claims from the API server. The query to the kubelet that precedes it
can take 5 s."""

LABELS_SECONDS = 4.0
"""Time limit for reading the node's labels, which node selectors of claims need."""

AGAIN_SECONDS = 60.0
"""Pause after an attempt that is not final, for example because the kubelet did not list all of its
pods."""

ATTEMPTS = 10
"""Maximum number of attempts without a response from the kubelet. A site may deny access to the
kubelet."""

_PARALLEL = 8
"""Number of claims to read concurrently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    """The outcome of a rebuild."""

    complete: tuple[str, ...] = ()
    """The claims (namespace/name) that were fully restored."""

    incomplete: tuple[str, ...] = ()
    """The claims whose devices are known, but whose requests and configs are not."""

    lost: tuple[str, ...] = ()
    """The UIDs of claims that have a CDI file but whose name is unknown, or whose entry could not
    be written, and the names of claims whose UID is unknown."""

    error: str | None = None
    """The reason why the rebuild ended early, or None."""

    pods: PodView = PodView.UNKNOWN
    """Whether the kubelet's pod list was complete. If not, a later attempt may find more claims."""

    def __str__(self) -> str:
        parts = [
            f"{_number_of_claims(self.complete)} rebuilt" if self.complete else "",
            f"{_number_of_claims(self.incomplete)} rebuilt without the API server"
            if self.incomplete
            else "",
            f"{_number_of_claims(self.lost)} lost" if self.lost else "",
            self.error or "",
        ]
        return ", ".join(filter(None, parts)) or "no claim was lost"


def _number_of_claims(found: Collection[str]) -> str:
    return f"{len(found)} claim{'' if len(found) == 1 else 's'}"


class Rebuilder:
    """Rebuilds the lost entries of one driver."""

    def __init__(self, parts: ClaimDependencies, *, kubelet: KubeletClaimView) -> None:
        self._parts = parts
        self._driver = parts.driver
        self._checkpoint = parts.checkpoint
        self._kubelet = kubelet
        self.damaged = False
        """Whether entries have been lost since startup."""

    async def run(
        self,
        poller: FilePoller,
        *,
        rebuilt: asyncio.Event,
        report: Callable[[str, str], None],
    ) -> None:
        """
        Rebuild whenever entries have been lost, and then set the event that claims wait for.

        `report` is called once for each damage, with the outcome of the first attempt.
        """
        reported: str | None = None
        attempts = 0
        while True:
            damage = self._checkpoint.damage
            if damage is None:
                rebuilt.clear()
                # Entries can be lost at any time, for example if the checkpoint opens late because
                # the disk was full.
                await poller.until(lambda: self._checkpoint.damage is not None)
                continue
            self.damaged = True
            attempts = attempts + 1 if reported == damage else 1
            outcome, final = await self._attempt(last=attempts >= ATTEMPTS)
            # Let the claims continue now, because waiting longer cannot improve the result.
            rebuilt.set()
            if reported != damage:
                reported = damage
                report(damage, outcome)
            if not final:
                await asyncio.sleep(AGAIN_SECONDS)

    async def _attempt(self, *, last: bool) -> tuple[str, bool]:
        """Rebuild once. Return the outcome, and whether it is final: a later attempt would not find
        more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LABELS_SECONDS):
                while self._parts.node.labels is None:  # noqa: ASYNC110  (nothing notifies of them)
                    await asyncio.sleep(0.1)
        try:
            rebuilt = await self.rebuild()
            final = rebuilt.pods is PodView.COMPLETE or (last and rebuilt.pods is PodView.UNKNOWN)
            if final:
                await self._checkpoint.rebuilt()
            return str(rebuilt), final
        except CheckpointError as error:
            return f"it could not be rebuilt: {error}", False
        except Exception:
            logger.exception("checkpoint rebuild failed", extra={"driver": self._driver})
            why = "an internal error of the node plugin; see its log on this node"
            return f"it could not be rebuilt: {why}", False

    async def rebuild(self) -> Rebuilt:
        """Write the entries found in the sources. Existing entries remain unchanged."""
        try:
            async with asyncio.timeout(REBUILD_SECONDS):
                rebuilt = await self._rebuild()
        except TimeoutError:
            rebuilt = Rebuilt(error=f"the rebuild took longer than {REBUILD_SECONDS:g} s")
        except (CheckpointError, OSError) as error:
            rebuilt = Rebuilt(error=str(error))
        logger.warning(
            "checkpoint rebuilt",
            extra={
                "driver": self._driver,
                "complete": len(rebuilt.complete),
                "incomplete": ", ".join(rebuilt.incomplete),
                "lost": ", ".join(rebuilt.lost),
                "error": rebuilt.error,
            },
        )
        return rebuilt

    async def _rebuild(self) -> Rebuilt:
        claims = await self._kubelet.listed()
        known = await self._checkpoint.uids()
        files = await self._checkpoint.orphans()
        listed = {
            entry.uid: replace(entry, cdi_spec=await asyncio.to_thread(self._read, entry.uid))
            for entry in _listed(claims, driver=self._driver, boot_id=self._parts.boot_id)
            if entry.uid not in known
        }
        confirmed = await self._confirm(listed.values())
        written = await self._write([*map(_with_numbers, (listed | confirmed).values())])
        return Rebuilt(
            complete=tuple(str(entry) for entry in written if entry.rebuilt != "listed"),
            incomplete=tuple(str(entry) for entry in written if entry.rebuilt == "listed"),
            lost=(
                *sorted((files | listed.keys()) - {entry.uid for entry in written}),
                *(f"{namespace}/{name}" for namespace, name in sorted(claims.unnamed)),
            ),
            pods=claims.pods,
        )

    def _read(self, uid: str) -> str | None:
        """Return the content of a claim's CDI file, or None if it cannot be read."""
        try:
            return self._parts.specs.read(uid) or None
        except OSError as error:
            facts = {"driver": self._driver, "claim_uid": uid, "error": str(error)}
            logger.warning("CDI file cannot be read for the rebuild", extra=facts)
            return None

    async def _confirm(self, listed: Collection[StoredClaim]) -> dict[str, StoredClaim]:
        """Read the claims from the API server, and return the entries that it confirms, keyed by
        UID."""
        confirmed: dict[str, StoredClaim] = {}
        line = iter(listed)

        async def confirm() -> None:
            for entry in line:
                try:
                    wanted = await self._wanted(entry)
                # a bug must not affect the other claims
                except Exception as error:
                    logger.warning(
                        "claim cannot be rebuilt from the API server",
                        extra={
                            "claim": str(entry),
                            "claim_uid": entry.uid,
                            "error": str(error),
                        },
                    )
                    continue
                # If the devices differ from those in the kubelet's list, the claim has since been
                # reallocated.
                if device_keys(wanted.devices) == device_keys(entry.devices):
                    confirmed[entry.uid] = _confirmed(entry, wanted)

        try:
            async with asyncio.timeout(FETCH_SECONDS):
                await workers(confirm, parallel=_PARALLEL, items=len(listed))
        except TimeoutError:
            logger.warning(
                "not all claims could be read for the rebuild", extra={"driver": self._driver}
            )
        return confirmed

    async def _wanted(self, entry: StoredClaim) -> StoredClaim:
        """Read and check a claim. Keep no reference to the claim object, which can take 20 MiB."""
        reference = entry.reference
        return wanted_claim(
            await self._parts.source.fetch(reference, timeout_seconds=FETCH_SECONDS),
            reference=reference,
            driver=self._driver,
            node=self._parts.node.name,
            labels=self._parts.node.labels,
            boot_id=self._parts.boot_id,
            limits=self._parts.limits,
            data=self._parts.devices.traits.claim_data,
        )

    async def _write(self, entries: Sequence[StoredClaim]) -> list[StoredClaim]:
        """Write the entries. Return the entries that are in the checkpoint afterwards."""
        # Write confirmed claims first, and then claims that the kubelet lists with shares. If two
        # claims then have the same device, the claim whose write is refused must have admin access.
        ordered = sorted(entries, key=_uncertainty)
        outcome = await self._checkpoint.write(ordered)
        beside = [
            replace(
                entry,
                devices=tuple(replace(device, admin_access=True) for device in entry.devices),
            )
            for entry in ordered
            if entry.uid in outcome.held and entry.rebuilt == "listed"
        ]
        second = await self._checkpoint.write(beside)
        # These entries have been written by calls from the kubelet in the meantime.
        known = await self._checkpoint.find([*outcome.changed, *second.changed])
        return [*outcome.written.values(), *second.written.values(), *known.values()]


def _uncertainty(entry: StoredClaim) -> int:
    """Return how uncertain the holds of an entry are, as a sort key."""
    if entry.rebuilt == "confirmed":
        return 0
    return 1 if any(device.share_id is not None for device in entry.devices) else 2


def _confirmed(entry: StoredClaim, wanted: StoredClaim) -> StoredClaim:
    """Complete an entry with data from the API server. Only the kubelet has the CDI names."""
    names = {(d.pool, d.device, d.share_id): d.cdi_devices for d in entry.devices}
    devices = tuple(
        replace(d, cdi_devices=names[d.pool, d.device, d.share_id]) for d in wanted.devices
    )
    return replace(
        entry,
        rebuilt="confirmed",
        devices=devices,
        configs=wanted.configs,
        data=wanted.data,
        pod_claim_name=wanted.pod_claim_name,
    )


def _with_numbers(entry: StoredClaim) -> StoredClaim:
    """Add the device numbers in the CDI file, which lists devices in the order of the allocation.
    If the file and the entry do not have the same number of devices, because the kubelet lists only
    some of them, the first device gets all device numbers."""
    if not entry.cdi_spec or not entry.devices:
        return entry
    try:
        found = [
            [_node(node) for node in children(device, "containerEdits", "deviceNodes")]
            for device in children(orjson.loads(entry.cdi_spec), "devices")
        ]
    except (AttributeError, TypeError, ValueError):
        return entry  # container runtimes cannot read the file either
    if len(found) != len(entry.devices):
        found = [[*chain.from_iterable(found)], *([] for _ in entry.devices[1:])]
    devices = [
        replace(device, nodes=tuple(filter(None, nodes)))
        for device, nodes in zip(entry.devices, found, strict=True)
    ]
    return replace(entry, devices=tuple(devices))


def _node(node: Object) -> StoredNode | None:
    kind, major, minor = node.get("type"), node.get("major"), node.get("minor")
    if kind in ("b", "c") and isinstance(major, int) and isinstance(minor, int):
        return StoredNode(type=kind, major=major, minor=minor, identity="")
    return None


def _listed(claims: KubeletClaims, *, driver: str, boot_id: str) -> list[StoredClaim]:
    """Return a driver's claims that are in use by containers. Each device occurs once, in the order
    of the allocation. Requests and admin access are unknown."""
    found: dict[str, StoredClaim] = {}
    for device in claims.devices:
        stored = StoredDevice(
            pool=device.pool,
            device=device.device,
            request="",
            share_id=device.share_id,
            cdi_devices=names_of_others(device),
        )
        for uid in {uid for n in device.cdi_names if (uid := claim_uid(n, driver=driver))}:
            entry = found.get(uid) or StoredClaim(
                uid=uid,
                namespace=device.namespace,
                name=device.claim,
                state="prepared",
                # No source shows whether the claim was prepared in this boot: the kubelet's list
                # and the CDI directory can outlive a reboot. Use the current boot ID, because its
                # containers may be running. The driver still prepares the claim again when the
                # kubelet requests it.
                boot_id=boot_id,
                rebuilt="listed",
                devices=(),
            )
            if stored not in entry.devices:  # several containers may use the claim
                found[uid] = replace(entry, devices=(*entry.devices, stored))
    return list(found.values())
