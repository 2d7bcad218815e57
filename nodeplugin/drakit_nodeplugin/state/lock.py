"""
Ensures that only one instance of a driver is active on this node.

Usually, one process serves a driver. During a rolling update, there are two. One ``flock`` on the
driver's data directory decides which of them is active. Only the active instance calls the driver,
writes the checkpoint, and publishes. When a process ends, the kernel releases its lock, even after
a crash.

A new instance requests a **hand-over** by locking a second file, ``waiting.lock``. The active
instance notices the request within a second, finishes its work, and releases the lock. It then
waits for the lock again, but without a request, so any instance with a request takes precedence. If
the new instance dies or does not take the lock, the previous one is active again within a second.
It then ignores requests from the new one for :data:`IGNORE_SECONDS`, because an instance that keeps
crashing must not interrupt a working one.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from drakit.layout import private_directory
from drakit_daemon.logs import ProblemLog
from drakit_nodeplugin.changes import FilePoller

logger = logging.getLogger(__name__)

ASK_SECONDS = 0.2
"""Time between two attempts to take the lock by an instance that is waiting for its first turn."""

YIELD_SECONDS = 0.8
"""How long an instance that has handed over leaves the lock to the instance that requested it."""

STANDBY_SECONDS = 0.4
"""Time between two attempts to take the lock by an instance that has handed over."""

IGNORE_SECONDS = 60.0
"""How long to ignore requests from an instance that had its turn but did not remain active."""

WAITING_FILE = "waiting.lock"


class _Asker(NamedTuple):
    """A request for the lock."""

    instance_uid: str
    inode: int
    changed_at: int


class DriverLock:
    """The lock of one driver, for one process. Its methods run in one event loop."""

    def __init__(self, driver: str, data: Path, *, instance_uid: str) -> None:
        """Create a lock. `data` is the driver's data directory."""
        self._data = data
        self._instance_uid = instance_uid
        self._descriptor: int | None = None
        self._asking: int | None = None
        self._handed_over_to: str | None = None
        """The instance to which this one last handed over the lock."""

        self._ignored_until = 0.0
        self._ignored: _Asker | None = None
        """The last request that was ignored."""
        self._log = ProblemLog(
            logger,
            "other instances cannot be found",
            recovered="other instances can be found again",
            level=logging.ERROR,
            facts={"driver": driver},
        )

    @property
    def held(self) -> bool:
        """Whether this instance is active."""
        return self._descriptor is not None

    @property
    def handed_over(self) -> bool:
        """Whether this instance is waiting for the lock after a hand-over."""
        return self._descriptor is None and self._handed_over_to is not None

    async def try_acquire(self) -> bool:
        """Take the lock if no other instance has it. Return whether this instance now has it.
        Raises OSError."""
        if self._descriptor is None:
            await asyncio.to_thread(self._take)
        return self.held

    async def acquire(self, *, may_ask: Callable[[], bool]) -> None:
        """Wait for the lock. Before the first turn, request it as soon as `may_ask` returns True.
        File system errors are logged and retried."""
        is_first = self._handed_over_to is None
        pause = ASK_SECONDS if is_first else STANDBY_SECONDS
        if not is_first:
            await asyncio.sleep(YIELD_SECONDS)
        while not self.held:
            try:
                await asyncio.to_thread(self._attempt, asks=is_first and may_ask())
                self._log.report(None)
            except OSError as error:
                self._log.report(str(error))
            if not self.held:
                await asyncio.sleep(pause)
        if not is_first:
            self._ignored_until = asyncio.get_running_loop().time() + IGNORE_SECONDS

    async def until_asked(self, poller: FilePoller) -> Literal["asked", "ignored", "lost"]:
        """
        Wait until another instance requests a hand-over, and return the required action.

        ``ignored``: an instance has requested the lock again too early, and will not get it now.
        This is returned once for each request. ``lost``: the data directory was replaced, so the
        lock has no effect.
        """
        while True:
            await poller.until(lambda: self._end_of_hold() is not None)
            try:
                asker = await asyncio.to_thread(self._end_of_hold)
            except OSError as error:
                self._log.report(str(error))
                continue
            self._log.report(None)
            if asker == "lost":
                return "lost"
            if asker is None:
                continue
            is_early = asyncio.get_running_loop().time() < self._ignored_until
            if not (is_early and asker.instance_uid == self._handed_over_to):
                self._handed_over_to = asker.instance_uid
                return "asked"
            if asker != self._ignored:
                self._ignored = asker
                return "ignored"

    async def release(self) -> None:
        """Release the lock, and withdraw the request for it. Does not raise."""
        try:
            await asyncio.to_thread(self._release)
        except OSError as error:
            self._log.report(str(error))

    # ------------------------------------------------------------ files (blocking)

    def _attempt(self, *, asks: bool) -> None:
        if self._handed_over_to is not None:
            asker = self._waiting()
            if asker is not None and asker.instance_uid != self._handed_over_to:
                return  # yet another instance has the request file, and takes precedence
        self._take()
        if asks and self._descriptor is None:
            self._ask()

    def _take(self) -> None:
        private_directory(self._data)
        descriptor = _lock(self._data, os.O_RDONLY | os.O_DIRECTORY)
        if descriptor is not None:
            try:
                self._stop_asking()
            finally:
                self._descriptor = descriptor

    def _release(self) -> None:
        try:
            self._stop_asking()
        finally:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                _unlock(descriptor)

    def _end_of_hold(self) -> _Asker | Literal["lost"] | None:
        """Return the reason why this instance may have to release the lock, or None."""
        if self._descriptor is not None and not _is_at(self._data, self._descriptor):
            return "lost"
        return self._waiting()

    def _ask(self) -> None:
        if self._asking is not None and _is_at(self._data / WAITING_FILE, self._asking):
            return
        self._stop_asking()
        self._asking = _lock(self._data / WAITING_FILE, os.O_RDWR | os.O_CREAT)
        if self._asking is not None:
            try:
                os.ftruncate(self._asking, 0)
                os.pwrite(self._asking, self._instance_uid.encode(), 0)
            except OSError:
                self._stop_asking()  # the next attempt creates a new request
                raise

    def _stop_asking(self) -> None:
        asking, self._asking = self._asking, None
        if asking is not None:
            try:
                (self._data / WAITING_FILE).unlink(missing_ok=True)
            finally:
                _unlock(asking)

    def _waiting(self) -> _Asker | None:
        """Return the request for the lock, or None."""
        path = self._data / WAITING_FILE
        if not is_locked(path):
            return None
        with suppress(OSError, UnicodeDecodeError):
            found = path.stat()
            # The file is empty if the instance has not written its UID yet.
            if instance_uid := path.read_text():
                return _Asker(instance_uid, found.st_ino, found.st_mtime_ns)
        return None


def is_locked(path: Path) -> bool:
    """Return whether a process has locked a file or directory, such as a driver's data directory.
    Raises OSError. The check takes a shared lock, so that two concurrent checks do not see each
    other's lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        _unlock(descriptor)
    return False


@contextmanager
def try_lock(data: Path) -> Generator[bool]:
    """Take a driver's lock if no instance has it. Yield whether it was taken. Raises OSError.
    Blocks."""
    descriptor = _lock(data, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            _unlock(descriptor)


def _lock(path: Path, flags: int) -> int | None:
    """Lock a file or directory without waiting, and return its descriptor, or None if another
    process has the lock."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    held = False
    try:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have removed the file between the open and the lock.
            held = _is_at(path, descriptor)
    finally:
        if not held:
            _unlock(descriptor)
    return descriptor if held else None


def _unlock(descriptor: int) -> None:
    """Unlock and close a file. Closing is not sufficient while a process that a driver has forked
    has a copy of the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
