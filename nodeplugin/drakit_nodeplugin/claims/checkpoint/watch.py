"""
Whether a checkpoint may hold something else than before, without opening it.

Every write, of whatever process, changes the time of a file of the database: that is two calls of
the system instead of two queries in the writer's thread, for each driver and every few seconds.

It must not know what is stored, or who looks.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ("DatabaseWatch",)

UNCHANGED_LOOKS = 60
"""After so many looks that saw no change it is said all the same: file systems keep the time of
change with different care."""

SETTLED_NANOSECONDS = 10_000_000_000
"""Without a write, until what was written is taken for seen: it is seen only once it is flushed,
which a slow disk may take seconds for."""

_Stamp = tuple[int, int, int] | None
"""Inode, time of the last change (ns) and size; None if there is no such file."""


class DatabaseWatch:
    """Looks at the files of one database, for one who asks again and again, in any thread."""

    def __init__(self, path: Path) -> None:
        self._files = (os.fspath(path), f"{path}-wal")
        self._seen: tuple[_Stamp, ...] | None = None
        self._unchanged = 0

    def changed(self) -> bool:
        """Tell whether there may have been a write since the last call. Blocks; raises OSError."""
        now = tuple(_stamp(file) for file in self._files)
        self._unchanged += 1
        if now == self._seen and self._unchanged <= UNCHANGED_LOOKS:
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
