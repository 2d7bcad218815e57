"""
The kubelet's view of claims: the claims that containers use, and the conclusions that can be drawn
from the kubelet's lists.

Before the plugin removes a claim or file without a call from the kubelet, it asks the kubelet. If
the checkpoint was damaged, the kubelet also provides the lost claims. It lists a claim by name. The
UID is part of the CDI names that the plugin returned. An unlisted claim may still be in use,
because the list omits three kinds of claims: claims that no container refers to, claims of init
containers, and claims of a container with another claim that is not prepared yet. A kubelet that
has just started serves its list before it has read its pods, and adds them one by one. Therefore,
any list can prove that a claim is in use. Only complete lists prove that it is unused, and only if
they agree for a grace period (:class:`drakit_nodeplugin.config.StaleClaims`).

The kubelet's state file, ``dra_manager_state``, adds the claims that containers no longer use, but
that the kubelet still has to unprepare. The file can only add claims: if only the file is readable,
a claim that is missing from it may still be in use. The file's format is private to the kubelet, so
an unexpected format is rejected.

:mod:`drakit_nodeplugin.state.podresources` calls the kubelet; :mod:`.stale` and :mod:`.recovery`
decide what happens at the end of a grace period. The module does not depend on gRPC.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from drakit_daemon.logs import ProblemLog
from drakit_nodeplugin.config import StaleClaims
from drakit_nodeplugin.state.cdi_files import claim_uid
from drakit_nodeplugin.state.podresources import (
    ListedDevice,
    PodResources,
    PodResourcesError,
    PodView,
)
from drakit_nodeplugin.state.records import StoredClaim

logger = logging.getLogger(__name__)

_KIND, _VERSION = "DRACheckpoint", "checkpoint.dra.kubelet.k8s.io/v1"

_MAX_STATE_BYTES = 64 * 1024 * 1024
"""Maximum size of the state file, enough for tens of thousands of claims. The kubelet does not
write larger files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubeletClaims:
    """The claims of one driver that the kubelet lists as in use."""

    devices: tuple[ListedDevice, ...] = ()
    """The driver's devices that containers use."""

    uids: frozenset[str] = frozenset()

    unnamed: frozenset[tuple[str, str]] = frozenset()
    """The namespace and name of each listed claim whose UID is unknown."""

    pods: PodView = PodView.UNKNOWN
    """Whether the kubelet's pod list is complete. Only a complete list proves that a missing claim
    is unused."""

    asked_at: float = 0.0
    """The time of the call to the kubelet (loop clock). Several checks of the same response are
    treated as one."""

    def holds(self, claim: StoredClaim) -> bool:
        """Return whether a claim is listed. A listed claim with the same name and another UID does
        not match. If the UID of the listed claim is unknown, the name is sufficient."""
        return claim.uid in self.uids or (claim.namespace, claim.name) in self.unnamed


@dataclass(frozen=True, kw_only=True, slots=True)
class Unclaimed:
    """
    The grace period of a claim or file that no check has found in use.

    The grace period starts at the first complete list. Incomplete lists prove nothing: a kubelet
    that has just started may list the plugin's own pod before the pod in question. While the
    kubelet does not respond, a longer grace period applies. After an incomplete list, the caller
    must discard this object and start again.
    """

    since: float
    """The time of the first check (loop clock)."""

    confirmed_since: float | None
    """The time of the first complete list in the current unbroken series. None if the last check
    did not get a complete list."""

    @classmethod
    def first(cls, claims: KubeletClaims) -> Unclaimed:
        """Return the state after the first check."""
        since = claims.asked_at
        complete = claims.pods is PodView.COMPLETE
        return cls(since=since, confirmed_since=since if complete else None)

    def again(self, claims: KubeletClaims) -> Unclaimed:
        """Return the state after another check that did not find the claim or file in use."""
        if claims.pods is not PodView.COMPLETE:
            return replace(self, confirmed_since=None)
        if self.confirmed_since is None:
            return replace(self, confirmed_since=claims.asked_at)
        return self

    def due(self, claims: KubeletClaims, settings: StaleClaims) -> bool:
        """Return whether the grace period has ended, according to the latest check. `claims` is the
        result of that check."""
        if claims.pods is PodView.PARTIAL:
            return False
        if claims.pods is PodView.UNKNOWN:
            return claims.asked_at - self.since >= settings.unconfirmed_grace_period
        begin = self.confirmed_since
        return begin is not None and claims.asked_at - begin >= settings.grace_period


