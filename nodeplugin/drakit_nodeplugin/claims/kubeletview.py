"""
What the kubelet says of claims: which of a driver's claims its containers use.

The kubelet is asked before anything of a claim is taken away without its call, and after damage of
the checkpoint it names what is lost. It lists a claim by name; the UID is in the CDI names that we
gave it. What it does *not* list need not be free: it leaves out claims that no container names,
those of init containers, and those of a container with another claim that is not prepared yet. A
kubelet that has just started serves its list before it has read its pods, and adds them one by one.
So a list can always keep a claim, but only a complete list confirms that a claim is stale.

It must not know how the kubelet is asked, or gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from drakit_nodeplugin.claims.checkpoint.records import StoredClaim

__all__ = (
    "KubeletClaims",
    "KubeletView",
    "ListedDevice",
    "PodView",
    "claim_uid",
    "kubelet_claims",
    "names_of_others",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedDevice:
    """A device that a container has by a claim, as the kubelet lists it."""

    namespace: str
    """The claim's."""

    claim: str
    """The claim's name."""

    driver: str
    pool: str
    device: str
    share_id: str | None
    cdi_names: tuple[str, ...]
    """Qualified CDI names. The kubelet adds those of the driver's devices that stand before it in
    the same claim."""


class PodView(Enum):
    """How many of the node's pods a list of the kubelet contains."""

    COMPLETE = "complete"
    """All: the list contains the node plugin's own pod."""

    PARTIAL = "partial"
    """The kubelet has answered without our own pod: it has not read its pods yet, so a missing
    claim proves nothing, however long that lasts."""

    UNKNOWN = "unknown"
    """There is no answer, or the node plugin does not run in a pod. A claim that is listed anyway,
    for example in the kubelet's state file, is in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubeletClaims:
    """The claims of one driver that the kubelet holds as used."""

    devices: tuple[ListedDevice, ...] = ()
    """What its containers have of the driver."""

    uids: frozenset[str] = frozenset()
    """Claims by their UID."""

    unnamed: frozenset[tuple[str, str]] = frozenset()
    """Namespace and name of listed claims whose UID nothing tells."""

    pods: PodView = PodView.UNKNOWN
    """Whether a claim that is missing here is unused."""

    asked_at: float = 0.0
    """When the kubelet was asked; loop clock. Two checks of one answer count as one."""

    def holds(self, claim: StoredClaim) -> bool:
        """Tell whether a claim is listed. One of the same name with another UID is another one."""
        return claim.uid in self.uids or (claim.namespace, claim.name) in self.unnamed


class KubeletView(Protocol):
    """The kubelet, as far as claims are its business."""

    async def listed(self) -> KubeletClaims:
        """Return the claims of the driver that are in use."""
        ...


def claim_uid(cdi_name: str, *, driver: str) -> str | None:
    """Find the claim of a CDI name that we gave; None if it is not one of ours."""
    kind, _, device = cdi_name.partition("=")
    uid, _, index = device.rpartition("-")
    return uid if kind == f"{driver}/claim" and uid and index.isdigit() else None


def names_of_others(device: ListedDevice) -> tuple[str, ...]:
    """Find the CDI names that a device has beside ours: in an answer they stand after it, and what
    the kubelet adds of other devices stands before it."""
    names = device.cdi_names
    ours = [i for i, name in enumerate(names) if claim_uid(name, driver=device.driver) is not None]
    return names[ours[-1] + 1 :] if ours else ()


def kubelet_claims(
    driver: str,
    devices: Iterable[ListedDevice],
    *,
    uids: Iterable[str] = (),
    pods: PodView,
    asked_at: float = 0.0,
) -> KubeletClaims:
    """Put together what containers have of a driver, and claims that are known by UID alone."""
    ours = tuple(device for device in devices if device.driver == driver)
    found = set(uids)
    unnamed: set[tuple[str, str]] = set()
    for listed in ours:
        of_device = {claim_uid(name, driver=driver) for name in listed.cdi_names} - {None}
        found |= {uid for uid in of_device if uid is not None}
        if not of_device:
            unnamed.add((listed.namespace, listed.claim))
    return KubeletClaims(
        devices=ours,
        uids=frozenset(found),
        unnamed=frozenset(unnamed),
        pods=pods,
        asked_at=asked_at,
    )
