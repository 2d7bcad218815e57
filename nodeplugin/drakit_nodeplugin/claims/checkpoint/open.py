"""
How a checkpoint's database is opened, in whatever state its file is.

1. what a crash has cut of an earlier salvage is finished
2. the file is recognized without a write: one that only later versions can use stays unchanged
3. every row is checked
4. what is damaged, or not ours, is set aside, and all rows that are still readable are salvaged

Only one process at a time does this for a folder. What is no damage (no space, no permission, a
file system that is read-only) sets nothing aside: it would lose the claims. Nor does a damaged row
of an endpoint, which is dropped. Functions block. It must not know asyncio, or what claims are for.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from drakit.layout import private_directory, private_file
from drakit_nodeplugin.claims import aside
from drakit_nodeplugin.claims.checkpoint import endpoint_rows as endpointrows
from drakit_nodeplugin.claims.checkpoint import rows, schema, soundness
from drakit_nodeplugin.claims.checkpoint.records import DamagedRowError
from drakit_nodeplugin.claims.checkpoint.salvage import Salvage, salvage
from drakit_nodeplugin.claims.checkpoint.waltail import lost_transactions

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

_SURROUNDINGS = frozenset(
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
"""Errors of disk, memory, permissions and other processes: they say nothing of the database."""

DATABASE_ERRORS = (sqlite3.Error, DamagedRowError, UnicodeDecodeError)
"""What reading a database raises; the last one where SQLite's message has damaged text in it."""


class CheckpointError(Exception):
    """The checkpoint could not be read or written; nothing of the batch was stored."""


class CheckpointTooNewError(CheckpointError):
    """A later drakit wrote the database, and this one cannot use it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A database that can be used."""

    connection: sqlite3.Connection
    opens: int
    """How often it has been opened, this time included: another number later means that another
    process has opened it since."""

    damage: str | None
    """What was set aside, and why, until somebody says that the rest is rebuilt."""

    salvaged: Salvage | None


def is_damage(error: Exception) -> bool:
    """Tell an error that says that the database itself is damaged."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # a row's checksum, or text that is none
        return isinstance(error, DamagedRowError | UnicodeDecodeError | sqlite3.OperationalError)
    return code == sqlite3.SQLITE_IOERR_SHORT_READ or code & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    )


def open_database(path: Path, *, traces: Callable[[], str | None]) -> Opened:
    """
    Open a database for a daemon; raise :class:`CheckpointError`.

    `traces` is asked where there is none, or an empty one: what it answers is a sign that there was
    one, and the new one counts as the rest of a damaged one then.
    """
    try:
        private_directory(path.parent)
        with _only_one(path.parent):
            for file in path.parent.glob(f"{path.name}*"):  # including its log, and damaged ones
                private_file(file)
            aside.finish(path)
            try:
                return _open(path, traces)
            except schema.UnfitError as error:
                _replace(path, str(error), foreign=error.foreign)
            except DATABASE_ERRORS as error:
                if _is_of_surroundings(error):
                    raise
                _replace(path, str(error), foreign=False)
            return _open(path, traces)
    except schema.NewerVersionError as error:
        raise CheckpointTooNewError(f"the checkpoint {path} cannot be opened: {error}") from error
    except (OSError, schema.UnfitError, *DATABASE_ERRORS) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be opened: {error}; see to space and permissions of its "
            f"folder"
        ) from error


def forget_damage(connection: sqlite3.Connection) -> None:
    """Take back what was remembered of damage, within the transaction of the caller."""
    connection.execute("DELETE FROM meta WHERE name = 'damage'")


def remembered_damage(connection: sqlite3.Connection) -> tuple[str | None, Salvage | None]:
    """Give what is remembered of damage that is not made up for, and of what was salvaged then."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'damage'").fetchone()
    if row is None:
        return None, None
    try:
        facts = json.loads(row[0])
        uids = frozenset(facts["lost_uids"])
        return facts["damage"], Salvage(kept=facts["kept"], lost=facts["lost"], lost_uids=uids)
    except (ValueError, TypeError, KeyError):
        return "it was damaged", None


