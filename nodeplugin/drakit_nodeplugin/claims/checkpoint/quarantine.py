"""
What becomes of a damaged database: its sound rows move to a new one, and it is kept for analysis.

1. the sound rows are copied into a new database (``….salvaging``)
2. the new one gets the name that marks it as complete (``….salvaged``)
3. the damaged one gets the name under which it is kept (``….damaged-<UTC>``)
4. the new one takes its place

After a crash between steps 2 and 4, the next start finishes them, so no crash loses both databases.
A row is copied if its bytes pass their checksum. The rows are read from both ends up to damage.
:mod:`.rebuild` restores what is not found this way; :mod:`.open` decides when a database is
damaged.

Functions block; the caller must hold the lock of the folder. It must not know asyncio, or what the
states of a claim lead to.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from drakit_nodeplugin.claims.checkpoint import endpoint_rows, rows, schema
from drakit_nodeplugin.claims.checkpoint.records import DamagedRowError, load

__all__ = ("KEPT", "copy_rows", "drop_unfinished", "finish", "free_name", "new_path", "replace")

KEPT = 5
"""Damaged databases that are kept, the newest ones. Files of other programs are never removed."""

_PARTS = ("-wal", "-journal", "")
_SALVAGING = ".salvaging"
_SALVAGED = ".salvaged"

_UNREADABLE = (sqlite3.Error, ValueError, MemoryError, OverflowError)
"""What a query of a damaged database raises: wrong sizes and damaged text lead to the others."""


def copy_rows(path: Path, target: sqlite3.Connection) -> frozenset[str]:
    """
    Copy the sound rows of a damaged database into a new, empty one.

    Returns the claims that the damaged database names and whose rows were not copied. Raises
    sqlite3.Error if the target cannot be written, or the source cannot be opened.
    """
    # SQLite would wait for the other end of a pipe, and removes the log beside an empty file.
    if not path.is_file() or schema.is_empty(path):
        return frozenset()
    copied: set[str] = set()
    named: set[str] = set()
    with closing(schema.connect_reading(path)) as source:
        # The damaged definition of one table must not hide the others.
        list(_up_to_damage(source, "PRAGMA writable_schema = ON"))
        for order in ("ASC", "DESC"):
            bodies = f"SELECT body, checksum FROM bodies ORDER BY id {order}"  # noqa: S608
            for body, checksum in _up_to_damage(source, bodies):
                with suppress(DamagedRowError):
                    claim = load(body, expected=checksum)
                    if claim.uid not in copied:
                        copied |= rows.adopt(target, [claim])
            uids = f"SELECT uid FROM claims ORDER BY uid {order}"  # noqa: S608
            named |= {uid for (uid,) in _up_to_damage(source, uids) if isinstance(uid, str)}
            endpoints = f"SELECT name, checksum, body FROM endpoints ORDER BY name {order}"  # noqa: S608
            for row in _up_to_damage(source, endpoints):
                with suppress(DamagedRowError):
                    endpoint_rows.write(target, [endpoint_rows.load(*row)])
    return frozenset(named - copied)


def free_name(path: Path, *, foreign: bool) -> str:
    """Return the name under which a file is kept if it is replaced now."""
    kind = "foreign" if foreign else "damaged"
    stamp = f"{path.name}.{kind}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    used = {entry.name for entry in path.parent.iterdir()}
    names = (f"{stamp}-{number}" if number else stamp for number in range(len(used) + 1))
    return next(name for name in names if not any(entry.startswith(name) for entry in used))


def new_path(path: Path, name: str) -> Path:
    """Return the path of the new database until it is complete."""
    return path.with_name(name + _SALVAGING)


def replace(path: Path, name: str) -> None:
    """Keep the file at a path under a name, and put the new database, which is complete, there."""
    complete = path.with_name(name + _SALVAGED)
    new_path(path, name).rename(complete)
    _sync(path.parent)
    _swap(path, complete)


def finish(path: Path) -> None:
    """Finish a replacement that a crash interrupted."""
    for complete in _with_suffix(path, _SALVAGED):
        _swap(path, complete)


def drop_unfinished(path: Path) -> None:
    """Remove new databases that were not completed."""
    for suffix in (_SALVAGING, f"{_SALVAGING}-journal"):
        for unfinished in _with_suffix(path, suffix):
            unfinished.unlink()


def _up_to_damage(source: sqlite3.Connection, query: str) -> Iterator[tuple[Any, ...]]:
    with suppress(*_UNREADABLE):
        yield from source.execute(query)


def _swap(path: Path, complete: Path) -> None:
    name = complete.name.removesuffix(_SALVAGED)
    # The log goes first: the new database must never meet it.
    for part in _PARTS:
        with suppress(FileNotFoundError):
            path.with_name(path.name + part).rename(path.with_name(name + part))
    path.with_name(f"{path.name}-shm").unlink(missing_ok=True)  # only an index of the log
    complete.rename(path)
    _sync(path.parent)
    _prune(path)


def _prune(path: Path) -> None:
    name = re.compile(re.escape(path.name) + r"\.damaged-\d{8}T\d{6}Z(-\d+)?")
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
