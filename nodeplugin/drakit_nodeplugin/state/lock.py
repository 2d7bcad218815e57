"""
The one active instance of a driver on this node.

Usually one process serves a driver; during a rolling update there are two. One ``flock`` on the
driver's data directory decides which of them is active: it alone calls the driver, writes the
checkpoint, and publishes. The kernel releases the lock of a process that ends, however it ends.

An instance that starts asks for a **hand-over**: it locks a second file, ``waiting.lock``. The
active instance notices that within a second, finishes its work, and releases the lock. Then it
waits for the lock again, without asking, and lets others that ask take it first. If that one dies,
with or without the lock, or hangs without it, the former instance is active again within a second.
It then ignores the other one for :data:`IGNORE_SECONDS`: an instance that crashes again and again
must not interrupt the one that works.

This module must not depend on what an instance does with the lock.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from drakit.layout import private_directory
from drakit.logs import ProblemLog
from drakit_nodeplugin.file_poller import FilePoller

__all__ = ("DriverLock", "is_locked", "try_lock")

logger = logging.getLogger(__name__)

ASK_SECONDS = 0.1
"""Time between two attempts of an instance that asks for the lock."""

YIELD_SECONDS = 0.9
"""The time that an instance which handed over leaves to the one that asked."""

STANDBY_SECONDS = 0.4
"""Time between two attempts of an instance that handed over."""

IGNORE_SECONDS = 60.0
"""The time for which an instance that had its turn, and did not stay active, cannot ask again."""

WAITING_FILE = "waiting.lock"


class DriverLock:
    """The lock of one driver, for one process. Its methods run in one event loop."""

    def __init__(self, driver: str, data: Path, *, instance_uid: str) -> None:
        """`data` is the driver's data directory."""
        self._driver = driver
        self._data = data
        self._instance_uid = instance_uid
        self._descriptor: int | None = None
        self._asking: int | None = None
        self._handed_over_to: str | None = None
        """The instance to which this one has handed over last."""

        self._ignored_until = 0.0
        self._log = ProblemLog(
            logger,
            "other instances cannot be found",
            recovered="other instances can be found again",
            level=logging.ERROR,
            facts={"driver": driver},
        )

    @property
    def held(self) -> bool:
        """Whether this instance is the active one."""
        return self._descriptor is not None

    @property
    def handed_over(self) -> bool:
        """Whether this instance waits for the lock after a hand-over."""
        return self._descriptor is None and self._handed_over_to is not None

    async def try_acquire(self) -> bool:
        """Take the lock if no other instance has it; return whether this one has it. Raises
        OSError."""
        if self._descriptor is None:
            await asyncio.to_thread(self._take)
        return self.held

    async def acquire(self) -> None:
        """Wait for the lock; after a hand-over, without asking for it. Raises OSError."""
        if self._handed_over_to is None:
            while not await self.try_acquire():
                await asyncio.to_thread(self._ask)
                await asyncio.sleep(ASK_SECONDS)
            return
        await asyncio.sleep(YIELD_SECONDS)
        # Another process holds it, and no event tells of its end.
        while await asyncio.to_thread(self._yields) or not await self.try_acquire():  # noqa: ASYNC110
            await asyncio.sleep(STANDBY_SECONDS)
        self._ignored_until = asyncio.get_running_loop().time() + IGNORE_SECONDS
        facts = {"driver": self._driver, "instance": self._handed_over_to}
        logger.warning("the instance that asked is not active any more", extra=facts)

    async def until_asked(self, poller: FilePoller) -> None:
        """Wait until another instance asks for a hand-over, or the data directory was replaced, and
        its lock is worth nothing."""
        while True:
            await poller.until(lambda: self._is_lost() or self._waiting() is not None)
            try:
                lost = await asyncio.to_thread(self._is_lost)
                asked_by = await asyncio.to_thread(self._waiting)
            except OSError as error:
                self._log.report(str(error))
                continue
            self._log.report(None)
            if lost:
                logger.error("data directory was replaced", extra={"driver": self._driver})
                return
            is_ignored = asyncio.get_running_loop().time() < self._ignored_until
            if asked_by is not None and not (is_ignored and asked_by == self._handed_over_to):
                self._handed_over_to = asked_by
                return

    async def release(self) -> None:
        """Release the lock, and stop asking for it."""
        await asyncio.to_thread(self._release)

    # ------------------------------------------------------------ files (blocking)

    def _take(self) -> None:
        private_directory(self._data)
        self._descriptor = _lock(self._data, os.O_RDONLY | os.O_DIRECTORY)
        if self._descriptor is not None:
            self._stop_asking()

    def _release(self) -> None:
        self._stop_asking()
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _yields(self) -> bool:
        """Return whether yet another instance asks, which is to have the lock first."""
        return self._waiting() not in (None, self._handed_over_to)

    def _is_lost(self) -> bool:
        return self._descriptor is not None and not _is_at(self._data, self._descriptor)

    def _ask(self) -> None:
        if self._asking is not None and _is_at(self._data / WAITING_FILE, self._asking):
            return
        self._stop_asking()
        self._asking = _lock(self._data / WAITING_FILE, os.O_RDWR | os.O_CREAT)
        if self._asking is not None:
            os.ftruncate(self._asking, 0)
            os.pwrite(self._asking, self._instance_uid.encode(), 0)

    def _stop_asking(self) -> None:
        asking, self._asking = self._asking, None
        if asking is not None:
            with suppress(FileNotFoundError):
                (self._data / WAITING_FILE).unlink()
            os.close(asking)

    def _waiting(self) -> str | None:
        """Return the UID of the instance that asks for the lock; None if there is none."""
        path = self._data / WAITING_FILE
        if not is_locked(path):
            return None
        with suppress(OSError, UnicodeDecodeError):
            return path.read_text() or None  # empty: it is about to write
        return None


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a driver's data directory. Raises OSError. The
    check takes a shared lock, so that two checks at the same time do not see each other."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def try_lock(data: Path) -> Generator[bool]:
    """Hold the lock of a driver, if no instance has it; yield whether it is held. Raises OSError.
    Blocks."""
    descriptor = _lock(data, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(path: Path, flags: int) -> int | None:
    """Lock a file or directory without waiting, and return its descriptor; None if another process
    has it."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It may have been removed between our open and our lock.
        if _is_at(path, descriptor):
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
