"""
Rebuilds the entries that a damaged checkpoint has lost from the sources that still have them.

    kubelet's podresources   the claims that containers use, their devices, and the CDI devices of
                             others
    CDI files                the edits of those containers
    API server               the rest of a claim: requests, configs, admin access

A claim that the kubelet lists and the API server confirms is rebuilt in full. Without the API
server's confirmation, its entry has devices and no requests or configs: enough to refuse the
devices to others and to unprepare the claim. The CDI file of a claim that no source names is left
to :mod:`drakit_nodeplugin.claims.recovery`.

The kubelet's calls wait for a rebuild, but nothing here keeps the daemon from starting.
:mod:`.open` decides that entries were lost. It must not know drivers, gRPC or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from drakit_nodeplugin.claims.allocation import device_keys, reference_of, wanted_claim
from drakit_nodeplugin.claims.checkpoint.records import StoredClaim, StoredDevice
from drakit_nodeplugin.claims.checkpoint.store import CheckpointError
from drakit_nodeplugin.claims.errors import ClaimError
from drakit_nodeplugin.claims.kubeletview import (
    KubeletClaims,
    KubeletView,
    PodView,
    claim_uid,
    names_of_others,
)
from drakit_nodeplugin.claims.work import EngineParts, workers
from drakit_nodeplugin.file_poller import FilePoller

__all__ = ("Rebuilder", "Rebuilt")

logger = logging.getLogger(__name__)

REBUILD_SECONDS = 15.0
"""Time limit of one attempt. Calls of the kubelet, which have 45 s, wait for it."""

FETCH_SECONDS = 7.0
"""Time limit for reading all claims from the API server. The kubelet may have taken 5 s before."""

LABELS_SECONDS = 4.0
"""Time limit for reading the node's labels, which node selectors of claims need."""

AGAIN_SECONDS = 60.0
"""Pause after an attempt for which the kubelet did not list all its pods."""

ATTEMPTS = 10
"""After this many attempts, a rebuild ends without an answer of the kubelet, because a site may
deny access to it."""

