"""
The files of a registration directory: which sockets there are, and which are others than before.

Functions block. It must not know what listens on a socket.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

__all__ = ("MAX_PATH_BYTES", "BackendSocket", "scan")

SUFFIX = ".sock"
MAX_PATH_BYTES = 107
"""Of a unix socket's address, which has a zero behind it."""

MAX_ENTRIES = 10_000
"""Of the directory that are looked at: it is somebody else's, and may be full of other things."""

MAX_SOCKETS = 512
"""More than drivers can be hosted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSocket:
    """A socket in the directory: one that was made anew is another one."""

    path: Path
    identity: tuple[int, int, int]
    """Device, inode, and the time of its last change (ns): inodes are used again at once."""

    is_socket: bool = True


def scan(directory: Path) -> Mapping[Path, BackendSocket]:
    """List what may be sockets, and make the directory if there is none; raises OSError."""
    try:
        return _scan(directory)
    except FileNotFoundError:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        return _scan(directory)


def _scan(directory: Path) -> Mapping[Path, BackendSocket]:
    found: dict[Path, BackendSocket] = {}
    with os.scandir(directory) as entries:
        for entry in islice(entries, MAX_ENTRIES):
            if entry.name.startswith(".") or not entry.name.endswith(SUFFIX):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # gone meanwhile
            path = directory / entry.name
            found[path] = BackendSocket(
                path=path,
                identity=(status.st_dev, status.st_ino, status.st_ctime_ns),
                is_socket=stat.S_ISSOCK(status.st_mode),
            )
            if len(found) == MAX_SOCKETS:
                break
    return found
