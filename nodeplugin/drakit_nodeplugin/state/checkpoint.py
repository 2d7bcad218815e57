"""
The checkpoint: the claims of a driver that this node has begun to prepare, their devices, and the
driver's endpoints.

The checkpoint is a SQLite database in WAL mode with ``synchronous=FULL``. A batch takes one
transaction and one flush, regardless of its size. After a crash, the database contains either the
whole batch or nothing of it. Only the driver's active instance opens it for writing (:mod:`.lock`).
Every write is a compare-and-swap on a row's generation, because work on a claim can finish late.
:mod:`drakit_nodeplugin.claims.allocation` decides whether an entry must be prepared again.
:mod:`drakit_nodeplugin.devices` decides the effects of an unavailable endpoint.

The same job in the writer thread also handles a claim's CDI file and metadata files. It writes them
after the row of a prepared claim, and removes them before the row.

This module owns the writer thread, the cache of recent rows, and error handling. :mod:`.rows` and
:mod:`.holds` contain the statements, and :mod:`.quarantine` opens a database in any state. The
module knows only the rows of endpoints, and does not depend on gRPC, the API server or the engine's
types.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from drakit.device import ClaimReference
from drakit_nodeplugin.changes import Revision
from drakit_nodeplugin.state import holds, quarantine, rows, schema
from drakit_nodeplugin.state.cdi_files import ClaimSpecs
from drakit_nodeplugin.state.device_numbers import ClaimDevices, HeldNumbers, TakenNumber
from drakit_nodeplugin.state.holds import Hardware, HeldDevice
from drakit_nodeplugin.state.metadata_files import MetadataFiles
from drakit_nodeplugin.state.quarantine import CheckpointError
from drakit_nodeplugin.state.records import State, StoredClaim, StoredDevice, StoredEndpoint
from drakit_nodeplugin.state.rows import WriteOutcome

logger = logging.getLogger(__name__)

REOPEN_SECONDS = 1.0
"""Minimum time between two attempts to use an unusable checkpoint, in seconds."""

MAX_RECENT = 512
"""Maximum number of claims in the cache. A node has 110 pods by default, and most have one or two
claims."""

MAX_RECENT_BYTES = 4096
"""Maximum total size of the opaque parameters, metadata and claim data of a claim in the cache. A
row can have 128 KiB of each of the first two, and 64 KiB of the last."""

_RESTART = "the node plugin opens it again and quarantines it"
_BUSY = f"{schema.BUSY_SECONDS:g} s"

ResultT = TypeVar("ResultT")


class Checkpoint:
    """
    The prepared claims and the endpoints of one driver. All methods can be called concurrently.

    Each method raises :class:`CheckpointError` if the database cannot be used. Later calls retry,
    at most once a second. For example, the next call succeeds once there is space again.
    """

    def __init__(
        self,
        path: Path,
        *,
        files: ClaimSpecs | None = None,
        metadata: MetadataFiles | None = None,
        numbers: HeldNumbers | None = None,
    ) -> None:
        """Create a checkpoint. If `files` is None, the checkpoint does not write files. `numbers`
        are the device numbers of all drivers in the process. The checkpoint's directory is named
        after its driver."""
        self._files = files
        self._metadata = metadata
        self._driver = path.parent.name
        self._numbers = HeldNumbers() if numbers is None else numbers
        self._are_numbers_read = False
        """Whether the device numbers in the rows are known. False after a failed transaction."""
        self._claim_devices = ClaimDevices()
        self.path = path
        self.damage: str | None = None
        """The reason why entries were lost. None if no entries were lost, or after
        :meth:`rebuilt`."""
        self.broken: str | None = None
        """The damage that was detected after the checkpoint was opened, if any. Nothing is written
        after that, because a damaged checkpoint is quarantined only when it is opened, at a
        restart."""
        self.unusable: str | None = None
        """The reason why the checkpoint is currently unusable (no space, no permission, a newer
        version), or None."""
        self.on_transaction: Callable[[float], None] | None = None
        """Called in the writer thread with the duration of each write transaction in seconds."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._uids: set[str] = set()
        """The UIDs of all rows that may exist. The writer thread modifies this set and the cache
        below, and the event loop reads them."""
        self._recent: OrderedDict[str, StoredClaim] = OrderedDict()
        """A cache of rows that this process wrote or read."""
        self._wanted = self._closed = False
        self.revision = Revision()
        """Advances when rows of claims or endpoints may have changed."""
        self._next_attempt = float("-inf")
        self._transactions = 0
        """The number of transactions that the writer thread has committed."""

    async def open(self) -> None:
        """
        Open the database. A damaged database is quarantined, and its intact rows are copied to a
        new one.

        Raises :class:`CheckpointError` if a later version of drakit wrote it, or if there is no
        space or no permission. None of these is damage, and a quarantine would lose the claims.
        """
        self._wanted = True
        self._next_attempt = float("-inf")
        await self._run(lambda _: None)

    async def close(self) -> None:
        """Close the database permanently. Everything that was reported to the kubelet is already on
        disk."""
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._executor, self._disconnect)
        self._executor.shutdown(wait=False)

    async def find(self, uids: Collection[str]) -> Mapping[str, StoredClaim]:
        """Return the known claims with these UIDs."""
        usable = self.broken is None and self.unusable is None and not self._closed
        if usable and self._connection is not None:
            known = [self._recent.get(uid) for uid in uids]
            found = {claim.uid: claim for claim in known if claim is not None}
            if all(uid in found or uid not in self._uids for uid in uids):
                return found
        wanted = list(uids)
        return await self._run(lambda database: self._find(database, wanted), complete=True)

    async def pages(self, size: int = 50) -> AsyncIterator[list[StoredClaim]]:
        """
        Yield every claim, sorted by UID, in pages. Pages limit the memory use, because a row can
        have 128 KiB of opaque parameters.

        Each page is a snapshot. Claims that are added or removed in the meantime may be missed.
        """
        after = ""
        while page := await self._run(partial(rows.page, after=after, size=size)):
            yield page
            after = page[-1].uid

    async def in_state(self, state: State) -> list[StoredClaim]:
        """Return the claims in one state."""
        return await self._run(partial(rows.claims_in_state, state=state))

    async def uids(self, *, state: State | None = None, boot_id: str | None = None) -> set[str]:
        """Return the UIDs of all claims, or only of those in a state or from a boot."""
        return await self._run(partial(rows.uids, state=state, boot_id=boot_id))

    async def orphans(self) -> set[str]:
        """Return the UIDs of claims that have a CDI file but no row. Also raises OSError."""
        return await self._run(lambda database: self._without_entry(rows.uids(database)))

    async def states(self) -> Mapping[str, int]:
        """Return the number of claims in each state. States without claims are omitted. Raises
        CheckpointError while entries may be missing."""
        return await self._run_complete(rows.states)

    async def write(
        self,
        claims: Collection[StoredClaim],
        *,
        hardware: Hardware | None = None,
        files: bool = False,
    ) -> WriteOutcome:
        """
        Write claims in one transaction, unless they conflict with stored rows.

        Generation 0 means that there is no row. A claim is not written if its row has another
        generation, or if another claim holds one of its devices and one of the two needs it
        exclusively. Shares do not exclude each other, and admin access excludes nothing. If
        `hardware`, the main inventories, is given, a claim is also not written if all claims
        together would exceed a counter set or a device's capacity.

        If `files` is set, the CDI files of the written claims are also written.
        """
        if not claims:
            return WriteOutcome(written={}, held={}, changed=frozenset())
        return await self._run(
            lambda database: self._write(database, claims, hardware, files),
            complete=any(claim.generation == 0 for claim in claims),
        )

    async def confirm(self, claims: Collection[StoredClaim]) -> WriteOutcome:
        """Write the CDI files of claims whose rows are still as the caller knows them. All other
        claims are returned as `changed`."""
        return await self._run(lambda database: self._confirm(database, claims))

    async def release(
        self, claims: Collection[StoredClaim], *, files_of: Collection[str] = ()
    ) -> tuple[frozenset[str], Mapping[str, OSError]]:
        """
        Remove the CDI files of claims. Then, in one transaction, forget each claim whose file is
        gone, if the claim has the generation of its stored row. This frees the claims' devices.

        Also removes the files of the claims `files_of`, but keeps their rows. Returns the UIDs of
        rows that are kept because they differ, and the files that cannot be removed. Missing rows
        are ignored.
        """
        if not claims and not files_of:
            return frozenset(), {}
        return await self._run(lambda database: self._release(database, claims, files_of))

    async def clear(
        self, uids: Collection[str]
    ) -> tuple[Mapping[str, StoredClaim], Mapping[str, OSError]]:
        """Remove the CDI files of claims without a row. Return the claims that do have a row, and
        the files that cannot be removed."""
        return await self._run(lambda database: self._clear(database, list(uids)), complete=True)

    async def claims_of_devices(
        self,
    ) -> Mapping[tuple[str, str], Mapping[ClaimReference, Sequence[StoredDevice]]]:
        """Return the claims that have each device, keyed by pool and device, including admin
        access. Each claim is returned with its results for the device."""
        return await self._run(
            lambda database: self._claim_devices.read(
                rows.all_generations(database), partial(rows.claims_of, database)
            )
        )

    async def devices_in_use(self) -> Mapping[str, frozenset[str]]:
        """Return the names of all devices that claims hold, keyed by pool, without admin access.
        Raises CheckpointError while entries may be missing."""
        return await self._run_complete(holds.held_devices)

    async def held_beside_unpreparing(self) -> list[HeldDevice]:
        """Return the holds of claims that are being unprepared, and of other claims that consume
        counters in the same pools. Empty while no claim is being unprepared."""
        return await self._run(holds.held_beside_unpreparing)

    async def endpoints(self) -> list[StoredEndpoint]:
        """Return the endpoints, sorted by name, except those with damaged rows."""
        return await self._run(rows.endpoints)

    async def write_endpoints(self, endpoints: Collection[StoredEndpoint]) -> None:
        """Write endpoints in one transaction, replacing their stored rows."""
        if endpoints:
            write = partial(rows.write_endpoints, endpoints=endpoints)
            await self._run(lambda database: self._transaction(database, write))

    async def forget_endpoints(self, names: Collection[str]) -> None:
        """Forget endpoints in one transaction. Unknown endpoints are ignored."""
        if names:
            forget = partial(rows.forget_endpoints, names=names)
            await self._run(lambda database: self._transaction(database, forget))

    async def forget(self, uid: str, generation: int) -> bool:
        """Delete a claim's row at an administrator's request, if the row still has this generation.
        Return whether it was deleted. Work in flight on the claim can no longer store anything."""
        return await self._run(lambda database: self._forget_by_hand(database, uid, generation))

    async def rebuilt(self) -> None:
        """Record that the damage has been repaired, so that it is not reported again after a
        restart."""
        if self.damage is not None:
            await self._run(lambda database: self._transaction(database, quarantine.forget_damage))
            self.damage = None

    async def _run_complete(self, work: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """Run work whose result would be wrong if entries had been lost."""
        if self.damage is not None:
            raise CheckpointError(f"the checkpoint {self.path} is being rebuilt: {self.damage}")
        return await self._run(work, complete=True)

    async def _run(
        self, work: Callable[[sqlite3.Connection], ResultT], *, complete: bool = False
    ) -> ResultT:
        """Run work in the writer thread. `complete` means that the work relies on no entries being
        lost. In that case, it fails if the database was reopened in the meantime and has lost
        entries, because the caller does not know about that yet."""
        if self._closed or not self._wanted:
            raise CheckpointError(f"the checkpoint {self.path} is not open")
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        now = loop.time()
        complete = complete and self.damage is None

        before = self._transactions
        try:
            return await loop.run_in_executor(
                self._executor, lambda: context.run(self._attempt, work, now, complete)
            )
        finally:
            if self._transactions != before:
                self.revision.advance()

    # ------------------------------------------------------------ in the writer thread

    def _attempt(
        self, work: Callable[[sqlite3.Connection], ResultT], now: float, complete: bool
    ) -> ResultT:
        """Run work on a connection. Reopen an unusable connection, but not at every call."""
        try:
            if self._connection is not None and self._file != _identity(self.path):
                self._find_again(self._connection)
            database, due = self._connection, now >= self._next_attempt
            if database is None:
                if not due and self.unusable is not None:
                    raise CheckpointError(self.unusable)
                self._next_attempt = now + REOPEN_SECONDS
                database = self._open()
            elif self.unusable is not None and due:
                self._next_attempt = now + REOPEN_SECONDS
                # Attempt a write to find out whether there is space again. If not, the next real
                # write reports the error.
                with suppress(sqlite3.Error):
                    self._transaction(database, partial(rows.next_generations, number=1))
            if complete and self.damage is not None:
                raise CheckpointError(f"the checkpoint {self.path} is being rebuilt: {self.damage}")
            return work(database)
        except quarantine.DATABASE_ERRORS as error:
            raise self._failed(error, now) from error

    def _open(self) -> sqlite3.Connection:
        try:
            opened = quarantine.open_database(self.path, without_entry=self._without_entry)
        except CheckpointError as error:
            self.unusable = str(error)
            raise
        self._file = _identity(self.path)
        self._recent.clear()
        self._uids = opened.uids
        self._connection = opened.connection
        self.damage = opened.damage
        self.unusable = None
        self._transactions += 1  # after reopening, the rows may differ from before
        self._read_numbers(opened.connection)
        return opened.connection

    def _find_again(self, connection: sqlite3.Connection) -> None:
        """Handle a database file that was removed or replaced manually: restore a removed file, or
        use the new one."""
        try:
            quarantine.rewrite(connection, self.path)
        except (OSError, sqlite3.Error) as error:
            self.unusable = f"the checkpoint {self.path} was removed: {error}"
            raise CheckpointError(self.unusable) from error
        self._disconnect()

    def _disconnect(self) -> None:
        # Close the connection: when the last one is closed, SQLite removes the log, so no temporary
        # files remain.
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _failed(self, error: Exception, now: float) -> CheckpointError:
        if quarantine.is_damage(error):
            self.broken = f"the checkpoint {self.path} is damaged: {error}"
            return CheckpointError(f"{self.broken}; {_RESTART}")
        text = f"the checkpoint {self.path} failed: {error}"
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return CheckpointError(f"{text}; another program has held it for {_BUSY}")
        self.unusable = f"{text}; check space and permissions of its directory"
        self._next_attempt = now + REOPEN_SECONDS
        if code != sqlite3.SQLITE_FULL:  # if the disk is full, stored data can still be read
            self._disconnect()
        return CheckpointError(self.unusable)

    def _find(self, database: sqlite3.Connection, uids: list[str]) -> dict[str, StoredClaim]:
        found = {claim.uid: claim for claim in rows.claims_of(database, uids)}
        for claim in found.values():
            self._cache(claim)
        for uid in uids:
            if uid not in found:
                self._forget(uid)
        return found

    def _write(
        self,
        database: sqlite3.Connection,
        claims: Collection[StoredClaim],
        hardware: Hardware | None,
        files: bool,
    ) -> WriteOutcome:
        uids = [claim.uid for claim in claims]
        # Take the claims out of the cache, so that they are read again next time, unless the
        # transaction shows their content. Rebuilt rows, whose devices may still be completed, are
        # never cached.
        recent = {uid: claim for uid in uids if (claim := self._recent.pop(uid, None)) is not None}
        self._uids.update(uids)
        has_numbers = any(device.nodes for claim in claims for device in claim.devices)
        unread = self._numbers.unread() if has_numbers else frozenset[str]()
        outcome = self._transaction(
            database,
            partial(
                rows.write,
                claims=claims,
                hardware=hardware,
                recent=recent,
                admit=partial(self._admit, database, unread),
            ),
            uids=uids,
        )
        for claim in claims:
            if claim.uid in outcome.written:
                self._numbers.settle(self._driver, claim.uid, outcome.written[claim.uid])
                self._cache(outcome.written[claim.uid])
                continue
            self._numbers.withdraw(self._driver, claim.uid)
            left_out = claim.uid in outcome.held or claim.uid in outcome.taken
            if left_out and claim.generation == 0:
                self._forget(claim.uid)
        return self._with_files(outcome) if files else outcome

    def _confirm(
        self, database: sqlite3.Connection, claims: Collection[StoredClaim]
    ) -> WriteOutcome:
        stored = rows.generations(database, [claim.uid for claim in claims])
        same = {c.uid: c for c in claims if stored.get(c.uid) == c.generation}
        changed = [claim for claim in claims if claim.uid not in same]
        self._invalidate(changed)
        others = frozenset(claim.uid for claim in changed)
        return self._with_files(WriteOutcome(written=same, held={}, changed=others))

    def _release(
        self,
        database: sqlite3.Connection,
        claims: Collection[StoredClaim],
        files_of: Collection[str],
    ) -> tuple[frozenset[str], Mapping[str, OSError]]:
        unremoved = self._unlink([*(claim.uid for claim in claims), *files_of])
        gone = [claim for claim in claims if claim.uid not in unremoved]
        if not gone:
            return frozenset(), unremoved
        self._invalidate(gone)
        uids = [claim.uid for claim in gone]
        kept = self._transaction(database, partial(rows.delete, claims=gone), uids=uids)
        for claim in gone:
            if claim.uid not in kept:
                self._numbers.settle(self._driver, claim.uid, None)
                self._forget(claim.uid)
        return kept, unremoved

    def _clear(
        self, database: sqlite3.Connection, uids: list[str]
    ) -> tuple[Mapping[str, StoredClaim], Mapping[str, OSError]]:
        found = self._find(database, uids)
        return found, self._unlink([uid for uid in uids if uid not in found])

    def _forget_by_hand(self, database: sqlite3.Connection, uid: str, generation: int) -> bool:
        if rows.generations(database, [uid]).get(uid) != generation:
            return False
        claims = rows.claims_of(database, [uid])
        self._transaction(database, partial(rows.delete, claims=claims), uids=[uid])
        self._numbers.settle(self._driver, uid, None)
        self._forget(uid)
        return True

    # ------------------------------------------------------------ device numbers, in the writer
    # thread

    def _admit(
        self,
        database: sqlite3.Connection,
        unread: Collection[str],
        claim: StoredClaim,
        held: bool,
    ) -> TakenNumber | None:
        """Decide whether a claim can get its device numbers. Called within a transaction."""
        if unread and not held:
            raise CheckpointError(
                "the device numbers that claims hold are unknown, because the checkpoint of driver "
                f"{', '.join(sorted(unread))} has not been read since the node plugin "
                "started"
            )
        if not self._are_numbers_read:
            self._read_numbers(database)
        return self._numbers.admit(self._driver, claim, held=held)

    def _read_numbers(self, database: sqlite3.Connection) -> None:
        self._are_numbers_read = False
        self._numbers.load(self._driver, rows.identified(database))
        self._are_numbers_read = True

    # ------------------------------------------------------------ CDI files, in the writer thread

    def _without_entry(self, known: Collection[str]) -> set[str]:
        return self._files.without_entry(known) if self._files else set()

    def _with_files(self, outcome: WriteOutcome) -> WriteOutcome:
        if self._files is None:
            return outcome
        failed: Mapping[str, OSError] = {}
        if self._metadata is not None:
            failed = self._metadata.place(outcome.written.values())
        texts = {
            uid: claim.cdi_spec or ""
            for uid, claim in outcome.written.items()
            # Omit these, because containers would not start without the mounted metadata file.
            if uid not in failed
        }
        file_errors = {**failed, **self._files.place(texts)}
        return replace(outcome, file_errors=file_errors) if file_errors else outcome

    def _unlink(self, uids: Collection[str]) -> Mapping[str, OSError]:
        failed: Mapping[str, OSError] = {}
        if self._metadata is not None:
            failed = self._metadata.unlink(uids)
        removable = [uid for uid in uids if uid not in failed] if failed else uids
        return {**failed, **self._files.unlink(removable)} if self._files else failed

    # ------------------------------------------------------------ cache, in the writer thread

    def _cache(self, claim: StoredClaim) -> None:
        self._uids.add(claim.uid)
        self._recent.pop(claim.uid, None)
        # Don't cache a row with unknown consumption, which is completed without a new generation.
        complete = all(device.consumes is not None for device in claim.devices)
        texts = (claim.data or "", *claim.configs, *claim.metadata.values())
        small = sum(map(len, texts)) <= MAX_RECENT_BYTES
        if complete and small and claim.rebuilt is None:
            self._recent[claim.uid] = claim
            if len(self._recent) > MAX_RECENT:
                self._recent.popitem(last=False)

    def _forget(self, uid: str) -> None:
        self._recent.pop(uid, None)
        self._uids.discard(uid)

    def _invalidate(self, claims: Collection[StoredClaim]) -> None:
        """Remove claims from the cache, so that they are read from their rows next time."""
        for claim in claims:
            self._uids.add(claim.uid)
            self._recent.pop(claim.uid, None)

    def _transaction(
        self,
        database: sqlite3.Connection,
        work: Callable[[sqlite3.Connection], ResultT],
        *,
        uids: Collection[str] = (),
    ) -> ResultT:
        """
        Run work in one transaction.

        If the transaction fails, the claims `uids` keep their previous device numbers, and all
        numbers are read again before the next comparison.
        """
        if self.broken is not None:
            raise CheckpointError(f"{self.broken}; {_RESTART}")
        started = time.perf_counter()
        try:
            with rows.transaction(database):
                result = work(database)
            if self._file != _identity(self.path):
                raise CheckpointError(f"the checkpoint {self.path} was removed during a write")
        except BaseException as error:
            for uid in uids:
                self._numbers.withdraw(self._driver, uid)
                self._are_numbers_read = False
            if isinstance(error, ValueError) and not isinstance(error, UnicodeDecodeError):
                text = f"the checkpoint {self.path} rejects the entry: {error}"
                raise CheckpointError(text) from error
            raise  # a UnicodeDecodeError is damage
        self._transactions += 1
        self.unusable = None
        if self.on_transaction is not None:
            self.on_transaction(time.perf_counter() - started)
        return result


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a value that distinguishes a file from a later file at the same path."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
