"""
The claims of one driver that this node's kubelet knows: from podresources and its state file.

The state file, ``dra_manager_state``, is read where the site lets us. It adds the claims that no
container uses any more and that the kubelet still has to unprepare. The file can only add: if it
alone is readable, a claim that it does not name proves nothing. Its format is private to the
kubelet, so anything that differs from the known format is not read.

It must not know what the answer is used for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import zlib
from pathlib import Path
from typing import Any, cast

from drakit.logs import ProblemLog
from drakit_nodeplugin.claims.kubeletview import KubeletClaims, PodView, kubelet_claims
from drakit_nodeplugin.kubelet.podresources import PodResources, PodResourcesError

__all__ = ("KubeletClaimView", "StateFileError", "read_claim_uids")

logger = logging.getLogger(__name__)

_KIND, _VERSION = "DRACheckpoint", "checkpoint.dra.kubelet.k8s.io/v1"

_MAX_BYTES = 64 * 1024 * 1024
"""Enough for tens of thousands of claims: a larger file is not the kubelet's."""


class KubeletClaimView:
    """Implements :class:`drakit_nodeplugin.claims.kubeletview.KubeletView`."""

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
        except PodResourcesError:  # the client has logged it
            return KubeletClaims(uids=uids, pods=PodView.UNKNOWN, asked_at=asked_at)
        return kubelet_claims(
            self._driver, pods.devices, uids=uids, pods=pods.pods, asked_at=pods.asked_at
        )

    async def _read_state(self) -> frozenset[str]:
        if self._state_file is None:
            return frozenset()
        try:
            uids = await asyncio.to_thread(read_claim_uids, self._state_file)
        except StateFileError as error:
            self._log.report(str(error))
            return frozenset()
        self._log.report(None)
        return uids


class StateFileError(Exception):
    """The kubelet's state file cannot be relied on. The text is a sentence."""


def read_claim_uids(path: Path) -> frozenset[str]:
    """Return the UIDs of the claims in the file; raise :class:`StateFileError`. Blocks."""
    try:
        with path.open("rb") as file:
            # The kubelet replaces the file; a mount of the file alone would always show the old
            # one.
            if os.fstat(file.fileno()).st_nlink == 0:
                raise StateFileError(
                    f"{path} is a file that the kubelet has replaced meanwhile; mount its "
                    f"directory, not the file"
                )
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise StateFileError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise StateFileError(f"{path} is larger than {_MAX_BYTES} bytes")
    try:
        return _claim_uids(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateFileError(
            f"{path} is no checkpoint of a known kubelet: {type(error).__name__}: {error}"
        ) from error


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
            raise ValueError(f"{uid!r} is no UID")
    return frozenset(uids)
