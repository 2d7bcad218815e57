"""
Opens a checkpoint's database. A damaged or foreign file is quarantined and replaced first.

1. Finish a quarantine that a crash interrupted.
2. Identify the file without writing. A file that only later versions can use remains unchanged.
3. Check every row.
4. Quarantine a damaged or foreign file, and copy its intact rows.
5. Compare the CDI files with the rows. A row is written before its file and deleted after it, so a
   file without a row shows that rows were lost. If SQLite's log is damaged, SQLite reports no
   error, but reads the log only up to the damage.

**Quarantine.** The intact rows move to a new database, and the damaged database is kept for
analysis.

1. Copy the intact rows into a new database (``….salvaging``).
2. Rename it to mark it as complete (``….salvaged``).
3. Rename the damaged database to the name under which it is kept (``….damaged-<UTC>``).
4. Move the new database into place.

After a crash between steps 2 and 4, the next start finishes them, so no crash loses both databases.
A row is copied if its checksum is correct. Rows are read from both ends up to the damage.
:mod:`drakit_nodeplugin.claims.recovery` restores the rest.

Only the driver's active instance may call :func:`open_database`. Environment errors (no space, no
permission, a read-only file system) do not cause a quarantine, which would lose the claims. A
damaged row of an endpoint is only dropped. Functions block. The module does not depend on asyncio.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drakit.layout import private_directory, private_file
from drakit.text import plural
from drakit_nodeplugin.state import rows, schema
from drakit_nodeplugin.state.records import DamagedRowError, load, load_endpoint

logger = logging.getLogger(__name__)

DATABASE_ERRORS = (sqlite3.Error, DamagedRowError, UnicodeDecodeError)
"""Exceptions that can occur while a database is read. The last one occurs if a message from SQLite
contains damaged text."""

KEPT = 5
"""Number of damaged databases to keep. The oldest are removed first. Files of other programs are
never removed."""

_PARTS = ("-wal", "-journal", "")
_SALVAGING = ".salvaging"
_SALVAGED = ".salvaged"

_UNREADABLE = (sqlite3.Error, ValueError, MemoryError, OverflowError)
"""Exceptions that can occur while a damaged database is queried. Wrong sizes and damaged text cause
the last three."""


FilesWithoutEntry = Callable[[Collection[str]], Collection[str]]


class CheckpointError(Exception):
    """The checkpoint could not be read or written. No part of the batch was stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A usable database."""

    connection: sqlite3.Connection
    damage: str | None
    """The reason why entries were lost, until :func:`forget_damage` is called."""

    uids: set[str]
    """The claims that have a row."""


def is_damage(error: Exception) -> bool:
    """Return whether an error shows that the database itself is damaged."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # the error is a wrong checksum, or invalid UTF-8
        return isinstance(error, DamagedRowError | UnicodeDecodeError | sqlite3.OperationalError)
    return code == sqlite3.SQLITE_IOERR_SHORT_READ or code & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    )


def open_database(path: Path, *, without_entry: FilesWithoutEntry) -> Opened:
    """
    Open a database for a daemon. Raises :class:`CheckpointError`.

    `without_entry` is called with the UIDs of all entries, and returns the UIDs of other claims
    that have a CDI file. Any such claim shows that entries were lost. It may raise OSError.
    """
    try:
        private_directory(path.parent)
        for file in path.parent.glob(f"{path.name}*"):  # including the log, and damaged databases
            private_file(file)
        for complete in _with_suffix(path, _SALVAGED):  # from a quarantine that a crash interrupted
            _swap(path, complete)
        try:
            return _open(path, without_entry)
        except schema.UnfitError as error:
            _replace(path, str(error), foreign=error.foreign)
        except DATABASE_ERRORS as error:
            if _is_of_environment(error):
                raise
            _replace(path, str(error), foreign=False)
        return _open(path, without_entry)
    except schema.NewerVersionError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be opened: {error}") from error
    except (OSError, schema.UnfitError, *DATABASE_ERRORS) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be opened: {error}; check space and permissions of its "
            f"directory"
        ) from error


def remembered_damage(connection: sqlite3.Connection) -> str | None:
    """Return the reason why entries were lost, or None if no lost entries remain to be rebuilt."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'damage'").fetchone()
    return None if row is None else str(row[0])


def forget_damage(connection: sqlite3.Connection) -> None:
    """Delete the record that entries were lost, in the caller's transaction."""
    connection.execute("DELETE FROM meta WHERE name = 'damage'")


def rewrite(connection: sqlite3.Connection, path: Path) -> None:
    """
    Restore a database file that was removed, from a connection that still has it open.

    Does nothing if a file exists again. Raises OSError, sqlite3.Error.
    """
    private_directory(path.parent)
    if path.exists():
        return
    # SQLite would treat a log without its database as the log of the new database.
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    connection.execute("VACUUM INTO ?", (str(path),))
    private_file(path)
    logger.error("checkpoint file was removed and is restored", extra={"path": str(path)})


