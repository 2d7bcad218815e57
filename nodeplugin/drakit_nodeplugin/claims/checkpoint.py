"""
The checkpoint: which claims of a driver this node has begun to prepare, and with which devices.

SQLite in WAL mode with ``synchronous=FULL``: one transaction and one flush a batch, whatever its
size; after a crash it holds the whole batch or nothing of it. Every write is compare-and-swap on a
row's generation, also across processes. Whether an entry must be prepared again is decided in
:mod:`.engine`.

This module has the writer's thread and what becomes of errors; :mod:`.rows` the statements,
:mod:`.schema` the tables, :mod:`.salvage` what happens to a damaged database. It must not know
gRPC, the API server, endpoints, CDI files, or the types of the engine.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from drakit_nodeplugin.claims import rows, schema
from drakit_nodeplugin.claims.rows import HeldDevice, Outcome
from drakit_nodeplugin.claims.stored import DamagedRowError, State, StoredClaim, load

__all__ = ("Checkpoint", "CheckpointError", "CheckpointTooNewError", "HeldDevice", "Outcome")

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class CheckpointError(Exception):
    """The checkpoint could not be read or written; nothing of the batch was stored."""


class CheckpointTooNewError(CheckpointError):
    """A later drakit wrote the database; this one would destroy what it cannot read."""


class Checkpoint:
    """The prepared claims of one driver. All methods are safe to call concurrently."""

    def __init__(self, path: Path, *, owner: str = "") -> None:
        self.path = path
        self.owner = owner
        """Stands in every row that is written here."""
        self.damage: str | None = None
        """Why an earlier database was set aside when this one was opened; None if none was."""
        self.broken: str | None = None
        """Damage that was met since: only opening it again, at a restart, can set it aside."""
        self.alone = True
        """Whether no other process has opened the database since we did, as of the last write."""
        self.on_transaction: Callable[[float], None] | None = None
        """Called with the seconds of each write transaction, in the writer's thread."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._connection: sqlite3.Connection | None = None
        self._opens = 0

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
        wanted = list(uids)
        return await self._run(
            lambda: {claim.uid: claim for claim in rows.claims_of(self._database, wanted)}
        )

    async def pages(self, size: int = 500) -> AsyncIterator[list[StoredClaim]]:
        """
        Give every claim, by UID, some at a time: memory stays bounded.

        Each page is what is stored at its moment; claims that come or go meanwhile may be missed.
        """
        after = ""
        while page := await self._run(partial(self._page, after, size)):
            yield page
            after = page[-1].uid

    async def in_state(self, state: State) -> list[StoredClaim]:
        """Give the claims in one state."""
        return await self._run(lambda: rows.claims_in_state(self._database, state))

    async def uids(self, *, state: State | None = None, boot_id: str | None = None) -> set[str]:
        """Give the UIDs of all claims, or of those in one state or of one boot."""
        return await self._run(lambda: rows.uids(self._database, state=state, boot_id=boot_id))

    async def count(self) -> int:
        """Count the claims."""
        return await self._run(lambda: rows.count(self._database))

    async def write(self, claims: Collection[StoredClaim]) -> Outcome:
        """
        Write claims in one transaction, each if it carries its stored row's generation.

        Generation 0 says that there is no row. A claim is left out where the row is another one, or
        where another claim holds an exclusive device of it. One that is written straight as
        ``prepared``, with generation 0, is left out too if another process has opened the database
        since this one did: that one may have undone it already.
        """
        if not claims:
            return Outcome(written={}, held={}, fenced=frozenset())
        return await self._run(lambda: self._write(claims))

    async def delete(self, claims: Collection[StoredClaim]) -> frozenset[str]:
        """
        Forget claims in one transaction, each if it carries its stored row's generation.

        Their devices are free then. Gives the UIDs of rows that are other ones and stay; a row that
        is missing is fine.
        """
        if not claims:
            return frozenset()
        return await self._run(lambda: self._delete(claims))

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
        except DamagedRowError as error:
            self.broken = f"the checkpoint {self.path} is damaged: {error}"
            raise CheckpointError(
                f"{self.broken}; the node plugin is restarted and sets it aside"
            ) from error
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
        self._opens = rows.opens(self._connection)

    def _connect(self) -> sqlite3.Connection:
        connection = schema.connect(self.path)
        try:
            with rows.transaction(connection):
                self._check(connection)
                connection.execute("UPDATE meta SET value = value + 1 WHERE name = 'opens'")
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > schema.SCHEMA_VERSION:
            raise CheckpointTooNewError(
                f"the checkpoint {self.path} has schema version {version}, this drakit knows up to "
                f"{schema.SCHEMA_VERSION}; install the later version again, or drain the node and "
                f"remove the file"
            )
        if version == 0:
            schema.create(connection)
        if version == 1:
            schema.migrate(connection)
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        for uid, body, expected in connection.execute("SELECT id, body, checksum FROM bodies"):
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

    def _page(self, after: str, size: int) -> list[StoredClaim]:
        return rows.page(self._database, after=after, size=size)

    def _write(self, claims: Collection[StoredClaim]) -> Outcome:
        started = time.perf_counter()
        with rows.transaction(self._database):
            self.alone = rows.opens(self._database) == self._opens
            outcome = rows.write(self._database, claims, owner=self.owner, alone=self.alone)
        self._report(started)
        return outcome

    def _delete(self, claims: Collection[StoredClaim]) -> frozenset[str]:
        started = time.perf_counter()
        with rows.transaction(self._database):
            kept = rows.delete(self._database, claims)
        self._report(started)
        return kept

    def _report(self, started: float) -> None:
        if self.on_transaction is not None:
            self.on_transaction(time.perf_counter() - started)
