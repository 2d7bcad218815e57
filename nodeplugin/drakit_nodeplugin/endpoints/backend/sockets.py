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

__all__ = ("MAX_PATH_BYTES", "MAX_SOCKETS", "BackendSocket", "Identity", "scan")

SUFFIX = ".sock"
MAX_PATH_BYTES = 107
"""Of a unix socket's address, which has a zero behind it."""

MAX_ENTRIES = 10_000
"""Of the directory that are looked at: it is somebody else's, and may be full of other things."""

MAX_SOCKETS = 512
"""More than drivers can be hosted."""


Identity = tuple[int, int, int, int]
"""Device, inode, time of the last change (ns) and mode: inodes are used again at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSocket:
    """A file that should be a socket; one that was made anew is another one."""

    path: Path
    identity: Identity

    @property
    def is_socket(self) -> bool:
        """Tell whether the file is what its name says."""
        return stat.S_ISSOCK(self.identity[-1])


def scan(directory: Path) -> Mapping[str, Identity]:
    """List what should be sockets, by name, and make the directory if there is none; raises
    OSError. Plain, as it is done every second: what did not change is looked at no further."""
    try:
        return _scan(directory)
    except FileNotFoundError:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        return _scan(directory)


def _scan(directory: Path) -> Mapping[str, Identity]:
    found: dict[str, Identity] = {}
    with os.scandir(directory) as entries:
        for entry in islice(entries, MAX_ENTRIES):
            name = entry.name
            if not name.endswith(SUFFIX) or name.startswith("."):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # gone meanwhile
            found[name] = (status.st_dev, status.st_ino, status.st_ctime_ns, status.st_mode)
            if len(found) > MAX_SOCKETS:
                break
    return found
