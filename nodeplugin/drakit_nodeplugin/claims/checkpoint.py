"""
The checkpoint: which claims of a driver this node has begun to prepare, and with which devices.

SQLite in WAL mode with ``synchronous=FULL``: one transaction and one flush a batch, whatever its
size; after a crash it holds the whole batch or nothing of it. A unique index holds the devices
that one claim alone may have. Whether an entry must be prepared again is decided in
:mod:`.engine`.

It must not know gRPC, the API server, endpoints, CDI files, or the types of the engine: rows are
made of :mod:`.stored` alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from drakit_nodeplugin.claims.stored import (
    DamagedRowError,
    StoredClaim,
    StoredDevice,
    checksum,
    dump,
    load,
)

__all__ = ("Checkpoint", "CheckpointError", "CheckpointTooNewError", "HeldDevice")

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1

_SCHEMA = f"""
CREATE TABLE claims (
    uid TEXT PRIMARY KEY, state TEXT NOT NULL, boot_id TEXT NOT NULL,
    body BLOB NOT NULL, checksum INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE devices (
    uid TEXT NOT NULL REFERENCES claims (uid) ON DELETE CASCADE,
    pool TEXT NOT NULL, device TEXT NOT NULL, exclusive INTEGER NOT NULL
);
CREATE INDEX devices_of_claim ON devices (uid);
CREATE UNIQUE INDEX exclusive_device ON devices (pool, device) WHERE exclusive = 1;
PRAGMA user_version = {SCHEMA_VERSION};
"""

_CHUNK = 500
"""UIDs per SELECT: SQLite binds at most 32,766 variables, and a pod has at most a few claims."""

BUSY_SECONDS = 5.0
"""How long a writer waits for the process of a rolling update that holds the database."""

ResultT = TypeVar("ResultT")


class CheckpointError(Exception):
    """The checkpoint could not be read or written; nothing of the batch was stored."""


class CheckpointTooNewError(CheckpointError):
    """A later drakit wrote the database; this one would destroy what it cannot read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldDevice:
    """A device that a batch wanted, and the claim that has it."""

    device: StoredDevice
    holder: StoredClaim


class Checkpoint:
    """The prepared claims of one driver. All methods are safe to call concurrently."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: str | None = None
        """Why an earlier database was set aside when this one was opened; None if none was."""
        self.broken: str | None = None
        """Damage that was met since: only opening it again, at a restart, can set it aside."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """
        Open the database; set a damaged one aside and begin a new one.

        Raises :class:`CheckpointTooNewError`, and :class:`CheckpointError` if there is no space or
        no permission: those are no damage, and setting the file aside would lose the claims.
        """
        await self._run(self._open)

    async def close(self) -> None:
        """Close the database; what was answered is on disk already."""
        if self._connection is not None:
            await self._run(self._close)
        self._executor.shutdown(wait=False)

    async def find(self, uids: Collection[str]) -> Mapping[str, StoredClaim]:
        """Give the claims that are known of these."""
        return await self._run(lambda: {claim.uid: claim for claim in self._select(list(uids))})

    async def all(self) -> list[StoredClaim]:
        """Give every claim."""
        return await self._run(lambda: list(self._rows("SELECT uid, body, checksum FROM claims")))

    async def in_state(self, state: str) -> list[StoredClaim]:
        """Give the claims in one state."""
        query = "SELECT uid, body, checksum FROM claims WHERE state = ?"
        return await self._run(lambda: list(self._rows(query, (state,))))

    async def uids(self, *, state: str, boot_id: str) -> set[str]:
        """Give the UIDs of the claims in one state, of one boot."""
        query = "SELECT uid FROM claims WHERE state = ? AND boot_id = ?"
        return await self._run(
            lambda: {uid for (uid,) in self._database.execute(query, (state, boot_id))}
        )

    async def begin(self, claims: Collection[StoredClaim]) -> Mapping[str, HeldDevice]:
        """
        Write claims that are to be prepared, in one transaction.

        Claims that want a device which another claim holds are not written; they are answered by
        UID with the holder.
        """
        return await self._run(lambda: self._begin(claims))

    async def write(self, claims: Collection[StoredClaim]) -> None:
        """Write new states of claims that were begun before, in one transaction."""
        if claims:
            await self._run(lambda: self._write(claims))

    async def delete(self, uids: Collection[str]) -> None:
        """Forget claims, in one transaction; their devices are free then."""
        if uids:
            await self._run(lambda: self._delete(uids))

    # ------------------------------------------------------------ within the writer's thread

    @property
    def _database(self) -> sqlite3.Connection:
        if self._connection is None:
            raise CheckpointError(f"the checkpoint {self.path} is not open")
        return self._connection

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, context.run, work)
        except sqlite3.Error as error:
            # "Corrupt" and "not a database" come as the bare class; its subclasses, such as
            # OperationalError for no space or no permission, are no damage.
            if type(error) is sqlite3.DatabaseError:
                self.broken = f"the checkpoint {self.path} is damaged: {error}"
            raise CheckpointError(f"the checkpoint {self.path} failed: {error}") from error

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._connection = self._connect()
        except OSError as error:
            raise CheckpointError(f"the folder of {self.path} cannot be made: {error}") from error
        except (sqlite3.DatabaseError, DamagedRowError) as error:
            if isinstance(error, sqlite3.OperationalError):
                raise CheckpointError(
                    f"the checkpoint {self.path} cannot be opened: {error}; see to space and "
                    f"permissions of its folder"
                ) from error
            self._set_aside(str(error))
            self._connection = self._connect()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                connection.execute(f"PRAGMA {pragma}")
            self._check(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise CheckpointTooNewError(
                f"the checkpoint {self.path} has schema version {version}, this drakit knows up to "
                f"{SCHEMA_VERSION}; install the later version again, or drain the node and remove "
                f"the file"
            )
        if version == 0:
            connection.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")
            return
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        for uid, body, expected in connection.execute("SELECT uid, body, checksum FROM claims"):
            try:
                load(body, expected=expected)
            except DamagedRowError as error:
                raise DamagedRowError(f"the row of claim {uid}: {error}") from error

    def _set_aside(self, reason: str) -> None:
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
        for suffix in ("", "-wal", "-shm"):
            part = self.path.with_name(self.path.name + suffix)
            if part.exists():
                part.rename(aside.with_name(aside.name + suffix))
        self.damage = f"{reason}; it was set aside as {aside.name}"
        logger.error(
            "checkpoint is damaged and was set aside",
            extra={"path": str(self.path), "aside": aside.name, "reason": reason},
        )

    def _close(self) -> None:
        # The last one to close writes the log back and removes it: nothing temporary is left.
        self._database.close()
        self._connection = None

    def _rows(self, query: str, values: Iterable[str] = ()) -> Iterable[StoredClaim]:
        for uid, body, expected in self._database.execute(query, tuple(values)):
            try:
                yield load(body, expected=expected)
            except DamagedRowError as error:
                self.broken = f"the checkpoint {self.path} is damaged at claim {uid}: {error}"
                raise CheckpointError(
                    f"{self.broken}; the node plugin is restarted and sets it aside"
                ) from error

    def _select(self, uids: list[str]) -> Iterable[StoredClaim]:
        for start in range(0, len(uids), _CHUNK):
            chunk = uids[start : start + _CHUNK]
            marks = ",".join("?" * len(chunk))
            # Only question marks are put into the text.
            query = f"SELECT uid, body, checksum FROM claims WHERE uid IN ({marks})"  # noqa: S608
            yield from self._rows(query, chunk)

    def _begin(self, claims: Collection[StoredClaim]) -> Mapping[str, HeldDevice]:
        held: dict[str, HeldDevice] = {}
        with _transaction(self._database):
            for claim in claims:
                holder = self._holder(claim)
                if holder is None:
                    self._put(claim)
                else:
                    held[claim.uid] = holder
        return held

    def _holder(self, claim: StoredClaim) -> HeldDevice | None:
        query = (
            "SELECT uid FROM devices WHERE pool = ? AND device = ? AND exclusive = 1 AND uid != ?"
        )
        for device in claim.devices:
            if not device.exclusive:
                continue
            row = self._database.execute(query, (device.pool, device.device, claim.uid)).fetchone()
            if row is not None:
                (holder,) = self._select([row[0]])
                return HeldDevice(device=device, holder=holder)
        return None

    def _write(self, claims: Collection[StoredClaim]) -> None:
        with _transaction(self._database):
            for claim in claims:
                self._put(claim)

    def _put(self, claim: StoredClaim) -> None:
        body = dump(claim)
        self._database.execute(
            "INSERT INTO claims VALUES (?, ?, ?, ?, ?) ON CONFLICT (uid) DO UPDATE SET "
            "state = excluded.state, boot_id = excluded.boot_id, body = excluded.body, "
            "checksum = excluded.checksum",
            (claim.uid, claim.state, claim.boot_id, body, checksum(body)),
        )
        self._database.execute("DELETE FROM devices WHERE uid = ?", (claim.uid,))
        self._database.executemany(
            "INSERT INTO devices VALUES (?, ?, ?, ?)",
            {(claim.uid, d.pool, d.device, int(d.exclusive)) for d in claim.devices},
        )

    def _delete(self, uids: Collection[str]) -> None:
        with _transaction(self._database):
            self._database.executemany("DELETE FROM claims WHERE uid = ?", [(u,) for u in uids])


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[None]:
    """One write transaction; taken at once, so that a second process waits and does not fail."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk has rolled it back already
            connection.execute("ROLLBACK")
        raise
