"""
Finds the devices that are gone and that no claim holds any more.

An endpoint that no longer lists a device does not know whether a claim holds it; only the
checkpoint does. So such a device stays until a query of the checkpoint finds no claim. The queries
are made at once, and then periodically.

It must not know pools, taints, or the life of endpoints.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from drakit_daemon.logs import ProblemLog
from drakit_nodeplugin.endpoints.contract import DeviceKey
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError

__all__ = ("GONE_SECONDS", "GoneDevices")

logger = logging.getLogger(__name__)

GONE_SECONDS = 1.0
"""Time between two checks for claims that hold gone devices."""


class GoneDevices:
    """Follows the devices of one driver that are gone."""

    def __init__(
        self,
        driver: str,
        checkpoint: Checkpoint,
        *,
        gone: Callable[[], Iterable[DeviceKey]],
        on_free: Callable[[Collection[DeviceKey]], None],
    ) -> None:
        """`gone` returns the devices that are gone now; `on_free` receives those of them that no
        claim holds."""
        self._checkpoint = checkpoint
        self._gone = gone
        self._on_free = on_free
        self._changed = asyncio.Event()
        self._problems = ProblemLog(
            logger,
            "devices that are gone stay published: the checkpoint cannot be read",
            facts={"driver": driver},
        )

    def changed(self) -> None:
        """Note that other devices may be gone."""
        self._changed.set()

    async def run(self) -> None:
        """Check until canceled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(GONE_SECONDS if any(self._gone()) else None):
                    await self._changed.wait()
            self._changed.clear()
            await self._check()

    async def _check(self) -> None:
        # Read before the query: a claim can get a device that vanishes after the answer.
        gone = frozenset(self._gone())
        if not gone:
            return
        try:
            used = await self._checkpoint.devices_in_use()
        except CheckpointError as error:
            self._problems.report(str(error))
            return
        self._problems.report(None)
        if free := [key for key in gone if key.name not in used.get(key.pool, ())]:
            self._on_free(free)
