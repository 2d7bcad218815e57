"""
Opening a checkpoint's database, in whatever state its file is.

1. a quarantine that a crash interrupted is finished
2. the file is recognized without a write: one that only later versions can use stays unchanged
3. every row is checked
4. a damaged or foreign file is quarantined, and its sound rows are copied (:mod:`.quarantine`)
5. the CDI files are compared with the rows: an entry is written before its file and deleted after
   it, so a file without an entry shows that rows were lost. SQLite reports no error if its log is
   damaged, but reads it only up to the damage

Only one process at a time does this for a folder. Errors of the environment (no space, no
permission, a read-only file system) quarantine nothing: that would lose the claims. A damaged row
of an endpoint is only dropped. Functions block. It must not know asyncio, or what claims are for.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Generator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from drakit.layout import private_directory, private_file
from drakit_nodeplugin.claims.checkpoint import endpoint_rows, quarantine, rows, schema
from drakit_nodeplugin.claims.checkpoint.records import DamagedRowError

__all__ = (
    "DATABASE_ERRORS",
    "CheckpointError",
    "CheckpointTooNewError",
    "Opened",
    "forget_damage",
    "is_damage",
    "open_database",
    "remembered_damage",
    "rewrite",
)

logger = logging.getLogger(__name__)

_ENVIRONMENT = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_NOLFS,
        sqlite3.SQLITE_AUTH,
    }
)
"""Errors of disk, memory, permissions and other processes: the database itself may be sound."""

DATABASE_ERRORS = (sqlite3.Error, DamagedRowError, UnicodeDecodeError)
"""What reading a database raises; the last one if SQLite's message contains damaged text."""


FilesWithoutEntry = Callable[[Collection[str]], Collection[str]]


class CheckpointError(Exception):
    """The checkpoint could not be read or written; nothing of the batch was stored."""


class CheckpointTooNewError(CheckpointError):
    """A later drakit wrote the database, and this one cannot use it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A database that can be used."""

    connection: sqlite3.Connection
    opens: int
    """How often it has been opened, this time included: if the number changes later, another
    process has opened it."""

    damage: str | None
    """Why entries were lost, until :func:`forget_damage`."""


def is_damage(error: Exception) -> bool:
    """Return whether an error shows that the database itself is damaged."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # a row's checksum, or text that is none
        return isinstance(error, DamagedRowError | UnicodeDecodeError | sqlite3.OperationalError)
    return code == sqlite3.SQLITE_IOERR_SHORT_READ or code & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    )


def open_database(path: Path, *, files: FilesWithoutEntry) -> Opened:
    """
    Open a database for a daemon; raise :class:`CheckpointError`.

    `files` gets the UIDs of all entries, and returns those of other claims that have a CDI file; it
    may raise OSError.
    """
    try:
        private_directory(path.parent)
        with _only_one(path.parent):
            for file in path.parent.glob(f"{path.name}*"):  # including its log, and damaged ones
                private_file(file)
            quarantine.finish(path)
            try:
                return _open(path, files)
            except schema.UnfitError as error:
                _replace(path, str(error), foreign=error.foreign)
            except DATABASE_ERRORS as error:
                if _is_of_environment(error):
                    raise
                _replace(path, str(error), foreign=False)
            return _open(path, files)
    except schema.NewerVersionError as error:
        raise CheckpointTooNewError(f"the checkpoint {path} cannot be opened: {error}") from error
    except (OSError, schema.UnfitError, *DATABASE_ERRORS) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be opened: {error}; check space and permissions of its "
            f"directory"
        ) from error


def remembered_damage(connection: sqlite3.Connection) -> str | None:
    """Return why entries were lost that are not rebuilt yet."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'damage'").fetchone()
    return None if row is None else str(row[0])


def forget_damage(connection: sqlite3.Connection) -> None:
    """Forget that entries were lost, within the caller's transaction."""
    connection.execute("DELETE FROM meta WHERE name = 'damage'")


