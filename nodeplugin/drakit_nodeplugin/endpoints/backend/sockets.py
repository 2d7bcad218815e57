"""
The files of a registration directory: which sockets there are, and which are others than before.

Functions block. It must not know what listens on a socket.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from drakit_nodeplugin.endpoints.socketfile import SocketFile, socket_file

__all__ = ("MAX_SOCKETS", "BackendSocket", "scan")

SUFFIX = ".sock"
MAX_ENTRIES = 10_000
"""Of the directory that are looked at: it is somebody else's, and may be full of other things."""

MAX_SOCKETS = 512
"""More than drivers can be hosted. Those that were known before stay, whatever comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSocket:
    """A file that should be a socket; one that was made anew is another one."""

    path: Path
    file: SocketFile

    def is_in_place(self) -> bool:
        """Return whether the file is still at its path. Blocks."""
        try:
            return socket_file(self.path) == self.file
        except OSError:
            return False


def scan(directory: Path, *, known: Collection[str] = ()) -> Mapping[str, SocketFile]:
    """List what should be sockets, by name, and make the directory if there is none; raises
    OSError. Of more than :data:`MAX_SOCKETS` one more is given, and `known` ones come first. Plain,
    as it is done every second: what did not change is looked at no further."""
    try:
        return _scan(directory, known)
    except FileNotFoundError:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        return _scan(directory, known)


def _scan(directory: Path, known: Collection[str]) -> Mapping[str, SocketFile]:
    with os.scandir(directory) as entries:
        names = [entry.name for entry in islice(entries, MAX_ENTRIES) if _is_wanted(entry.name)]
    # The order of a directory is nobody's: others must not take the place of a known one.
    names = [*known, *(name for name in names if name not in known)]
    found: dict[str, SocketFile] = {}
    for name in names:
        try:
            found[name] = socket_file(f"{directory}/{name}")
        except FileNotFoundError:
            continue  # gone meanwhile
        if len(found) > MAX_SOCKETS:
            break
    return found


def _is_wanted(name: str) -> bool:
    return name.endswith(SUFFIX) and not name.startswith(".")
