"""
Directories and files of a driver that root alone may use, whatever the umask is.

Checkpoints hold the opaque parameters of tenants. A mode that is given to ``mkdir`` or ``open``
holds for new entries only, and the umask takes bits away from it; so modes are set afterwards.

Functions block. It must not know what is in the files.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ("private_directory", "private_file")


def private_directory(path: Path) -> None:
    """Create a directory if it is missing, and let root alone use it. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _restrict(path, os.stat(path), 0o700)


def private_file(path: Path) -> None:
    """Let root alone use a file; anything but a file, or nothing, is left alone. Raises OSError."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISREG(found.st_mode):
        _restrict(path, found, 0o600)


def _restrict(path: Path, found: os.stat_result, mode: int) -> None:
    if stat.S_IMODE(found.st_mode) != mode:
        os.chmod(path, mode)