_PARALLEL = 8
"""Claims that are read at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    """The outcome for the lost entries."""

    complete: tuple[str, ...] = ()
    """Claims (namespace/name) that are fully restored."""

    incomplete: tuple[str, ...] = ()
    """Claims whose devices are known, but not their requests and configs."""

    lost: tuple[str, ...] = ()
    """UIDs of claims that have a CDI file and no name, or whose entry could not be written; names
    of claims whose UID is unknown."""

    error: str | None = None
    """The reason why the rebuild ended early; None if it did not."""

    pods: PodView = PodView.UNKNOWN
    """The completeness of the kubelet's pod list. If pods are missing, a later attempt may find
    more."""

    def __str__(self) -> str:
        parts = [
            f"{_claims(self.complete)} rebuilt" if self.complete else "",
            f"{_claims(self.incomplete)} rebuilt without the API server" if self.incomplete else "",
            f"{_claims(self.lost)} lost" if self.lost else "",
            self.error or "",
        ]
        return ", ".join(filter(None, parts)) or "no claim was lost"


def _claims(found: Collection[str]) -> str:
    return f"{len(found)} claim{'' if len(found) == 1 else 's'}"


class Rebuilder:
    """Rebuilds the entries of one driver."""

    def __init__(self, parts: EngineParts, *, kubelet: KubeletView) -> None:
        self._parts = parts
        self._driver = parts.driver
        self._checkpoint = parts.checkpoint
        self._kubelet = kubelet
        self.damaged = False
        """Whether entries were lost since the start."""

    async def run(
        self,
        poller: FilePoller,
        *,
        rebuilt: asyncio.Event,
        report: Callable[[str, str], None],
    ) -> None:
        """
        Rebuild whenever entries were lost; then set the event for which claims wait.

        `report` gets each damage once, with the outcome of the first attempt.
        """
        reported: str | None = None
        attempts = 0
        while True:
            damage = self._checkpoint.damage
            if damage is None:
                rebuilt.clear()
                # Entries can be lost at any time: after a full disk, the checkpoint opens late.
                await poller.until(lambda: self._checkpoint.damage is not None)
                continue
            self.damaged = True
            attempts = attempts + 1 if reported == damage else 1
            outcome, final = await self._attempt(last=attempts >= ATTEMPTS)
            # Waiting cannot improve the result, so claims are answered now.
            rebuilt.set()
            if reported != damage:
                reported = damage
                report(damage, outcome)
            if not final:
                await asyncio.sleep(AGAIN_SECONDS)

    async def _attempt(self, *, last: bool) -> tuple[str, bool]:
        """Rebuild once; return the outcome, and whether no later attempt can find more."""
        with contextlib.suppress(TimeoutError):
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
        except Exception as error:
            logger.exception("checkpoint rebuild failed", extra={"driver": self._driver})
            return f"it could not be rebuilt: {type(error).__name__}", False

    async def rebuild(self) -> Rebuilt:
        """Write the entries that the sources know; existing entries stay as they are."""
        try:
            async with asyncio.timeout(REBUILD_SECONDS):
                rebuilt = await self._rebuild()
        except TimeoutError:
            rebuilt = Rebuilt(error=f"it took longer than {REBUILD_SECONDS:g} s")
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
        read = self._parts.specs.read
        listed = {
            entry.uid: replace(entry, cdi_spec=await asyncio.to_thread(read, entry.uid) or None)
            for entry in _listed(claims, driver=self._driver, boot_id=self._parts.boot_id)
            if entry.uid not in known
        }
        confirmed = await self._confirm(listed.values())
        written = await self._write([*(listed | confirmed).values()])
        return Rebuilt(
            complete=tuple(str(entry) for entry in written if entry.rebuilt != "listed"),
            incomplete=tuple(str(entry) for entry in written if entry.rebuilt == "listed"),
            lost=(
                *sorted((files | listed.keys()) - {entry.uid for entry in written}),
                *(f"{namespace}/{name}" for namespace, name in sorted(claims.unnamed)),
            ),
            pods=claims.pods,
        )

    async def _confirm(self, listed: Collection[StoredClaim]) -> dict[str, StoredClaim]:
        """Read the claims from the API server; return the entries that it confirms."""
        confirmed: dict[str, StoredClaim] = {}
        line = iter(listed)

        async def confirm() -> None:
            for entry in line:
                try:
                    wanted = await self._wanted(entry)
                except ClaimError as error:
                    logger.warning(
                        "claim cannot be rebuilt from the API server",
                        extra={
                            "claim": str(entry),
                            "claim_uid": entry.uid,
                            "error": str(error),
                        },
                    )
                    continue
                # With other devices than the kubelet lists, the claim was allocated again since.
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
        """Read and check a claim; no reference to it remains, because it can take 20 MiB."""
        reference = reference_of(entry)
        return wanted_claim(
            await self._parts.source.fetch(reference, timeout_seconds=FETCH_SECONDS),
            reference=reference,
            driver=self._driver,
            node=self._parts.node.name,
            labels=self._parts.node.labels,
            boot_id=self._parts.boot_id,
            limits=self._parts.limits,
        )

    async def _write(self, entries: Sequence[StoredClaim]) -> list[StoredClaim]:
        """Write the entries; return those that are then in the checkpoint."""
        # Confirmed claims come first, then shares, which the kubelet lists as such: of two claims
        # with one device, the other one must have it for admin access.
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
        # Another process has written these in the meantime.
        known = await self._checkpoint.find([*outcome.fenced, *second.fenced])
        return [*outcome.written.values(), *second.written.values(), *known.values()]


def _uncertainty(entry: StoredClaim) -> int:
    """Rank an entry by how little is known of its holds."""
    if entry.rebuilt == "confirmed":
        return 0
    return 1 if any(device.share_id is not None for device in entry.devices) else 2


def _confirmed(entry: StoredClaim, wanted: StoredClaim) -> StoredClaim:
    """Complete an entry with what the API server knows; only the kubelet knows the CDI names."""
    names = {(d.pool, d.device, d.share_id): d.cdi_devices for d in entry.devices}
    devices = tuple(
        replace(d, cdi_devices=names[d.pool, d.device, d.share_id]) for d in wanted.devices
    )
    return replace(entry, rebuilt="confirmed", devices=devices, configs=wanted.configs)


def _listed(claims: KubeletClaims, *, driver: str, boot_id: str) -> list[StoredClaim]:
    """Return the claims of a driver that containers use, each device once, in the order of the
    allocation. Requests and admin access are unknown."""
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
                # No source reports whether it was prepared in this boot: the kubelet's list and
                # the CDI directory can outlive a reboot. Its containers may be running, so the
                # entry counts as of this boot; the driver still prepares it again when the
                # kubelet asks.
                boot_id=boot_id,
                rebuilt="listed",
                devices=(),
            )
            if stored not in entry.devices:  # several containers may use the claim
                found[uid] = replace(entry, devices=(*entry.devices, stored))
    return list(found.values())
