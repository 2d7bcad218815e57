"""
Keeps the CDI files of prepared claims in place.

The running kubelet does not ask again for a claim that it holds as prepared, so a file that is
deleted would be missed only when a container is started again, and nobody would write it anew. It
must be back within 2 s. A poll of one directory costs less than what a missed or overflowing
inotify queue would take to get right.

It must not know drivers, the API server or gRPC.
"""

from __future__ import annotations

import asyncio
import logging

from drakit_nodeplugin.claims.checkpoint import Checkpoint, CheckpointError
from drakit_nodeplugin.claims.locks import KeyedLocks
from drakit_nodeplugin.claims.specs import ClaimSpecs

__all__ = ("SpecRestorer",)

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
"""Between looks: half of the 2 s within which a file must be back."""


class SpecRestorer:
    """Writes the lost CDI files of one driver's prepared claims again."""

    def __init__(
        self, *, checkpoint: Checkpoint, specs: ClaimSpecs, boot_id: str, locks: KeyedLocks
    ) -> None:
        self._checkpoint = checkpoint
        self._specs = specs
        self._boot_id = boot_id
        self._locks = locks

    async def restore(self) -> int:
        """
        Write what is missing, and give how many files that were.

        Only claims of this boot: after a reboot their devices must be prepared again first, and
        the kubelet asks for that.
        """
        prepared = await self._checkpoint.uids(state="prepared", boot_id=self._boot_id)
        missing = prepared - await self._specs.present()
        restored = 0
        for uid in missing:
            if self._locks.held(uid):
                # Its driver may take minutes, and the other files must not wait for that. What is
                # still missing then is found by the next look.
                continue
            async with self._locks.hold(uid):
                claim = (await self._checkpoint.find([uid])).get(uid)
                if claim is None or claim.state != "prepared" or claim.cdi_spec is None:
                    continue
                failed = await self._specs.write({uid: claim.cdi_spec})
                facts = {"claim": str(claim), "claim_uid": uid}
                if uid in failed:
                    logger.error("CDI file not restored", extra=facts | {"error": str(failed[uid])})
                else:
                    logger.warning("CDI file was lost and is restored", extra=facts)
                    restored += 1
        return restored

    async def run(self) -> None:
        """Look again and again; a look that fails is logged and the next one made."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            try:
                await self.restore()
            except (CheckpointError, OSError) as error:
                logger.error("CDI files cannot be checked", extra={"error": str(error)})
