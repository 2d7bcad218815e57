"""
The processes that serve one driver on this node: usually one, two while one replaces the other.

Implements what the engine asks of them, and tells which one does alone what two must not do at
once: publish slices, collect stale claims. How a process shows that it lives is
:mod:`.kubelet.ownership`'s.

It must not know what is decided by the answers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from drakit_nodeplugin.file_poller import FilePoller
from drakit_nodeplugin.kubelet.ownership import Ownership
from drakit_nodeplugin.kubelet.sockets import SocketError

__all__ = ("RunningInstances", "new_owner")

logger = logging.getLogger(__name__)


def new_owner(instance_uid: str) -> str:
    """Name this process in the entries that it writes: a container that is restarted keeps its
    pod's UID, but not the work of its predecessor."""
    return f"{instance_uid}/{secrets.token_hex(4)}"


class RunningInstances:
    """Implements :class:`drakit_nodeplugin.claims.work.Instances`."""

    def __init__(self, driver: str, ownership: Ownership, *, instance_uid: str) -> None:
        self._driver = driver
        self._ownership = ownership
        self._instance_uid = instance_uid
        self._alone = False
        self.primary = asyncio.Event()
        """Set while this process is the driver's primary one."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after each change of that: an event cannot be waited for until it is cleared."""

    def alone(self) -> bool:
        """Tell whether no other process of the driver was seen at the last look."""
        return self._alone

    async def works(self, owner: str) -> bool:
        """Tell whether another process that wrote an entry is alive."""
        instance_uid, slash, _ = owner.rpartition("/")
        if not slash or instance_uid == self._instance_uid:
            # Ourselves, or our container before its restart: two cannot have one pod's lock.
            return False
        try:
            return await asyncio.to_thread(self._ownership.alive, instance_uid)
        except (OSError, SocketError) as error:
            # What cannot be found out must be taken for work that goes on.
            logger.error(
                "another instance cannot be looked for",
                extra={"driver": self._driver, "error": str(error)},
            )
            return True

    async def look(self) -> None:
        """Look once; the sockets, and with them our own lock, must have been made before."""
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

    async def run(self, looks: FilePoller) -> None:
        """Look whenever something has changed; a look that fails is logged and another one made."""
        while True:
            await looks.until(self._changed)
            try:
                await self.look()
            except OSError as error:
                logger.error(
                    "instances cannot be looked for",
                    extra={"driver": self._driver, "error": str(error)},
                )

    def _changed(self) -> bool:
        """Tell whether a look would find something else than the last one. Blocks."""
        return (
            self._ownership.others_alive() == self._alone
            or self._ownership.try_primary() != self.primary.is_set()
        )
