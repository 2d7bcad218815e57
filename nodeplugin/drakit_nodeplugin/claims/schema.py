"""
The schema of a checkpoint's database: how it is made, recognised, and brought to the present one.

Version 4 is the present one; version 3 has the same tables, but its rows knew no CDI devices of
others; version 2 knew no endpoints, and could not tell a share from admin access by its index;
version 1 had neither generations nor owners. A database is recognised without a write, so that a
later version, or another program's, stays as it is. What stands in the rows is :mod:`.rows`' and
:mod:`.endpointrows`' business, whether they are sound :mod:`.soundness`'.

Functions block. It must not know asyncio, or what claims are for.
"""

from __future__ import annotations

import sqlite3
import stat
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from drakit_nodeplugin.claims import rows
from drakit_nodeplugin.claims.holds import devices_of
from drakit_nodeplugin.claims.stored import load

__all__ = (
    "SCHEMA_VERSION",
    "NewerVersionError",
    "UnfitError",
    "connect",
    "connect_reading",
    "create",
    "has_log",
    "is_empty",
    "migrate",
    "recognise",
)

SCHEMA_VERSION = 4
"""To be raised for a new field of :mod:`.stored`, too: earlier versions could not read its rows."""

_APPLICATION_ID = 0x44524B54
"""``DRKT``: tells our databases from those of other programs (SQLite's ``application_id``)."""

BUSY_SECONDS = 5.0
"""How long a writer waits for the process of a rolling update that holds the database."""

_HEADER_BYTES = 100
_MAGIC = b"SQLite format 3\0"

# Databases are recognised by these words: a change of a blank is a change of the version.
_CLAIMS = (
    """CREATE TABLE meta (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE claims (
    id INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, state TEXT NOT NULL, boot_id TEXT NOT NULL,
    generation INTEGER NOT NULL
)""",
    """CREATE TABLE bodies (
    id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, body BLOB NOT NULL
)""",
)
"""Versions from 2 on have them in common."""

_DEVICES_3 = (
    """CREATE TABLE devices (
    claim INTEGER NOT NULL, pool TEXT NOT NULL, device TEXT NOT NULL, hold TEXT NOT NULL,
    PRIMARY KEY (claim, pool, device, hold)
) WITHOUT ROWID""",
    """CREATE UNIQUE INDEX exclusive_device ON devices (pool, device) WHERE hold = 'exclusive'""",
    """CREATE INDEX shared_device ON devices (pool, device) WHERE hold = 'share'""",
    """CREATE TABLE endpoints (
    name TEXT PRIMARY KEY, checksum INTEGER NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID""",
)

_DEVICES_2 = (
    """CREATE TABLE devices (
    claim INTEGER NOT NULL, pool TEXT NOT NULL, device TEXT NOT NULL, exclusive INTEGER NOT NULL,
    PRIMARY KEY (claim, pool, device, exclusive)
) WITHOUT ROWID""",
    """CREATE UNIQUE INDEX exclusive_device ON devices (pool, device) WHERE exclusive = 1""",
)

_TABLES_1 = (
    """CREATE TABLE claims (
    uid TEXT PRIMARY KEY, state TEXT NOT NULL, boot_id TEXT NOT NULL,
    body BLOB NOT NULL, checksum INTEGER NOT NULL
) WITHOUT ROWID""",
    """CREATE TABLE devices (
    uid TEXT NOT NULL REFERENCES claims (uid) ON DELETE CASCADE,
    pool TEXT NOT NULL, device TEXT NOT NULL, exclusive INTEGER NOT NULL
)""",
    """CREATE INDEX devices_of_claim ON devices (uid)""",
    """CREATE UNIQUE INDEX exclusive_device ON devices (pool, device) WHERE exclusive = 1""",
)

_TABLES: Mapping[int, frozenset[str]] = {
    1: frozenset(_TABLES_1),
    2: frozenset((*_CLAIMS, *_DEVICES_2)),
    3: frozenset((*_CLAIMS, *_DEVICES_3)),
    4: frozenset((*_CLAIMS, *_DEVICES_3)),
}


