"""
How a damaged database gives way to the one that was salvaged from it, so that no crash loses both.

1. the new one is made under a name of its own (``….salvaging``)
2. it gets the name that says that it is complete (``….salvaged``)
3. the damaged one is set aside under a name that says when (``….damaged-<UTC>``)
4. the new one takes its place

After step 2 the rest is done again at the next start, until it is done. Who reads what is left of
the damaged one is :mod:`drakit_nodeplugin.claims.checkpoint.salvage`; when,
:mod:`drakit_nodeplugin.claims.checkpoint.open`. Functions block; the caller holds the lock of the
folder. It must not know what is in the files.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ("KEPT", "aside_name", "drop_unfinished", "finish", "put_in_place", "salvaging_path")

KEPT = 5
"""Damaged databases that are kept, the newest ones. What is not ours is never removed."""

_PARTS = ("-wal", "-journal", "")
_SALVAGING = ".salvaging"
_SALVAGED = ".salvaged"


def aside_name(path: Path, *, foreign: bool) -> str:
    """Give the name under which a file is to be set aside now: one that is not used."""
    kind = "foreign" if foreign else "damaged"
    stamp = f"{path.name}.{kind}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    used = {entry.name for entry in path.parent.iterdir()}
    names = (f"{stamp}-{number}" if number else stamp for number in range(len(used) + 1))
    return next(name for name in names if not any(entry.startswith(name) for entry in used))


def salvaging_path(path: Path, aside: str) -> Path:
    """Give the name of the new database while it is made."""
    return path.with_name(aside + _SALVAGING)


def put_in_place(path: Path, aside: str) -> None:
    """Set the damaged database aside, and put the new one, which is complete, in its place."""
    salvaged = path.with_name(aside + _SALVAGED)
    salvaging_path(path, aside).rename(salvaged)
    _sync(path.parent)
    _swap(path, salvaged)


def finish(path: Path) -> None:
    """End what a crash has cut, if there is something."""
    for salvaged in _with_suffix(path, _SALVAGED):
        _swap(path, salvaged)


def drop_unfinished(path: Path) -> None:
    """Remove new databases that were not completed."""
    for suffix in (_SALVAGING, f"{_SALVAGING}-journal"):
        for unfinished in _with_suffix(path, suffix):
            unfinished.unlink()


def _swap(path: Path, salvaged: Path) -> None:
    aside = salvaged.name.removesuffix(_SALVAGED)
    # The log goes first: the new database must never meet it.
    for part in _PARTS:
        with suppress(FileNotFoundError):
            path.with_name(path.name + part).rename(path.with_name(aside + part))
    path.with_name(f"{path.name}-shm").unlink(missing_ok=True)  # only an index of the log
    salvaged.rename(path)
    _sync(path.parent)
    _prune(path)


def _prune(path: Path) -> None:
    name = re.compile(re.escape(path.name) + r"\.damaged-\d{8}T\d{6}Z?(-\d+)?")
    kept = sorted(e.name for e in path.parent.iterdir() if name.fullmatch(e.name) and e.is_file())
    for old in kept[:-KEPT]:
        for part in _PARTS:
            path.with_name(old + part).unlink(missing_ok=True)


def _with_suffix(path: Path, suffix: str) -> Iterator[Path]:
    for entry in sorted(path.parent.iterdir()):
        if entry.name.startswith(f"{path.name}.") and entry.name.endswith(suffix):
            yield entry


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
