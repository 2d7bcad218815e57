"""
Rebuilds the entries that a damaged checkpoint has lost from the sources that still know of them.

    kubelet's podresources   which claims its containers use, with which devices, and with which
                             CDI devices of others
    CDI files                what those containers get
    API server               all the rest of a claim: requests, configs, admin access

A claim that the kubelet lists and the API server confirms is rebuilt in full. Without the API
server's confirmation, its entry has devices and no requests or configs: enough to refuse the
devices to others and to unprepare the claim. The CDI file of a claim that no source names is left
to :mod:`drakit_nodeplugin.claims.cdi_repair`.

The kubelet's calls wait for a rebuild, but nothing here keeps the daemon from starting.
:mod:`.open` decides that entries were lost. It must not know drivers, gRPC or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from drakit.device import ClaimReference
from drakit.driver import Node
from drakit_nodeplugin.claims.allocation import ParameterLimits, device_keys, wanted_claim
from drakit_nodeplugin.claims.cdi_files import ClaimSpecs
from drakit_nodeplugin.claims.checkpoint.records import StoredClaim, StoredDevice
from drakit_nodeplugin.claims.checkpoint.store import Checkpoint, CheckpointError
from drakit_nodeplugin.claims.errors import ClaimError
from drakit_nodeplugin.claims.kubeletview import (
    KubeletClaims,
    KubeletView,
    PodView,
    claim_uid,
    names_of_others,
)
from drakit_nodeplugin.claims.source import ClaimSource
from drakit_nodeplugin.claims.spectexts import SpecTexts
from drakit_nodeplugin.claims.waves import workers
from drakit_nodeplugin.file_poller import FilePoller

__all__ = ("Rebuilder", "Rebuilt")

logger = logging.getLogger(__name__)

REBUILD_SECONDS = 15.0
"""For one attempt: calls of the kubelet wait meanwhile, and have 45 s."""

FETCH_SECONDS = 7.0
"""For the API server's answers on all claims: the kubelet may have taken 5 s before."""

