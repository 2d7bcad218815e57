"""
Directories and files of a driver that only root may use, regardless of the umask.

Checkpoints hold the opaque parameters of tenants. A mode passed to ``mkdir`` or ``open`` applies
only to new entries, and the umask removes bits from it. So these functions set modes afterwards.

They block. The module must not know the content of the files.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ("private_directory", "private_file")


def private_directory(path: Path) -> None:
    """Create a directory if it is missing, and restrict it to root. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _restrict(path, os.stat(path), 0o700)


def private_file(path: Path) -> None:
    """Restrict a regular file to root; ignore anything else. Raises OSError."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISREG(found.st_mode):
        _restrict(path, found, 0o600)


def _restrict(path: Path, found: os.stat_result, mode: int) -> None:
    if stat.S_IMODE(found.st_mode) != mode:
        os.chmod(path, mode)
