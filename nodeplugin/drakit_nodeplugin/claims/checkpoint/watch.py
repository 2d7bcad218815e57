"""
Detects writes to a checkpoint by its files alone, without opening it.

Every write, of whatever process, changes the time of a file of the database. Two stat calls replace
two queries in the writer's thread, for each driver and every few seconds.

It must not know what is stored, or what a write leads to.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ("DatabaseWatch",)

UNCHANGED_POLLS = 60
"""After this many polls without a change, one is reported anyway: some file systems do not maintain
the time of change reliably."""

SETTLED_NANOSECONDS = 10_000_000_000
"""Time without a write until the last one counts as seen: a reader sees a write only once it is
flushed, which takes a slow disk seconds."""

_Stamp = tuple[int, int, int] | None
"""Inode, time of the last change (ns) and size; None if there is no such file."""


class DatabaseWatch:
    """Polls the files of one database for one user, in any thread."""

    def __init__(self, path: Path) -> None:
        self._files = (os.fspath(path), f"{path}-wal")
        self._seen: tuple[_Stamp, ...] | None = None
        self._unchanged = 0

    def changed(self) -> bool:
        """Return whether a write since the last call is possible. Blocks; raises OSError."""
        now = tuple(_stamp(file) for file in self._files)
        self._unchanged += 1
        if now == self._seen and self._unchanged <= UNCHANGED_POLLS:
            return False
        self._unchanged = 0
        newest = max((stamp[1] for stamp in now if stamp is not None), default=0)
        self._seen = None if time.time_ns() - newest < SETTLED_NANOSECONDS else now
        return True


def _stamp(file: str) -> _Stamp:
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
