"""
The claims of one driver that this node's kubelet knows, from all its readable sources.

:mod:`.podresources` is the source; :mod:`.statefile` adds the claims that no container uses any
more and the kubelet has still to unprepare. The file can only add: where it alone is readable, a
claim that it does not name counts for nothing.

It must not know what the answer is used for.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from drakit_nodeplugin.claims.kubeletview import KubeletClaims, PodView, kubelet_claims
from drakit_nodeplugin.kubelet.podresources import PodResources, PodResourcesError
from drakit_nodeplugin.kubelet.statefile import StateFileError, read_claim_uids

__all__ = ("KubeletClaimView",)

logger = logging.getLogger(__name__)


class KubeletClaimView:
    """Implements :class:`drakit_nodeplugin.claims.kubeletview.KubeletView`."""

    def __init__(
        self, driver: str, podresources: PodResources, *, state_file: Path | None = None
    ) -> None:
        self._driver = driver
        self._podresources = podresources
        self._state_file = state_file
        self._problem: str | None = None

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
            self._report(str(error))
            return frozenset()
        self._report(None)
        return uids

    def _report(self, problem: str | None) -> None:
        """Log once that the file cannot be read, and once that it can be read again."""
        before, self._problem = self._problem, problem
        if problem is not None and problem != before:
            logger.warning(
                "the kubelet's state file cannot be read",
                extra={"driver": self._driver, "error": problem},
            )
        elif problem is None and before is not None:
            logger.info(
                "the kubelet's state file can be read again", extra={"driver": self._driver}
            )
