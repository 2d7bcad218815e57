"""
The kubelet's view of claims: the claims that its containers use, and the conclusions that its lists
allow.

The kubelet is asked before a claim or file is removed without its call, and after damage of the
checkpoint it names what was lost. It lists a claim by name; the UID is in the CDI names that we
gave it. An unlisted claim may still be in use: the list omits claims that no container names, those
of init containers, and those of a container with another claim that is not prepared yet. A kubelet
that has just started serves its list before it has read its pods, and adds them one by one. So any
list can show that a claim is in use. Only complete lists show that it is unused, and only if they
agree for a grace period (:class:`Grace`).

:mod:`drakit_nodeplugin.kubelet` calls the kubelet; :mod:`.stale` and :mod:`.recovery` decide what
happens at the end of a grace period. It must not know gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from drakit_nodeplugin.claims.checkpoint.records import StoredClaim

__all__ = (
    "Grace",
    "KubeletClaims",
    "KubeletView",
    "ListedDevice",
    "PodView",
    "Unclaimed",
    "claim_uid",
    "kubelet_claims",
    "names_of_others",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedDevice:
    """A device that a container has by a claim, as the kubelet lists it."""

    namespace: str
    """Namespace of the claim."""

    claim: str
    """Name of the claim."""

    driver: str
    pool: str
    device: str
    share_id: str | None
    cdi_names: tuple[str, ...]
    """Qualified CDI names, including those of the driver's devices that precede it in the claim."""


class PodView(Enum):
    """The completeness of a pod list of the kubelet."""

    COMPLETE = "complete"
    """The list contains the node plugin's own pod, and therefore all pods of the node."""

    PARTIAL = "partial"
    """The kubelet has answered without our own pod: it has not read its pods yet, so a missing
    claim proves nothing, however long that lasts."""

    UNKNOWN = "unknown"
    """There is no answer, or the node plugin does not run in a pod. A claim that is listed anyway,
    for example in the kubelet's state file, is in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubeletClaims:
    """The claims of one driver that the kubelet lists as used."""

    devices: tuple[ListedDevice, ...] = ()
    """The driver's devices of its containers."""

    uids: frozenset[str] = frozenset()

    unnamed: frozenset[tuple[str, str]] = frozenset()
    """Namespace and name of listed claims whose UID is unknown."""

    pods: PodView = PodView.UNKNOWN
    """Whether a claim that is missing here is unused."""

    asked_at: float = 0.0
    """Time of the kubelet's answer; loop clock. Two checks of one answer count as one."""

    def holds(self, claim: StoredClaim) -> bool:
        """Return whether a claim is listed. A claim of the same name with another UID is not."""
        return claim.uid in self.uids or (claim.namespace, claim.name) in self.unnamed


@dataclass(frozen=True, kw_only=True, slots=True)
class Grace:
    """The time for which the kubelet's lists must agree before a claim or file counts as unused."""

    confirmed_seconds: float = 120.0
    """Minimum time between two complete lists: twice the time in which a running kubelet unprepares
    the claims that it knows."""

    unconfirmed_seconds: float = 3600.0
    """The grace period while the kubelet does not answer. The claim or file may be in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unclaimed:
    """
    The grace period of something that no check has found in use.

    It starts at the first complete list, and only complete lists count: a kubelet that has just
    started may list our own pod before the pod in question. Without any answer, the grace period is
    long. An incomplete list ends both: the caller must then discard this, and start again.
    """

    since: float
    """The time of the first check; loop clock."""

    confirmed_since: float | None
    """The first of an unbroken series of complete lists; None if the last check got no complete
    list."""

    @classmethod
    def first(cls, claims: KubeletClaims) -> Unclaimed:
        """Return the state after the first check."""
        since = claims.asked_at
        complete = claims.pods is PodView.COMPLETE
        return cls(since=since, confirmed_since=since if complete else None)

    def again(self, claims: KubeletClaims) -> Unclaimed:
        """Return the state after another check that does not find it in use."""
        if claims.pods is not PodView.COMPLETE:
            return replace(self, confirmed_since=None)
        if self.confirmed_since is None:
            return replace(self, confirmed_since=claims.asked_at)
        return self

    def due(self, claims: KubeletClaims, grace: Grace) -> bool:
        """Return whether one more check ends the grace period."""
        if claims.pods is PodView.PARTIAL:
            return False
        if claims.pods is PodView.UNKNOWN:
            return claims.asked_at - self.since >= grace.unconfirmed_seconds
        begin = self.confirmed_since
        return begin is not None and claims.asked_at - begin >= grace.confirmed_seconds


class KubeletView(Protocol):
    """Returns the claims that the kubelet lists as used."""

    async def listed(self) -> KubeletClaims:
        """Return the claims of the driver that are in use."""
        ...


def claim_uid(cdi_name: str, *, driver: str) -> str | None:
    """Return the claim of a CDI name; None if it is not one of ours."""
    kind, _, device = cdi_name.partition("=")
    uid, _, index = device.rpartition("-")
    return uid if kind == f"{driver}/claim" and uid and index.isdigit() else None


def names_of_others(device: ListedDevice) -> tuple[str, ...]:
    """Return the CDI names that a device has beside ours: they follow ours, and the names that the
    kubelet adds from other devices precede it."""
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
    """Combine the devices of a driver that containers use with claims that are known by UID."""
    ours = tuple(device for device in devices if device.driver == driver)
    found = set(uids)
    unnamed: set[tuple[str, str]] = set()
    for listed in ours:
        of_device = {uid for n in listed.cdi_names if (uid := claim_uid(n, driver=driver))}
        found |= of_device
        if not of_device:
            unnamed.add((listed.namespace, listed.claim))
    return KubeletClaims(
        devices=ours,
        uids=frozenset(found),
        unnamed=frozenset(unnamed),
        pods=pods,
        asked_at=asked_at,
    )
