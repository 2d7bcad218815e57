"""
The schema of a checkpoint's database: how it is made, recognised, and brought to the present one.

Version 2 is the present one; version 1 had neither generations nor owners. A later version is
recognised and refused before anything is written. What stands in the rows is :mod:`.rows`'
business, what becomes of a damaged database :mod:`.salvage`'s.

Functions block. It must not know asyncio, or what claims are for.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from drakit_nodeplugin.claims import rows
from drakit_nodeplugin.claims.stored import load

__all__ = ("APPLICATION_ID", "SCHEMA_VERSION", "connect", "create", "migrate")

SCHEMA_VERSION = 2

APPLICATION_ID = 0x44524B54
"""``DRKT``: tells our databases from those of other programs (SQLite's ``application_id``)."""

BUSY_SECONDS = 5.0
"""How long a writer waits for the process of a rolling update that holds the database."""

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE claims (
    id INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, state TEXT NOT NULL, boot_id TEXT NOT NULL,
    generation INTEGER NOT NULL
);
CREATE TABLE bodies (
    id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE TABLE devices (
    claim INTEGER NOT NULL, pool TEXT NOT NULL, device TEXT NOT NULL, exclusive INTEGER NOT NULL,
    PRIMARY KEY (claim, pool, device, exclusive)
) WITHOUT ROWID;
CREATE UNIQUE INDEX exclusive_device ON devices (pool, device) WHERE exclusive = 1;
"""


def connect(path: Path) -> sqlite3.Connection:
    """Open a database for writing, durably; it may be empty, or of any version."""
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


def create(connection: sqlite3.Connection, *, generation: int = 0) -> None:
    """
    Make the present schema, within the transaction of the caller.

    Generations begin above `generation`, and above the milliseconds of the clock: where a database
    was lost, work that knows a generation of it must not meet the same number again.
    """
    for statement in _TABLES.split(";"):
        connection.execute(statement)
    first = max(generation, time.time_ns() // 1_000_000)
    connection.executemany("INSERT INTO meta VALUES (?, ?)", (("generation", first), ("opens", 0)))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def migrate(connection: sqlite3.Connection) -> None:
    """Bring version 1 to the present one, within the transaction of the caller."""
    stored = connection.execute("SELECT body, checksum FROM claims").fetchall()
    claims = [load(body, expected=expected) for body, expected in stored]
    for table in ("devices", "claims"):
        connection.execute(f"DROP TABLE {table}")
    create(connection)
    rows.write(connection, claims, owner="", alone=True)
