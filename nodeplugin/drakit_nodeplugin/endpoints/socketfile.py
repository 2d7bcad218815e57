"""
The file of a unix socket: which file it is, and whether its owner is the expected one.

It must not know which program listens on the socket.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ("SocketFile", "SocketOwner", "socket_file")


class SocketFile(NamedTuple):
    """Distinguishes a file from another one at the same path.

    The file system may reuse an inode at once, but a rename, a link or a change of the owner sets
    the time of the last change.
    """

    device: int
    inode: int
    changed_ns: int
    mode: int
    uid: int
    gid: int

    @property
    def is_socket(self) -> bool:
        """Whether the file is a socket."""
        return stat.S_ISSOCK(self.mode)


@dataclass(frozen=True, kw_only=True, slots=True)
class SocketOwner:
    """The owner that a socket must have."""

    uid: int = 0
    gid: int | None = None
    """None allows any group."""

    def problem(self, file: SocketFile) -> str | None:
        """Return why a socket's owner is wrong, as the end of a sentence; None if it is right."""
        if file.uid == self.uid and self.gid in (None, file.gid):
            return None
        group = "" if self.gid is None else f" and group {self.gid}"
        return f"belongs to user {file.uid} and group {file.gid}, not to user {self.uid}{group}"


def socket_file(path: Path | str) -> SocketFile:
    """Stat a path without following a symbolic link; raises OSError. Blocks."""
    found = os.lstat(path)
    return SocketFile(
        found.st_dev, found.st_ino, found.st_ctime_ns, found.st_mode, found.st_uid, found.st_gid
    )