def rewrite(connection: sqlite3.Connection, path: Path) -> None:
    """
    Write a database whose file was removed again, from a connection that still has it open.

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
    logger.error("checkpoint was removed and is written again", extra={"path": str(path)})


def _open(path: Path, traces: Callable[[], str | None]) -> Opened:
    version = schema.recognize(path)
    connection = schema.connect(path)
    try:
        lost = lost_transactions(connection, path.with_name(f"{path.name}-wal"))
        if lost:
            raise schema.UnfitError(f"{lost} transactions of its log cannot be read")
        with rows.transaction(connection):
            _bring_up(connection, version)
            if version == 0 and (trace := traces()) is not None:
                nothing = Salvage(kept=0, lost=0, lost_uids=frozenset())
                _remember(connection, f"it is missing or empty, but {trace}", nothing)
                logger.error("checkpoint was lost", extra={"path": str(path), "reason": trace})
            opens = rows.count_open(connection)
            damage, salvaged = remembered_damage(connection)
    except BaseException:
        connection.close()
        raise
    return Opened(connection=connection, opens=opens, damage=damage, salvaged=salvaged)


def _bring_up(connection: sqlite3.Connection, version: int) -> None:
    """Create or check a database; raise :class:`.schema.UnfitError` if it is damaged."""
    if version == 0:
        schema.create(connection)
        return
    problem = next(soundness.problems(connection), None)
    if problem is not None:
        raise schema.UnfitError(problem)
    damaged = endpointrows.damaged(connection)
    for name, reason in damaged.items():
        logger.warning(
            "damaged row of an endpoint is dropped",
            extra={"endpoint": str(name), "reason": reason},
        )
    endpointrows.forget(connection, damaged.keys())


def _replace(path: Path, reason: str, *, foreign: bool) -> None:
    name = aside.aside_name(path, foreign=foreign)
    damage = f"{reason}; it was set aside as {name}"
    with nullcontext() if foreign else _write_lock(path):
        salvaged = _salvage(path, aside.salvaging_path(path, name), damage)
        aside.put_in_place(path, name)
    logger.error(
        "checkpoint is damaged and was set aside",
        extra={
            "path": str(path),
            "aside": name,
            "reason": reason,
            "kept": salvaged.kept,
            "lost": salvaged.lost,
            "lost_claims": ", ".join(sorted(salvaged.lost_uids)),
        },
    )


def _salvage(path: Path, new: Path, damage: str) -> Salvage:
    aside.drop_unfinished(path)
    with closing(sqlite3.connect(new, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        with rows.transaction(connection):
            schema.create(connection)
            salvaged = salvage(path, connection)
            _remember(connection, damage, salvaged)
    private_file(new)
    return salvaged


def _remember(connection: sqlite3.Connection, damage: str, salvaged: Salvage) -> None:
    facts = {
        "damage": damage,
        "kept": salvaged.kept,
        "lost": salvaged.lost,
        "lost_uids": sorted(salvaged.lost_uids),
    }
    connection.execute("INSERT INTO meta VALUES ('damage', ?)", (json.dumps(facts),))


def _is_of_surroundings(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and not is_damage(error) and code & 0xFF in _SURROUNDINGS


@contextmanager
def _only_one(folder: Path) -> Generator[None]:
    """Lock a folder against other processes that open their checkpoint in it."""
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
    """Keep processes that still work on a damaged database from writing to it, if that goes."""
    connection: sqlite3.Connection | None = None
    # Nobody works on an empty file, and SQLite would remove the log beside it.
    if path.is_file() and not schema.is_empty(path):
        with suppress(sqlite3.Error):
            connection = sqlite3.connect(path, timeout=schema.BUSY_SECONDS, isolation_level=None)
            connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        if connection is not None:
            connection.close()