def rewrite(connection: sqlite3.Connection, path: Path) -> None:
    """
    Restore a database file that was removed, from a connection that still has it open.

    Does nothing if there is a file again. Raises OSError, sqlite3.Error.
    """
    private_directory(path.parent)
    with _only_one(path.parent):
        if path.exists():
            return
        # A log without its database would be taken for the log of the new one.
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        connection.execute("VACUUM INTO ?", (str(path),))
        private_file(path)
    logger.error("checkpoint file was removed and is restored", extra={"path": str(path)})


def _open(path: Path, files: FilesWithoutEntry) -> Opened:
    version = schema.recognize(path)
    connection = schema.connect(path)
    try:
        with rows.transaction(connection):
            _bring_up(connection, version)
            damage = remembered_damage(connection)
            if damage is None and (lost := _without_entry(connection, files)):
                damage = f"it has no entry for the CDI files of {len(lost)} claims"
                _remember(connection, damage)
                logger.error(
                    "checkpoint lost entries",
                    extra={"path": str(path), "reason": damage, "lost_claims": ", ".join(lost)},
                )
            opens = rows.count_open(connection)
    except BaseException:
        connection.close()
        raise
    return Opened(connection=connection, opens=opens, damage=damage)


def _bring_up(connection: sqlite3.Connection, version: int) -> None:
    """Create or check a database; raise :class:`.schema.UnfitError` if it is damaged."""
    if version == 0:
        schema.create(connection)
        return
    problem = next(schema.problems(connection), None)
    if problem is not None:
        raise schema.UnfitError(problem)
    damaged = endpoint_rows.damaged(connection)
    for name, reason in damaged.items():
        logger.warning(
            "damaged row of an endpoint is dropped",
            extra={"endpoint": str(name), "reason": reason},
        )
    endpoint_rows.forget(connection, damaged.keys())


def _without_entry(connection: sqlite3.Connection, files: FilesWithoutEntry) -> list[str]:
    """Return the claims that have a file and no entry. Within the caller's write transaction, no
    other process can delete the entry of a file that is listed."""
    try:
        return sorted(files(rows.uids(connection, state=None, boot_id=None)))
    except OSError:
        return []


def _replace(path: Path, reason: str, *, foreign: bool) -> None:
    """Quarantine the file at a path, and put a new database with its sound rows there."""
    name = quarantine.free_name(path, foreign=foreign)
    new = quarantine.new_path(path, name)
    with nullcontext() if foreign else _write_lock(path):
        quarantine.drop_unfinished(path)
        with closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            with rows.transaction(connection):
                schema.create(connection)
                lost = quarantine.copy_rows(path, connection)
                _remember(connection, f"{reason}; it was quarantined as {name}")
            kept = rows.count(connection)
        private_file(new)
        quarantine.replace(path, name)
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


def _remember(connection: sqlite3.Connection, damage: str) -> None:
    connection.execute("INSERT INTO meta VALUES ('damage', ?)", (damage,))


def _is_of_environment(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and not is_damage(error) and code & 0xFF in _ENVIRONMENT


@contextmanager
def _only_one(folder: Path) -> Generator[None]:
    """Lock a folder against other processes that open a checkpoint in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + schema.BUSY_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CheckpointError(
                        f"another process has been opening the checkpoint in {folder} for "
                        f"{schema.BUSY_SECONDS:g} s"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _write_lock(path: Path) -> Generator[None]:
    """Prevent other processes from writing to a damaged database, if its lock still works."""
    connection: sqlite3.Connection | None = None
    # No process uses an empty file, and SQLite would remove the log beside it.
    if path.is_file() and not schema.is_empty(path):
        with suppress(sqlite3.Error):
            connection = sqlite3.connect(path, timeout=schema.BUSY_SECONDS, isolation_level=None)
            connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        if connection is not None:
            connection.close()
