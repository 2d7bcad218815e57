"""
What this node's kubelet says of one driver's claims, from all that it lets us read.

:mod:`.podresources` is the source; :mod:`.statefile` adds the claims that no container uses any
more and the kubelet has still to unprepare. The file can only add: where it alone is readable, a
claim that it does not name counts for nothing.

It must not know what the answer is used for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drakit_nodeplugin.claims.kubeletview import KubeletClaims, ListedDevice, kubelet_claims
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
        self._told: dict[str, str | None] = {}

    async def listed(self) -> KubeletClaims | None:
        """Ask which claims of the driver are used; None if no source can be read."""
        devices = await self._list()
        uids = await self._read_state()
        if devices is None and uids is None:
            return None
        claims = kubelet_claims(self._driver, devices or (), uids=uids or ())
        return replace(claims, containers_told=devices is not None)

    async def _list(self) -> Sequence[ListedDevice] | None:
        try:
            devices = await self._podresources.list(driver=self._driver)
        except PodResourcesError as error:
            self._tell("podresources", str(error))
            return None
        self._tell("podresources", None)
        return devices

    async def _read_state(self) -> frozenset[str] | None:
        if self._state_file is None:
            return None
        try:
            uids = await asyncio.to_thread(read_claim_uids, self._state_file)
        except StateFileError as error:
            self._tell("state file", str(error))
            return None
        self._tell("state file", None)
        return uids

    def _tell(self, source: str, error: str | None) -> None:
        """Log a source that cannot be read once, and again when it can."""
        before = self._told.get(source)
        self._told[source] = error
        facts = {"driver": self._driver, "source": source}
        if error is not None and error != before:
            logger.warning("the kubelet's claims cannot be read", extra=facts | {"error": error})
        elif error is None and before is not None:
            logger.info("the kubelet's claims can be read again", extra=facts)
