"""
The processes that serve one driver on this node: usually one, two during a rolling update.

It tells the engine whether another process is still working, and elects the primary instance, which
does alone what two must not do at once: publish slices, collect stale claims.
:mod:`drakit_nodeplugin.kubelet.ownership` holds the locks that show that a process lives.

It must not know what is decided by the answers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from drakit.logs import ProblemLog
from drakit_nodeplugin.file_poller import FilePoller
from drakit_nodeplugin.kubelet.ownership import Ownership
from drakit_nodeplugin.kubelet.sockets import SocketError

__all__ = ("RunningInstances", "new_owner")

logger = logging.getLogger(__name__)


def new_owner(instance_uid: str) -> str:
    """Return a name of this process for the entries that it writes: a restarted container keeps its
    pod's UID, but not the work of its predecessor."""
    return f"{instance_uid}/{secrets.token_hex(4)}"


class RunningInstances:
    """Implements :class:`drakit_nodeplugin.claims.parts.Instances`."""

    def __init__(self, driver: str, ownership: Ownership, *, instance_uid: str) -> None:
        self._driver = driver
        self._ownership = ownership
        self._instance_uid = instance_uid
        self._alone = False
        self._log = ProblemLog(
            logger,
            "other instances cannot be found",
            recovered="other instances can be found again",
            level=logging.ERROR,
            facts={"driver": driver},
        )
        self.primary = asyncio.Event()
        """Set while this process is the driver's primary instance."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after each change of that: nothing can wait until an event is cleared."""

    def alone(self) -> bool:
        """Return whether the last check found no other process of the driver."""
        return self._alone

    async def works(self, owner: str) -> bool:
        """Return whether another process that wrote an entry is alive."""
        instance_uid, slash, _ = owner.rpartition("/")
        if not slash or instance_uid == self._instance_uid:
            # Ourselves, or our container before its restart: two cannot have one pod's lock.
            return False
        try:
            return await asyncio.to_thread(self._ownership.alive, instance_uid)
        except (OSError, SocketError) as error:
            self._log.report(str(error))
            return True  # if it is unknown, the other process may still be working

    async def check(self) -> None:
        """Check once. The sockets, and with them our own lock, must exist before."""
        self._alone = not await asyncio.to_thread(self._ownership.others_alive)
        primary = await asyncio.to_thread(self._ownership.try_primary)
        if primary == self.primary.is_set():
            return
        if primary:
            self.primary.set()
        else:
            self.primary.clear()
        logger.info(
            "this instance is the primary one" if primary else "another instance is primary now",
            extra={"driver": self._driver},
        )
        self.on_change()

    async def run(self, poller: FilePoller) -> None:
        """Check after each change until cancelled; a check that fails is logged and repeated."""
        while True:
            await poller.until(self._changed)
            try:
                await self.check()
                self._log.report(None)
            except OSError as error:
                self._log.report(str(error))

    def _changed(self) -> bool:
        """Return whether a check would find something new. Blocks."""
        return (
            self._ownership.others_alive() == self._alone
            or self._ownership.try_primary() != self.primary.is_set()
        )
