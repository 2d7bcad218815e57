"""
The schema of a checkpoint database: how a database is created, identified and checked.

A database contains two versions:

    readable from   the oldest drakit that may use it: SQLite's ``user_version``, in the header
    version         the newest drakit that has changed it: a row of the table ``meta``

drakit reads and writes every file whose readable-from is at most its own version, for example after
a downgrade. A later version may therefore only add tables, indexes, and row fields with a default.
The older version leaves added tables unchanged, and drops added fields from each row that it
writes. The later version must handle both. Any other change requires an increase of
:data:`READABLE_FROM`.

The database stores a claim several times (head, body, devices, counters), so that queries are fast.
All copies must agree. :mod:`.rows` reads and writes rows; :mod:`.quarantine` handles damaged
databases.

Functions block. The module does not depend on asyncio.
"""

from __future__ import annotations

import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from drakit.layout import private_file
from drakit_nodeplugin.state.holds import counters_of, devices_of
from drakit_nodeplugin.state.records import DamagedRowError, load

VERSION = 3
"""The current schema version. Increase it in each release that changes tables or rows."""

READABLE_FROM = 2
"""The oldest version that can use the databases of this one. Increase it when a table, field or
value changes its meaning or is removed, and when a state or hold is added. Version 1 lets two
instances of a driver write at the same time."""

_APPLICATION_ID = 0x44524B54
"""``DRKT``: distinguishes drakit's databases from those of other programs (``application_id``)."""

BUSY_SECONDS = 5.0
"""How long a writer waits for another program that is reading the database."""

# These strings identify a database: any change, even of whitespace, changes the schema. Primary key
# columns must come first, because otherwise the integrity check of SQLite 3.40 reports NULL values
# in columns that do not have any.
_STATEMENTS = (
    """CREATE TABLE meta (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE claims (
    id INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, state TEXT NOT NULL, boot_id TEXT NOT NULL,
    generation INTEGER NOT NULL
)""",
    """CREATE TABLE bodies (
    id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, body BLOB NOT NULL
)""",
    """CREATE TABLE devices (
    claim INTEGER NOT NULL, pool TEXT NOT NULL, device TEXT NOT NULL, hold TEXT NOT NULL,
    amounts TEXT NOT NULL, PRIMARY KEY (claim, pool, device, hold)
) WITHOUT ROWID""",
    """CREATE UNIQUE INDEX exclusive_device ON devices (pool, device) WHERE hold = 'exclusive'""",
    """CREATE INDEX shared_device ON devices (pool, device, amounts) WHERE hold = 'share'""",
    """CREATE TABLE counters (
    pool TEXT NOT NULL, counter_set TEXT NOT NULL, device TEXT NOT NULL, claim INTEGER NOT NULL,
    amounts TEXT NOT NULL, PRIMARY KEY (pool, counter_set, device, claim)
) WITHOUT ROWID""",
    """CREATE INDEX counters_of_claim ON counters (claim)""",
    """CREATE TABLE endpoints (
    name TEXT PRIMARY KEY, checksum INTEGER NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID""",
)


class NewerVersionError(Exception):
    """A later version of drakit wrote the database, and this version cannot use it."""

    def __init__(self, readable_from: int) -> None:
        super().__init__(
            f"it needs schema version {readable_from} or later, and this drakit has version "
            f"{VERSION}; install the later version again, or remove the file and restart the node "
            f"plugin: it rebuilds the claims from the kubelet, the CDI files and the API server"
        )


class UnfitError(Exception):
    """The file is not an intact drakit database. The message is a sentence without its subject."""

    def __init__(self, reason: str, *, foreign: bool = False) -> None:
        super().__init__(reason)
        self.foreign = foreign
        """Whether the file belongs to another program."""


def connect(path: Path) -> sqlite3.Connection:
    """Open a database for writing, durably. The file may be new."""
    connection = sqlite3.connect(
        path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        # SQLite creates the file with the umask, and its two companion files with the mode of the
        # file.
        private_file(path)
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reading(path: Path) -> sqlite3.Connection:
    """Open a database without changing it or its log, even during writes."""
    mode = "mode=ro"
    if not has_log(path):
        # No process has the database open. Without this option, SQLite would create its two
        # companion files, and leave them behind.
        mode += "&immutable=1"
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=BUSY_SECONDS, isolation_level=None
    )


def has_log(path: Path) -> bool:
    """Return whether a database has a log. If so, a process has it open or was killed."""
    return _size(path.with_name(f"{path.name}-wal")) > 0


def is_empty(path: Path) -> bool:
    """Return whether SQLite considers a file an empty database, and would remove the log next to
    it."""
    return _size(path) <= 1


