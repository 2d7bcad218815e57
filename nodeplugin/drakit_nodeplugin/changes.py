"""
Change notification: in-memory counters (:class:`Revision`) and file polling.

A writer advances a :class:`Revision`. Each reader waits at its own pace for a revision later than
the last one that it has seen.

A :class:`FilePoller` polls the files of all drivers in the process, with one round trip to a thread
per round. Other processes may remove or change these files without notice: sockets, locks, CDI
files and a checkpoint. A check takes a few microseconds; a round trip to a thread takes about a
hundred. With fifty drivers, separate round trips would cost a few percent of a core. Therefore, one
thread runs all checks, and only the waiters that have something to do are woken. Checks of the same
disk share a poller, because they hang together if the disk hangs. Checks of another disk need a
separate poller.

:class:`FileWatch` is a check that does not read files: it compares inodes, modification times and
sizes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

# ---------------------------------------------------------------- in memory


class Revision:
    """
    A counter of changes, for any number of readers in one event loop.

    An `asyncio.Event` supports only one reader, which clears it. The devices of a driver have
    several readers: the publisher, and each health stream of the kubelet.
    """

    def __init__(self) -> None:
        self.number = 0
        self._changed = asyncio.Event()

    def advance(self) -> None:
        """Increment the counter, and wake all readers."""
        self.number += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def after(self, seen: int) -> int:
        """Wait for a revision later than `seen`, and return its number."""
        while self.number <= seen:
            await self._changed.wait()
        return self.number


# ---------------------------------------------------------------- in files

PERIOD_SECONDS = 1.0
"""Time between two rounds. A CDI file must be restored within twice this time."""

UNCHANGED_POLLS = 60
"""Number of polls without a change after which a watch reports a change anyway, because some file
systems do not update the modification time reliably."""

_Stamp = tuple[int, int, int] | None
"""Inode, modification time in nanoseconds, and size. None if the file does not exist."""


class FilePoller:
    """Wakes waiters when their checks find something to do. Use each poller in only one event
    loop."""

    def __init__(self, *, period_seconds: float = PERIOD_SECONDS) -> None:
        self._period_seconds = period_seconds
        self._waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}

    async def until(self, check: Callable[[], bool]) -> None:
        """
        Wait until a check finds something to do. The poller runs the check once in every round.

        The check runs in a thread, and may block. If the check raises an exception, the poller also
        wakes the waiter, which then runs into the error itself and handles it.
        """
        found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[found] = check
        try:
            await found
        finally:
            del self._waiters[found]

    async def run(self) -> None:
        """Poll until canceled."""
        while True:
            await asyncio.sleep(self._period_seconds)
            due = list(self._waiters.items())
            for found in await asyncio.to_thread(_poll, due) if due else ():
                if not found.done():  # the waiter may have been canceled
                    found.set_result(None)


def _poll(
    due: Collection[tuple[asyncio.Future[None], Callable[[], bool]]],
) -> list[asyncio.Future[None]]:
    return [found for found, check in due if _finds_something(check)]


def _finds_something(check: Callable[[], bool]) -> bool:
    with contextlib.suppress(Exception):
        return check()
    return True


class FileWatch:
    """
    Detects changes to files and directories only by their inode, modification time and size.

    This costs less than opening the files, and does not require handling of lost inotify events.
    """

    def __init__(self, *paths: Path, settled_seconds: float) -> None:
        """Watch these paths. A change is reported repeatedly until it is older than
        `settled_seconds`, because a second change may have the same timestamp, or may become
        visible later."""
        self._paths = [os.fspath(path) for path in paths]
        self._settled_nanoseconds = int(settled_seconds * 1e9)
        self._seen: list[_Stamp] | None = None
        self._unchanged = 0

    def changed(self) -> bool:
        """Return whether the files may have changed since the last call. Blocks."""
        now = [_stamp(path) for path in self._paths]
        self._unchanged += 1
        if now == self._seen and self._unchanged <= UNCHANGED_POLLS:
            return False
        self._unchanged = 0
        newest = max((stamp[1] for stamp in now if stamp is not None), default=0)
        self._seen = None if time.time_ns() - newest < self._settled_nanoseconds else now
        return True


def _stamp(path: str) -> _Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