class NewerVersionError(Exception):
    """A later drakit wrote the database."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"it has schema version {version}, this drakit knows up to {SCHEMA_VERSION}; install "
            f"the later version again, or remove the file and restart the node plugin: it rebuilds "
            f"the claims from what the kubelet, the CDI files and the API server know"
        )


class UnfitError(Exception):
    """The file is no sound database of ours; the text is a sentence without its subject."""

    def __init__(self, reason: str, *, foreign: bool = False) -> None:
        super().__init__(reason)
        self.foreign = foreign
        """Something of somebody else, and not damage of ours."""


def connect(path: Path) -> sqlite3.Connection:
    """Open a database for writing, durably; it may be new, or of any version."""
    connection = sqlite3.connect(
        path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reading(path: Path) -> sqlite3.Connection:
    """Open a database so that neither it nor its log is changed, also beside a writer."""
    mode = "mode=ro"
    if not has_log(path):
        # Nobody has it open: SQLite would make its two files beside it, and leave them.
        mode += "&immutable=1"
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=BUSY_SECONDS, isolation_level=None
    )


def has_log(path: Path) -> bool:
    """Tell whether a database has a log: somebody has it open, or was killed."""
    return _size(path.with_name(f"{path.name}-wal")) > 0


def is_empty(path: Path) -> bool:
    """Tell whether SQLite takes a file for an empty database: then it removes the log beside it."""
    return _size(path) <= 1


def recognise(path: Path) -> int:
    """
    Tell the schema version of what is at a path, without a write; 0 is a new database.

    Raises :class:`NewerVersionError`, :class:`UnfitError`, sqlite3.Error, OSError.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnfitError("it is no file", foreign=True)
    except FileNotFoundError:
        pass
    if is_empty(path):
        if has_log(path):
            raise UnfitError("it is empty, but its log is not")
        if not _size(path):
            return 0
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if header.startswith(_MAGIC) and len(header) == _HEADER_BYTES:
        # What the log says comes first, but a log cannot be read without a trace beside the file.
        version, application = header[60:64], header[68:72]
        _version(int.from_bytes(version, signed=True), int.from_bytes(application))
    elif not has_log(path):
        raise UnfitError("it is no SQLite database")
    connection = connect_reading(path)
    try:
        return _recognise(connection)
    finally:
        connection.close()


def create(connection: sqlite3.Connection, *, generation: int = 0) -> None:
    """
    Make the present schema, within the transaction of the caller.

    Generations begin above `generation`, and above the milliseconds of the clock: where a database
    was lost, work that knows a generation of it must not meet the same number again.
    """
    for statement in (*_CLAIMS, *_DEVICES_3):
        connection.execute(statement)
    first = max(generation, time.time_ns() // 1_000_000)
    connection.executemany("INSERT INTO meta VALUES (?, ?)", [("generation", first), ("opens", 0)])
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """
    Bring a sound database of an earlier version to the present one, in the caller's transaction.

    No claim is left out: where an earlier version has let a share in beside an exclusive claim,
    both are prepared, and stay so.
    """
    # What version 3 has written is read as it is.
    if version == 1:
        _migrate_1(connection)
    elif version == 2:
        _migrate_2(connection)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _migrate_2(connection: sqlite3.Connection) -> None:
    connection.execute("DROP TABLE devices")
    for statement in _DEVICES_3:
        connection.execute(statement)
    bodies = connection.execute("SELECT id, checksum, body FROM bodies")
    connection.executemany(
        "INSERT INTO devices VALUES (?, ?, ?, ?)",
        (
            (id_, *device)
            for id_, expected, body in bodies
            for device in devices_of(load(body, expected=expected))
        ),
    )


def _migrate_1(connection: sqlite3.Connection) -> None:
    stored = connection.execute("SELECT body, checksum FROM claims").fetchall()
    claims = [load(body, expected=expected) for body, expected in stored]
    for table in ("devices", "claims"):
        connection.execute(f"DROP TABLE {table}")
    create(connection)
    first = rows.next_generations(connection, len(claims))
    rows.adopt(
        connection,
        [replace(claim, generation=number) for number, claim in enumerate(claims, start=first)],
    )


def _recognise(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    version = _version(version, application)
    found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
    tables = frozenset[str](statement for (statement,) in found)
    if version == 0 and not tables:
        return 0
    if tables == _TABLES.get(version):
        return version
    if application == _APPLICATION_ID or tables & frozenset[str]().union(*_TABLES.values()):
        raise UnfitError(f"its tables are not those of schema version {version}")
    raise UnfitError("it is a database of another program", foreign=True)


def _version(version: int, application: int) -> int:
    if application == _APPLICATION_ID and version > SCHEMA_VERSION:
        raise NewerVersionError(version)
    if application not in (0, _APPLICATION_ID):
        raise UnfitError("it is a database of another program", foreign=True)
    return version


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
