"""
Prepares claims again if their edits are outdated.

A driver marks a device if its edits have changed while claims hold it
(:attr:`drakit.Device.prepare_again`). For example, the kernel gave the device a different number.
The plugin then prepares its claims a second time, without an unprepare. The rows and CDI files get
the new edits, and a container that restarts gets the device again. The plugin repeats this with a
backoff as long as the driver marks the device. Because each second prepare writes to disk, the
backoff also limits the load from a backend that always marks its devices.

:mod:`.prepare` does the work, and :mod:`.queue` decides when. The module does not depend on gRPC or
the API server.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

from drakit.device import ClaimReference
from drakit_daemon.backoff import Backoff
from drakit_nodeplugin.claims.errors import AbandonedError, BadConfigError, DriverFailedError
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError

logger = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 60.0)
"""Initial and maximum delay before a claim is prepared again while its device is still marked. The
delay doubles each time."""

QUIET_SECONDS = 120.0
"""How long a claim must go without a second prepare before its backoff is reset."""

POLL_SECONDS = 5.0
"""How often to read the claims while a device is marked. A claim that was being prepared when the
device was marked may have the old edits."""

_FINAL = frozenset({None, AbandonedError.reason, BadConfigError.reason, DriverFailedError.reason})
"""Results after which no retry is needed if the devices are no longer marked. After any other
result, the driver may have returned edits that are not in the row or the CDI file."""


@dataclass(kw_only=True, slots=True)
class _Pace:
    backoff: Backoff
    used_at: float
    """The time at which the backoff was last used (loop clock)."""


class OutdatedClaims:
    """Prepares the claims of one driver again if the driver has marked their devices."""

    def __init__(
        self,
        *,
        devices: DeviceManager,
        checkpoint: Checkpoint,
        queue: ClaimQueue,
        registered: asyncio.Event,
    ) -> None:
        """Create the object. `registered` is set once the kubelet has registered the driver."""
        self._devices = devices
        self._checkpoint = checkpoint
        self._queue = queue
        self._registered = registered
        self._working: set[str] = set()
        """The UIDs of claims that a task is preparing."""

        self._paces: dict[str, _Pace] = {}
        """The backoff of each claim that was recently prepared again, keyed by UID."""

    async def run(self) -> None:
        """Prepare marked claims until canceled. A slow claim does not delay the others."""
        await self._registered.wait()
        changes = self._devices.mark_changes
        async with asyncio.TaskGroup() as group:
            while True:
                seen = changes.number
                for claim in await self._outdated():
                    if claim.uid not in self._working:
                        self._working.add(claim.uid)
                        group.create_task(self._prepare(claim))
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS if self._devices.marked else None):
                        await changes.after(seen)

    async def _outdated(self) -> set[ClaimReference]:
        """Return the claims that have marked devices."""
        if not (marked := self._devices.marked):
            return set()
        try:
            claims = await self._checkpoint.claims_of_devices()
        except CheckpointError as error:
            logger.error("outdated claims cannot be read", extra={"error": str(error)})
            return set()
        return {claim for device in marked for claim in claims.get(device, ())}

    async def _prepare(self, claim: ClaimReference) -> None:
        """Prepare a claim until its devices are no longer marked."""
        pace = self._pace(claim)
        loop = asyncio.get_running_loop()
        try:
            while True:
                answer = await self._queue.prepare_again(claim)
                await asyncio.sleep(pace.backoff.next_seconds())
                pace.used_at = loop.time()
                if answer.reason in _FINAL and claim not in await self._outdated():
                    return
        finally:
            self._working.discard(claim.uid)

    def _pace(self, claim: ClaimReference) -> _Pace:
        now = asyncio.get_running_loop().time()
        others = self._working - {claim.uid}
        self._paces = {
            uid: pace
            for uid, pace in self._paces.items()
            if uid in others or now - pace.used_at < QUIET_SECONDS
        }
        first, limit = RETRY_SECONDS
        new = _Pace(backoff=Backoff(first_seconds=first, limit_seconds=limit), used_at=now)
        return self._paces.setdefault(claim.uid, new)
