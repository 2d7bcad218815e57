"""
What the claims engine of one driver is made of, and the small things that its steps share.

It must not know gRPC, HTTP, SQLite, or the format of a CDI file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from drakit.device import AllocatedDevice, ClaimReference, Edits
from drakit.driver import Node
from drakit_nodeplugin.claims.allocation import ParameterLimits
from drakit_nodeplugin.claims.cdi_files import ClaimSpecs
from drakit_nodeplugin.claims.checkpoint.records import StoredClaim
from drakit_nodeplugin.claims.checkpoint.store import Checkpoint, CheckpointError, Outcome
from drakit_nodeplugin.claims.errors import (
    BadParametersFailedError,
    CheckpointFailedError,
    ClaimBusyError,
    ClaimError,
    DeviceTakenError,
    DriverFailedError,
    FaultError,
    OverAllocatedError,
)
from drakit_nodeplugin.claims.source import ClaimSource
from drakit_nodeplugin.devices.hardware import Hardware
from drakit_nodeplugin.devices.model import Revision
from drakit_nodeplugin.endpoints.errors import (
    BadParametersError,
    DeviceFailedError,
    EndpointStoppedError,
)
from drakit_nodeplugin.endpoints.traits import DriverTraits

__all__ = (
    "Devices",
    "EngineParts",
    "Instances",
    "Inventories",
    "driver_failed",
    "error_of",
    "facts_of",
    "foreign_work",
    "not_stored",
    "prepared",
    "reference_of",
    "refused",
)

logger = logging.getLogger(__name__)


class Devices(Protocol):
    """
    The engine's view of a driver. Calls that have a device or a counter set in common never
    overlap.

    Claims whose calls begin in the same turn of the event loop are one batch, for a driver that
    wants batches: the engine must await nothing between them.
    """

    @property
    def traits(self) -> DriverTraits:
        """Which calls the driver needs; known while it is stopped as well."""
        ...

    def away(self) -> EndpointStoppedError | None:
        """Say why the driver cannot be called now; None if it can."""
        ...

    async def prepare(
        self, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> Sequence[Edits]:
        """Make a claim's devices ready; gives the edits of each, in their order. Raises
        DeviceFailedError, EndpointStoppedError once nothing works on any of them any more."""
        ...

    async def unprepare(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> None:
        """Undo it; raises DeviceFailedError, EndpointStoppedError."""
        ...

    async def check(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> bool:
        """Say whether all of them are still in order; raises EndpointStoppedError."""
        ...


class Inventories(Protocol):
    """The engine's view of the device manager."""

    @property
    def revision(self) -> Revision:
        """Advances whenever the hardware may have changed."""
        ...

    def hardware(self) -> Hardware | None:
        """Return the driver's main inventories, whichever is published; None if its devices consume
        only their names."""
        ...


class Instances(Protocol):
    """The processes that serve the driver on this node: two, while one replaces the other."""

    def alone(self) -> bool:
        """Tell whether no other process of the driver was seen lately."""
        ...

    async def works(self, owner: str) -> bool:
        """Tell whether another process that wrote an entry is alive, or may be. Never true of our
        own, and raises nothing."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """The neighbours of one driver's engine."""

    driver: str
    node: Node
    boot_id: str
    checkpoint: Checkpoint
    source: ClaimSource
    devices: Devices
    inventories: Inventories
    specs: ClaimSpecs
    instances: Instances
    limits: ParameterLimits
    name_all_holders: bool = False
    """Whether errors, which the pod's owner reads, name claims of other namespaces."""


def reference_of(claim: StoredClaim) -> ClaimReference:
    """Name a stored claim as drivers and the API know it."""
    return ClaimReference(namespace=claim.namespace, name=claim.name, uid=claim.uid)


def prepared(claim: StoredClaim, edits: Sequence[Edits], *, cdi_spec: str) -> StoredClaim:
    """Give a claim as it is once its driver has answered with edits, which were checked."""
    devices = claim.devices
    if any(edit.cdi_devices for edit in edits) or any(device.cdi_devices for device in devices):
        devices = tuple(
            replace(device, cdi_devices=tuple(dict.fromkeys(edit.cdi_devices)))
            for device, edit in zip(devices, edits, strict=True)
        )
    return replace(claim, state="prepared", cdi_spec=cdi_spec, devices=devices, rebuilt=None)


def driver_failed(
    claim: StoredClaim, cause: DeviceFailedError | EndpointStoppedError
) -> DriverFailedError:
    """Say what of a claim its driver could not handle; the cause is chained."""
    bad = isinstance(cause, BadParametersError)
    index = cause.index if isinstance(cause, DeviceFailedError) else None
    error = (BadParametersFailedError if bad else DriverFailedError)(
        claim=str(claim),
        device=None if index is None else claim.devices[index],
        cause=str(cause),
    )
    error.__cause__ = cause
    return error


async def foreign_work(claim: StoredClaim, instances: Instances) -> ClaimBusyError | None:
    """Say that another process works on a claim, which must be left alone then."""
    if claim.state == "prepared" or not await instances.works(claim.owner):
        return None
    cause = "another instance of the node plugin, which is being replaced, works on it"
    return ClaimBusyError(claim=str(claim), cause=cause)


def not_stored(claim: StoredClaim, error: CheckpointError) -> CheckpointFailedError:
    """Say that a step of a claim could not be stored."""
    return CheckpointFailedError(claim=str(claim), cause=str(error))


def refused(claim: StoredClaim, outcome: Outcome, *, name_all_holders: bool) -> ClaimError:
    """
    Return why a claim was not written.

    Unless `name_all_holders`, a holder in another namespace is named only by its UID.
    """
    held = outcome.held.get(claim.uid)
    if held is None:
        return ClaimBusyError(claim=str(claim), cause="another process changed its entry")
    request, device = held.device.request, held.device.device
    if held.holder is None:
        return OverAllocatedError(
            claim=str(claim), request=request, device=device, shortage=held.shortage or ""
        )
    return DeviceTakenError(
        claim=str(claim),
        request=request,
        device=device,
        holder=_named(held.holder, reader=claim, all_holders=name_all_holders),
        beside=None if held.shortage is None else (held.beside, held.shortage),
    )


def _named(holder: StoredClaim, *, reader: StoredClaim, all_holders: bool) -> str:
    """Return a claim's name for an error that appears in an Event of the reader's namespace."""
    if all_holders or holder.namespace == reader.namespace:
        return str(holder)
    logger.info(
        "a claim waits for a device of a claim in another namespace",
        extra={"claim": str(reader), "claim_uid": reader.uid, "holder": str(holder)},
    )
    return f"{holder.uid} in another namespace"


def error_of(claim: StoredClaim, result: BaseException) -> ClaimError:
    """Give what a work raised as an error of its claim alone; our own stop is raised."""
    if isinstance(result, ClaimError):
        return result
    if not isinstance(result, Exception):
        raise result
    logger.error(
        "work on a claim failed",
        exc_info=result,
        extra={"claim": str(claim), "claim_uid": claim.uid},
    )
    return FaultError(claim=str(claim), cause=result)


def facts_of(driver: str, claims: Iterable[StoredClaim]) -> dict[str, str]:
    """Name claims and their devices in one log line: a line a claim would cost more than its
    transaction."""
    listed = list(claims)
    return {
        "driver": driver,
        "claim": ", ".join(str(claim) for claim in listed),
        "claim_uid": ", ".join(claim.uid for claim in listed),
        "device": ", ".join(device.device for claim in listed for device in claim.devices),
    }