def recognize(path: Path) -> int:
    """
    Return the version of the database at a path, or 0 for a new database. Changes nothing, so that
    a database that this version must not use remains unchanged.

    Raises :class:`NewerVersionError`, :class:`UnfitError`, sqlite3.Error, OSError.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnfitError("it is not a regular file", foreign=True)
    except FileNotFoundError:
        pass
    if is_empty(path):
        if has_log(path):
            raise UnfitError("it is empty, but its log is not")
        return 0
    connection = connect_reading(path)
    try:
        return _recognize(connection)
    finally:
        connection.close()


def create(connection: sqlite3.Connection) -> None:
    """
    Create the schema in the caller's transaction.

    Generations begin at the current time in milliseconds. If a database was lost, work that knows
    one of its generations must not encounter the same number again.
    """
    for statement in _STATEMENTS:
        connection.execute(statement)
    meta = [("version", VERSION), ("generation", time.time_ns() // 1_000_000)]
    connection.executemany("INSERT INTO meta VALUES (?, ?)", meta)
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {READABLE_FROM}")


def upgrade(connection: sqlite3.Connection, version: int) -> None:
    """Mark a database of an earlier version as one of this version, in the caller's transaction.
    Instances of a version before :data:`READABLE_FROM` can no longer use it."""
    if version < VERSION:
        connection.execute("UPDATE meta SET value = ? WHERE name = 'version'", (VERSION,))
        connection.execute(f"PRAGMA user_version = {READABLE_FROM}")


def _readable_from(connection: sqlite3.Connection) -> int:
    """Return the oldest version that can use a database."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return version


def problems(connection: sqlite3.Connection) -> Iterator[str]:
    """
    Yield the problems of a database. May also raise sqlite3.Error.

    Does not check endpoint rows, because damaged ones are only dropped.
    """
    yield from _integrity(connection)
    generation = 0
    # Index rows that remain in these sets at the end do not match any body.
    devices: set[tuple[object, ...]] = set(
        connection.execute("SELECT claim, pool, device, hold, amounts FROM devices")
    )
    counters: set[tuple[object, ...]] = set(
        connection.execute("SELECT claim, pool, counter_set, device, amounts FROM counters")
    )
    # Read the rows separately, because a join with the devices would repeat the body for each
    # device.
    heads = connection.execute(
        "SELECT id, uid, state, boot_id, generation, checksum, body "
        "FROM claims LEFT JOIN bodies USING (id) ORDER BY id"
    )
    sound = True
    for id_, uid, *head, expected, body in heads:
        try:
            claim = load(body, expected=expected)
        except DamagedRowError as error:
            yield f"the row of claim {uid}: {error}"
            sound = False
            continue
        generation = max(generation, claim.generation)
        if [uid, *head] != [claim.uid, claim.state, claim.boot_id, claim.generation]:
            yield f"the row of claim {uid}: its columns do not match its body"
        devices ^= {(id_, *held) for held in devices_of(claim)}
        counters ^= {(id_, *taken) for taken in counters_of(claim)}
    if sound and devices:
        yield "its device rows do not match its claims"
    if sound and counters:
        yield "its counter rows do not match its claims"
    if connection.execute(
        "SELECT 1 FROM bodies WHERE id NOT IN (SELECT id FROM claims)"
    ).fetchone():
        yield "there are bodies without a claim"
    yield from _numbers(connection, generation)


def _recognize(connection: sqlite3.Connection) -> int:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    oldest = _readable_from(connection)
    _check_usable(oldest, application)
    found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
    tables = frozenset[str](statement for (statement,) in found)
    if oldest == 0 and not tables:
        return 0
    ours = frozenset(_STATEMENTS)
    if application != _APPLICATION_ID and not tables & ours:
        raise UnfitError("it is a database of another program", foreign=True)
    version = _version(connection) if oldest > 0 and ours <= tables else 0
    # A later version may have added tables.
    if version < 1 or (version <= VERSION and tables != ours):
        raise UnfitError("its tables are not those of a checkpoint")
    return version


def _version(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT value FROM meta WHERE name = 'version'").fetchone()
    return row[0] if row and isinstance(row[0], int) else 0


def _check_usable(readable_from: int, application: int) -> None:
    if application == _APPLICATION_ID and readable_from > VERSION:
        raise NewerVersionError(readable_from)
    if application not in (0, _APPLICATION_ID):
        raise UnfitError("it is a database of another program", foreign=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _integrity(connection: sqlite3.Connection) -> Iterator[str]:
    for (verdict,) in connection.execute("PRAGMA integrity_check(10)"):
        # The first problem follows a heading.
        yield from (line for line in verdict.splitlines() if line != "ok" and line[:3] != "***")


def _numbers(connection: sqlite3.Connection, generation: int) -> Iterator[str]:
    numbers = dict(connection.execute("SELECT name, value FROM meta"))
    value = numbers.get("generation")
    if not isinstance(value, int) or value < generation:
        yield f"its counter of generation is {value!r}, but must be {generation} or more"