LABELS_SECONDS = 4.0
"""For the node's labels, by which claims may select it."""

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
    """Claims (namespace/name) that are as they were."""

    incomplete: tuple[str, ...] = ()
    """Claims whose devices are known, but not their requests and configs."""

    lost: tuple[str, ...] = ()
    """UIDs of claims that have a CDI file and no name, or whose entry could not be written; names
    of claims whose UID is unknown."""

    error: str | None = None
    """Why it ended early."""

    final: bool = False
    """Whether the kubelet has listed all its pods: if not, a later attempt may find more."""

    partial: bool = False
    """Whether it has listed only some of them, and will list the others later."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Listed:
    """A claim as the kubelet lists it."""

    reference: ClaimReference
    devices: tuple[StoredDevice, ...]
    """In the order of the allocation. Requests and admin access are unknown."""


class Rebuilder:
    """Rebuilds the entries of one driver."""

    def __init__(
        self,
        *,
        driver: str,
        node: Node,
        boot_id: str,
        checkpoint: Checkpoint,
        source: ClaimSource,
        specs: ClaimSpecs,
        texts: SpecTexts,
        kubelet: KubeletView,
        limits: ParameterLimits,
    ) -> None:
        self._driver = driver
        self._limits = limits
        self._node = node
        self._boot_id = boot_id
        self._checkpoint = checkpoint
        self._source = source
        self._specs = specs
        self._texts = texts
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
                # At any time: if a disk was full at the start, the checkpoint is opened later.
                await poller.until(lambda: self._checkpoint.damage is not None)
                continue
            self.damaged = True
            attempts = attempts + 1 if reported == damage else 1
            outcome, final = await self._attempt(last=attempts >= ATTEMPTS)
            # Waiting does not find what this attempt could not find: claims are answered now.
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
                while self._node.labels is None:  # noqa: ASYNC110  (nothing notifies of them)
                    await asyncio.sleep(0.1)
        try:
            rebuilt = await self.rebuild()
            final = rebuilt.final or (last and not rebuilt.partial)
            if final:
                await self._checkpoint.rebuilt()
            return str(rebuilt), final
        except CheckpointError as error:
            return f"it could not be rebuilt: {error}", False
        except Exception as error:
            logger.exception("a rebuild failed", extra={"driver": self._driver})
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
            "checkpoint is rebuilt",
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
        files = await self._specs.present() - known
        listed = {
            uid: claim for uid, claim in _listed(self._driver, claims).items() if uid not in known
        }
        wanted = await self._ask([claim.reference for claim in listed.values()])
        entries: list[StoredClaim] = []
        for uid, claim in listed.items():
            text = await self._texts.read(uid)
            entries.append(self._entry(claim, wanted.get(uid), text))
        written = await self._write(entries)
        unnamed = {uid for uid in files - listed.keys() if await self._texts.read(uid) is not None}
        return Rebuilt(
            complete=tuple(str(entry) for entry in written if entry.rebuilt != "listed"),
            incomplete=tuple(str(entry) for entry in written if entry.rebuilt == "listed"),
            lost=(
                *sorted(unnamed | listed.keys() - {entry.uid for entry in written}),
                *(f"{namespace}/{name}" for namespace, name in sorted(claims.unnamed)),
            ),
            final=claims.pods is PodView.COMPLETE,
            partial=claims.pods is PodView.PARTIAL,
        )

    async def _ask(self, references: Sequence[ClaimReference]) -> Mapping[str, StoredClaim]:
        """Read the claims from the API server; those without an answer that fits are left out."""
        answers: dict[str, StoredClaim] = {}
        line = iter(references)

        async def ask() -> None:
            for reference in line:
                try:
                    answers[reference.uid] = await self._wanted(reference)
                except ClaimError as error:
                    logger.warning(
                        "claim cannot be rebuilt from the API server",
                        extra={
                            "claim": str(reference),
                            "claim_uid": reference.uid,
                            "error": str(error),
                        },
                    )

        try:
            async with asyncio.timeout(FETCH_SECONDS):
                await workers(ask, parallel=_PARALLEL, items=len(references))
        except TimeoutError:
            logger.warning(
                "not all claims could be read for the rebuild", extra={"driver": self._driver}
            )
        return answers

    async def _wanted(self, reference: ClaimReference) -> StoredClaim:
        """Read and check a claim; no reference to it remains, because it can take 20 MiB."""
        return wanted_claim(
            await self._source.fetch(reference, timeout_seconds=FETCH_SECONDS),
            reference=reference,
            driver=self._driver,
            node=self._node.name,
            labels=self._node.labels,
            boot_id=self._boot_id,
            limits=self._limits,
        )

    def _entry(self, listed: _Listed, wanted: StoredClaim | None, text: str | None) -> StoredClaim:
        entry = StoredClaim(
            uid=listed.reference.uid,
            namespace=listed.reference.namespace,
            name=listed.reference.name,
            state="prepared",
            # No source reports whether it was prepared in this boot: the kubelet's list and the
            # CDI directory can outlive a reboot. Its containers may be running, so the entry counts
            # as of this boot; the driver still prepares it again when the kubelet asks.
            boot_id=self._boot_id,
            rebuilt="listed",
            devices=listed.devices,
            cdi_spec=text or None,
        )
        # With other devices than the kubelet lists, the claim was allocated again since.
        if wanted is None or device_keys(wanted.devices) != device_keys(listed.devices):
            return entry
        names = {(d.pool, d.device, d.share_id): d.cdi_devices for d in listed.devices}
        devices = tuple(
            replace(d, cdi_devices=names[d.pool, d.device, d.share_id]) for d in wanted.devices
        )
        return replace(entry, rebuilt="confirmed", devices=devices, configs=wanted.configs)

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


def _listed(driver: str, claims: KubeletClaims) -> dict[str, _Listed]:
    """Return the claims of a driver that containers use, each device once, in order."""
    found: dict[str, _Listed] = {}
    for device in claims.devices:
        for uid in {uid for n in device.cdi_names if (uid := claim_uid(n, driver=driver))}:
            reference = ClaimReference(namespace=device.namespace, name=device.claim, uid=uid)
            before = found.get(uid, _Listed(reference=reference, devices=()))
            stored = StoredDevice(
                pool=device.pool,
                device=device.device,
                request="",
                share_id=device.share_id,
                cdi_devices=names_of_others(device),
            )
            if stored not in before.devices:  # several containers may use the claim
                found[uid] = replace(before, devices=(*before.devices, stored))
    return found