def names_of_others(device: ListedDevice) -> tuple[str, ...]:
    """Return the CDI names that the driver added to a device. They follow the plugin's last own
    name. The names that the kubelet adds from the claim's other devices come before that name."""
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
    """Merge the driver's devices that are in use by containers with the claims that are known only
    by UID."""
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


class KubeletClaimView:
    """Provides the claims of one driver that the kubelet knows."""

    def __init__(
        self, driver: str, podresources: PodResources, *, state_file: Path | None = None
    ) -> None:
        self._driver = driver
        self._podresources = podresources
        self._state_file = state_file
        self._log = ProblemLog(
            logger,
            "the kubelet's state file cannot be read",
            recovered="the kubelet's state file can be read again",
            facts={"driver": driver},
        )

    async def listed(self) -> KubeletClaims:
        """Return the claims of the driver that are in use."""
        asked_at = asyncio.get_running_loop().time()
        uids = await self._read_state()
        try:
            pods = await self._podresources.claims()
        except PodResourcesError:  # the client has already logged the error
            return KubeletClaims(uids=uids or frozenset(), pods=PodView.UNKNOWN, asked_at=asked_at)
        # A claim may be listed only in the state file.
        unknown = uids is None and pods.pods is PodView.COMPLETE
        return kubelet_claims(
            self._driver,
            pods.devices,
            uids=uids or (),
            pods=PodView.UNKNOWN if unknown else pods.pods,
            asked_at=pods.asked_at,
        )

    async def _read_state(self) -> frozenset[str] | None:
        """Return the UIDs in the state file, or None if it cannot be read."""
        if self._state_file is None:
            return frozenset()
        try:
            uids = await asyncio.to_thread(read_claim_uids, self._state_file)
        except StateFileError as error:
            self._log.report(str(error))
            return None
        self._log.report(None)
        return uids


class StateFileError(Exception):
    """The kubelet's state file is unusable. The message is a sentence that states the reason."""


def read_claim_uids(path: Path) -> frozenset[str]:
    """Return the UIDs of the claims in the file. Raises :class:`StateFileError`. Blocks."""
    try:
        with path.open("rb") as file:
            # The kubelet replaces the file at each change. If only the file itself is mounted, the
            # mount still shows the deleted file.
            if os.fstat(file.fileno()).st_nlink == 0:
                raise StateFileError(
                    f"{path} is a file that the kubelet has since replaced; mount its "
                    f"directory, not the file"
                )
            data = file.read(_MAX_STATE_BYTES + 1)
    except OSError as error:
        raise StateFileError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_STATE_BYTES:
        raise StateFileError(f"{path} is larger than {_MAX_STATE_BYTES} bytes")
    try:
        return _claim_uids(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = str(error) if isinstance(error, ValueError) else "a field is missing, or malformed"
        raise StateFileError(f"{path} is not a checkpoint of a known kubelet: {why}") from error


def _claim_uids(data: bytes) -> frozenset[str]:
    outer: dict[str, Any] = json.loads(data)
    text = cast("str", outer["Data"])
    if zlib.crc32(text.encode()) != outer["Checksum"]:
        raise ValueError("its checksum does not match")
    inner: dict[str, Any] = json.loads(text)
    if (inner["kind"], inner["apiVersion"]) != (_KIND, _VERSION):
        raise ValueError(f"it is a {inner['kind']} of {inner['apiVersion']}")
    # Go writes an empty list as null.
    claims: list[dict[str, Any]] = inner["ClaimInfoStateList"] or []
    uids = [claim["ClaimUID"] for claim in claims]
    for uid in uids:
        if not isinstance(uid, str) or not uid:
            raise ValueError(f"{uid!r} is not a UID")
    return frozenset(uids)