def _open(path: Path, without_entry: FilesWithoutEntry) -> Opened:
    version = schema.recognize(path)
    connection = schema.connect(path)
    try:
        with rows.transaction(connection):
            _bring_up(connection, version)
            uids = rows.uids(connection)
            damage = remembered_damage(connection)
            if damage is None and (lost := _lost(uids, without_entry)):
                damage = f"it has no entry for {plural(len(lost), 'CDI file')}"
                _record_damage(connection, damage)
                logger.error(
                    "checkpoint lost entries",
                    extra={"path": str(path), "reason": damage, "lost_claims": ", ".join(lost)},
                )
    except BaseException:
        connection.close()
        raise
    return Opened(connection=connection, damage=damage, uids=uids)


def _bring_up(connection: sqlite3.Connection, version: int) -> None:
    """Create or check a database. Raises :class:`.schema.UnfitError` if it is damaged."""
    if version == 0:
        schema.create(connection)
        return
    schema.upgrade(connection, version)
    problem = next(schema.problems(connection), None)
    if problem is not None:
        raise schema.UnfitError(problem)
    damaged = rows.damaged_endpoints(connection)
    for name, reason in damaged.items():
        logger.warning(
            "damaged endpoint row dropped",
            extra={"endpoint": str(name), "reason": reason},
        )
    rows.forget_endpoints(connection, damaged)


def _lost(uids: Collection[str], without_entry: FilesWithoutEntry) -> list[str]:
    """Return the claims that have a CDI file but no entry."""
    try:
        return sorted(without_entry(uids))
    except OSError:
        return []


def _replace(path: Path, reason: str, *, foreign: bool) -> None:
    """Quarantine the file at a path, and put a new database with its intact rows in its place."""
    name = _free_name(path, foreign=foreign)
    new, complete = (path.with_name(name + suffix) for suffix in (_SALVAGING, _SALVAGED))
    for suffix in (_SALVAGING, f"{_SALVAGING}-journal"):
        for unfinished in _with_suffix(path, suffix):
            unfinished.unlink()
    with closing(sqlite3.connect(new, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        with rows.transaction(connection):
            schema.create(connection)
            lost = copy_rows(path, connection)
            _record_damage(connection, f"{reason}; it was quarantined as {name}")
        kept = len(rows.uids(connection))
    private_file(new)
    new.rename(complete)
    _sync(path.parent)
    _swap(path, complete)
    logger.error(
        "checkpoint is damaged and was quarantined",
        extra={
            "path": str(path),
            "quarantined": name,
            "reason": reason,
            "kept": kept,
            "lost_claims": ", ".join(sorted(lost)),
        },
    )


def _record_damage(connection: sqlite3.Connection, damage: str) -> None:
    connection.execute("INSERT INTO meta VALUES ('damage', ?)", (damage,))


def _is_of_environment(error: Exception) -> bool:
    """Return whether the cause of an error is the disk, memory, permissions or other processes. The
    database itself may then be intact."""
    if not isinstance(error, sqlite3.OperationalError) or is_damage(error):
        return False
    return error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_ERROR


# ------------------------------------------------------------ quarantine


def copy_rows(path: Path, target: sqlite3.Connection) -> frozenset[str]:
    """
    Copy the intact rows of a damaged database into a new, empty one.

    Returns the claims that are named in the damaged database but whose rows were not copied. Raises
    sqlite3.Error if the target cannot be written, or the source cannot be opened.
    """
    # SQLite would wait for the other end of a pipe, and would remove the log next to an empty file.
    if not path.is_file() or schema.is_empty(path):
        return frozenset()
    copied: set[str] = set()
    named: set[str] = set()
    with closing(schema.connect_reading(path)) as source:
        # A damaged definition of one table must not hide the other tables.
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
            for name, expected, body in _up_to_damage(source, endpoints):
                with suppress(DamagedRowError):
                    rows.write_endpoints(target, [load_endpoint(name, body, expected=expected)])
    return frozenset(named - copied)


def _free_name(path: Path, *, foreign: bool) -> str:
    """Return the name under which a replaced file is kept."""
    kind = "foreign" if foreign else "damaged"
    stamp = f"{path.name}.{kind}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    used = {entry.name for entry in path.parent.iterdir()}
    names = (f"{stamp}-{number}" if number else stamp for number in range(len(used) + 1))
    return next(name for name in names if not any(entry.startswith(name) for entry in used))


def _up_to_damage(source: sqlite3.Connection, query: str) -> Iterator[tuple[Any, ...]]:
    with suppress(*_UNREADABLE):
        yield from source.execute(query)


def _swap(path: Path, complete: Path) -> None:
    name = complete.name.removesuffix(_SALVAGED)
    # Move the log first, because it must never be combined with the new database.
    for part in _PARTS:
        with suppress(FileNotFoundError):
            path.with_name(path.name + part).rename(path.with_name(name + part))
    # This file is only an index of the log.
    path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
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
