"""
The rows of a checkpoint: reading them, and writing a batch of claims as compare-and-swap.

The functions need an open connection with the current schema (:mod:`.schema`). A writer must know
the generation of a claim's row. :mod:`.holds` compares the devices of claims. Endpoint rows are
written without a generation, because they have only one writer. Damaged endpoint rows are ignored,
because an endpoint reports its devices again when it returns. :mod:`.checkpoint` opens connections
and handles errors.

Functions block. The module does not depend on asyncio or files.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from drakit_nodeplugin.state.device_numbers import TakenNumber
from drakit_nodeplugin.state.holds import (
    Hardware,
    Held,
    HeldAs,
    Rest,
    TakenFrom,
    contested,
    counters_of,
    devices_of,
    incomplete,
    refusal,
)
from drakit_nodeplugin.state.records import (
    DamagedRowError,
    State,
    StoredClaim,
    StoredEndpoint,
    checksum,
    dump,
    load,
    load_endpoint,
)

_SELECT = "SELECT id, uid, generation, body, checksum FROM claims JOIN bodies USING (id)"


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOutcome:
    """The result of a write. Each claim is in exactly one of the first four groups."""

    written: Mapping[str, StoredClaim]
    """The written claims, with their new generation."""

    held: Mapping[str, Held]
    """The claims that were not written, because other claims hold one of their devices, or hardware
    that they need."""

    changed: frozenset[str]
    """The claims that were not written, because the stored row differs from the one that the writer
    knows. For example, an administrator has forgotten the claim, or the checkpoint has lost it."""

    taken: Mapping[str, TakenNumber] = field(default_factory=dict[str, TakenNumber])
    """The claims that were not written, because another claim holds, for other hardware, a device
    number that they need."""

    file_errors: Mapping[str, OSError] = field(default_factory=dict[str, OSError])
    """The claims that were written, but whose CDI files could not be written."""


class _Row(NamedTuple):
    """A claim as it is stored."""

    id: int
    claim: StoredClaim


_Entry = tuple[StoredClaim, _Row | None]
"""A claim to write, and its current row."""

Admit = Callable[[StoredClaim, bool], TakenNumber | None]
"""Returns the device number that another claim holds, if a claim must be refused, or None. The
second argument is whether containers already use the claim's devices."""


@contextmanager
def transaction(connection: sqlite3.Connection) -> Generator[None]:
    """Run one write transaction."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # If the disk is full, SQLite has already rolled the transaction back.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


# ---------------------------------------------------------------- reading


def claims_of(connection: sqlite3.Connection, uids: Sequence[str]) -> list[StoredClaim]:
    """Return the stored claims with these UIDs. Raises DamagedRowError."""
    return [row.claim for row in _rows(connection, "uid", uids)]


def generations(connection: sqlite3.Connection, uids: Sequence[str]) -> dict[str, int]:
    """Return the generations of the stored rows with these UIDs."""
    query = "SELECT generation FROM claims WHERE uid = ?"
    return {uid: number for uid in uids for (number,) in connection.execute(query, (uid,))}


def all_generations(connection: sqlite3.Connection) -> dict[str, int]:
    """Return the generations of all rows, keyed by UID."""
    return dict(connection.execute("SELECT uid, generation FROM claims"))


def identified(connection: sqlite3.Connection) -> list[StoredClaim]:
    """Return the claims that have stored device nodes, and possibly others. Raises
    DamagedRowError."""
    # Search the body instead of parsing it, because it can have 128 KiB of opaque parameters.
    # Inside a JSON string, quotes are escaped, so they do not match.
    query = f"{_SELECT} WHERE instr(body, CAST('\"identity\":' AS BLOB)) > 0"
    return [row.claim for row in _load(connection.execute(query))]


def claims_in_state(connection: sqlite3.Connection, state: State) -> list[StoredClaim]:
    """Return the claims in one state. Raises DamagedRowError."""
    return [row.claim for row in _load(connection.execute(f"{_SELECT} WHERE state = ?", (state,)))]


def page(connection: sqlite3.Connection, *, after: str = "", size: int = -1) -> list[StoredClaim]:
    """Return up to `size` claims whose UIDs follow `after`, sorted by UID. Raises
    DamagedRowError."""
    query = f"{_SELECT} WHERE uid > ? ORDER BY uid LIMIT ?"
    return [row.claim for row in _load(connection.execute(query, (after, size)))]


def uids(
    connection: sqlite3.Connection, *, state: State | None = None, boot_id: str | None = None
) -> set[str]:
    """Return the UIDs of all claims, or only of those in a state or from a boot."""
    given = {"state": state, "boot_id": boot_id}
    terms = " AND ".join(f"{name} = :{name}" for name, value in given.items() if value is not None)
    query = f"SELECT uid FROM claims WHERE {terms or 'TRUE'}"  # noqa: S608
    return {uid for (uid,) in connection.execute(query, given)}


def states(connection: sqlite3.Connection) -> dict[str, int]:
    """Return the number of claims in each state."""
    return dict(connection.execute("SELECT state, count(*) FROM claims GROUP BY state"))


def endpoints(connection: sqlite3.Connection) -> list[StoredEndpoint]:
    """Return the endpoints, sorted by name, except those with damaged rows."""
    found = _endpoints(connection)
    return sorted((e for _, e in found if isinstance(e, StoredEndpoint)), key=lambda e: e.name)


def damaged_endpoints(connection: sqlite3.Connection) -> Mapping[object, str]:
    """Return the problem with each damaged endpoint row, keyed by the stored name."""
    return {
        name: f"the row of endpoint {name}: {error}"
        for name, error in _endpoints(connection)
        if isinstance(error, DamagedRowError)
    }


# ---------------------------------------------------------------- writing


def write(
    connection: sqlite3.Connection,
    claims: Collection[StoredClaim],
    *,
    hardware: Hardware | None = None,
    recent: Mapping[str, StoredClaim] = MappingProxyType({}),
    admit: Admit | None = None,
) -> WriteOutcome:
    """
    Write claims that have the generation of their row, in the caller's transaction.

    If `hardware` is None, claims are compared only by device names. `recent` are recently stored
    claims. If the generation of such a claim is still that of its row, the row is not read again.
    `admit` decides about prepared claims that have device numbers. Raises ValueError for a claim
    that appears twice or cannot be encoded as JSON.
    """
    known = _known(connection, [claim.uid for claim in claims], recent)
    changed: set[str] = set()
    fresh: dict[str, StoredClaim] = {}
    for claim in claims:
        if claim.uid in fresh:
            raise ValueError(f"claim {claim} appears twice in one batch")
        row = known.get(claim.uid)
        if claim.generation != (row.claim.generation if row else 0):
            changed.add(claim.uid)
        else:
            fresh[claim.uid] = claim
    taken: dict[str, TakenNumber] = {}
    if admit is not None:
        for claim in fresh.values():
            if claim.state == "prepared" and any(device.nodes for device in claim.devices):
                old = row.claim if (row := known.get(claim.uid)) else None
                in_use = old and old.state == "prepared" and old.boot_id == claim.boot_id
                # Always admit a rebuilt claim, because containers may be running with its numbers.
                if (why := admit(claim, bool(in_use or claim.rebuilt))) is not None:
                    taken[claim.uid] = why
        for uid in taken:
            del fresh[uid]
    consuming = any(device.consumes for claim in fresh.values() for device in claim.devices)
    if hardware is not None and consuming:
        _complete_rebuilt(connection, list(fresh.values()), hardware)
    first = next_generations(connection, len(fresh))
    entries = {
        uid: (replace(claim, generation=generation), known.get(uid))
        for generation, (uid, claim) in enumerate(fresh.items(), start=first)
    }
    held = _put(connection, entries, hardware=hardware)
    written = {uid: claim for uid, (claim, _) in entries.items() if uid not in held}
    return WriteOutcome(written=written, held=held, changed=frozenset(changed), taken=taken)


def adopt(connection: sqlite3.Connection, claims: Collection[StoredClaim]) -> frozenset[str]:
    """
    Copy rows from another database unchanged, in the caller's transaction.

    Returns the UIDs of the written rows. If two rows conflict, the second one is omitted. The
    claims must not have rows yet.
    """
    refused = _put(connection, {claim.uid: (claim, None) for claim in claims})
    passed = [claim for claim in claims if claim.uid not in refused]
    highest = max((claim.generation for claim in passed), default=0)
    connection.execute(
        "UPDATE meta SET value = max(value, ?) WHERE name = 'generation'", (highest,)
    )
    return frozenset(claim.uid for claim in passed)


def delete(connection: sqlite3.Connection, claims: Collection[StoredClaim]) -> frozenset[str]:
    """Delete rows that have these generations, in the caller's transaction. Return the UIDs of the
    claims whose rows have another generation."""
    ids: list[tuple[int]] = []
    others: list[str] = []
    for claim in claims:
        deleted = connection.execute(
            "DELETE FROM claims WHERE uid = ? AND generation = ? RETURNING id",
            (claim.uid, claim.generation),
        ).fetchall()
        ids += deleted
        if not deleted:
            others.append(claim.uid)
    for rows in ("bodies WHERE id", "devices WHERE claim", "counters WHERE claim"):
        connection.executemany(f"DELETE FROM {rows} = ?", ids)  # noqa: S608
    return frozenset(generations(connection, others))


def write_endpoints(connection: sqlite3.Connection, endpoints: Iterable[StoredEndpoint]) -> None:
    """
    Write endpoints and replace their rows, in the caller's transaction.

    Raises ValueError for a name that cannot be encoded as JSON.
    """
    bodies = [(endpoint.name, dump(endpoint)) for endpoint in endpoints]
    connection.executemany(
        "INSERT OR REPLACE INTO endpoints VALUES (?, ?, ?)",
        [(name, checksum(body), body) for name, body in bodies],
    )


def forget_endpoints(connection: sqlite3.Connection, names: Iterable[object]) -> None:
    """Delete rows of endpoints by their stored names, in the caller's transaction. Missing rows are
    ignored."""
    connection.executemany("DELETE FROM endpoints WHERE name = ?", [(name,) for name in names])


def _known(
    connection: sqlite3.Connection, uids: Sequence[str], recent: Mapping[str, StoredClaim]
) -> dict[str, _Row]:
    known: dict[str, _Row] = {}
    unknown: list[str] = []
    query = "SELECT id, generation FROM claims WHERE uid = ?"
    for uid in uids:
        for id_, generation in connection.execute(query, (uid,)):
            claim = recent.get(uid)
            if claim is not None and claim.generation == generation:
                known[uid] = _Row(id_, claim)
            else:
                unknown.append(uid)
    if unknown:
        known |= {row.claim.uid: row for row in _rows(connection, "uid", unknown)}
    return known


def _put(
    connection: sqlite3.Connection,
    entries: Mapping[str, _Entry],
    *,
    hardware: Hardware | None = None,
) -> dict[str, Held]:
    """Write rows, keyed by UID. Return the claims that are not written because of other claims'
    holds."""
    moved = {
        uid
        for uid, (claim, row) in entries.items()
        if row is not None
        and row.claim.devices is not claim.devices
        and _names(row.claim) != _names(claim)
    }
    judged = [claim for uid, (claim, row) in entries.items() if row is None or uid in moved]
    # A row whose devices change releases some of them, but only when the loop below reaches it.
    doubtful = moved | contested(connection, judged)
    _store(connection, [entry for uid, entry in entries.items() if uid not in doubtful])
    refused: dict[str, Held] = {}

    def holder(row: int) -> StoredClaim:
        for found in _rows(connection, "id", [row]):
            return found.claim
        raise DamagedRowError("there are devices without a claim")

    # Process one claim at a time, because once a claim is stored, the rest of the batch cannot get
    # its devices.
    for uid, (claim, row) in entries.items():
        if uid not in doubtful:
            continue
        rest = Rest(connection=connection, row=row.id if row else 0, claim=holder)
        why = refusal(claim, rest, hardware=hardware)
        # A claim that is being unprepared may have devices that are no longer listed. Only a claim
        # that holds one of its devices prevents the write.
        if why is not None and (why.holder is not None or claim.state != "unpreparing"):
            refused[uid] = why
        else:
            _store(connection, [(claim, row)])
    return refused


def _store(connection: sqlite3.Connection, entries: Collection[_Entry]) -> None:
    """Write rows that do not conflict, with a few statements regardless of their number."""
    if not entries:
        return
    changed: list[tuple[object, ...]] = []
    bodies: list[tuple[int, StoredClaim]] = []
    devices: list[tuple[object, ...]] = []
    counters: list[tuple[object, ...]] = []
    for claim, row in entries:
        head = (claim.uid, claim.state, claim.boot_id, claim.generation)
        if row is not None and row.claim.devices is claim.devices:
            changed.append((*head, row.id))
            bodies.append((row.id, claim))
            continue
        held, taken = devices_of(claim), counters_of(claim)
        if row is None:
            id_ = connection.execute("INSERT INTO claims VALUES (NULL, ?, ?, ?, ?)", head).lastrowid
            assert id_ is not None
            held_before, taken_before = frozenset[HeldAs](), frozenset[TakenFrom]()
        else:
            id_ = row.id
            changed.append((*head, id_))
            held_before, taken_before = devices_of(row.claim), counters_of(row.claim)
        bodies.append((id_, claim))
        if held != held_before:
            if held_before:
                connection.execute("DELETE FROM devices WHERE claim = ?", (id_,))
            devices += [(id_, *device) for device in held]
        if taken != taken_before:
            if taken_before:
                connection.execute("DELETE FROM counters WHERE claim = ?", (id_,))
            counters += [(id_, *each) for each in taken]
    if changed:
        update = "UPDATE claims SET uid = ?, state = ?, boot_id = ?, generation = ? WHERE id = ?"
        connection.executemany(update, changed)
    _put_bodies(connection, bodies)
    if devices:
        connection.executemany("INSERT INTO devices VALUES (?, ?, ?, ?, ?)", devices)
    if counters:
        _put_counters(connection, counters)


def _put_bodies(connection: sqlite3.Connection, bodies: Iterable[tuple[int, StoredClaim]]) -> None:
    dumped = [(id_, dump(claim)) for id_, claim in bodies]
    connection.executemany(
        "INSERT OR REPLACE INTO bodies VALUES (?, ?, ?)",
        [(id_, checksum(body), body) for id_, body in dumped],
    )


def _put_counters(connection: sqlite3.Connection, counters: Iterable[tuple[object, ...]]) -> None:
    connection.executemany(
        "INSERT INTO counters (claim, pool, counter_set, device, amounts) VALUES (?, ?, ?, ?, ?)",
        counters,
    )


def _complete_rebuilt(
    connection: sqlite3.Connection, claims: Collection[StoredClaim], hardware: Hardware
) -> None:
    """
    Complete rebuilt rows that may block claims: add the consumption of the rows' devices.

    The generations of these rows do not change, because only the knowledge about the claims
    changes.
    """
    # The claims in the batch are written as given.
    wanted = incomplete(connection, claims) - {claim.uid for claim in claims}
    for id_, claim in [*_rows(connection, "uid", [*wanted])]:
        completed = replace(
            claim,
            devices=tuple(
                device
                if device.consumes is not None
                or (listed := hardware.device(device.pool, device.device)) is None
                else replace(device, consumes=listed.consumes)
                for device in claim.devices
            ),
        )
        if (counters := counters_of(completed)) != counters_of(claim):
            _put_bodies(connection, [(id_, completed)])
            connection.execute("DELETE FROM counters WHERE claim = ?", (id_,))
            _put_counters(connection, [(id_, *each) for each in counters])


def next_generations(connection: sqlite3.Connection, number: int) -> int:
    """Reserve this many generations from the counter. Return the first one."""
    ((last,),) = connection.execute(
        "UPDATE meta SET value = value + ? WHERE name = 'generation' RETURNING value", (number,)
    ).fetchall()
    return last - number + 1


def _names(claim: StoredClaim) -> frozenset[tuple[str, str, str]]:
    return frozenset((device.pool, device.device, device.hold) for device in claim.devices)


def _rows(
    connection: sqlite3.Connection, column: Literal["id", "uid"], values: Sequence[object]
) -> Iterator[_Row]:
    # Use one statement per claim: SQLite caches the compiled statement, and a pod has only a few
    # claims.
    query = f"{_SELECT} WHERE {column} = ?"
    for value in values:
        yield from _load(connection.execute(query, (value,)))


def _load(rows: Iterable[tuple[int, str, int, object, int]]) -> Iterator[_Row]:
    for id_, uid, generation, body, expected in rows:
        try:
            claim = load(body, expected=expected)
        except DamagedRowError as error:
            raise DamagedRowError(f"the row of claim {uid}: {error}") from error
        if (claim.uid, claim.generation) != (uid, generation):
            raise DamagedRowError(f"the row of claim {uid} has another claim's content")
        yield _Row(id_, claim)


def _endpoints(
    connection: sqlite3.Connection,
) -> Iterator[tuple[object, StoredEndpoint | DamagedRowError]]:
    for name, expected, body in connection.execute("SELECT name, checksum, body FROM endpoints"):
        try:
            yield name, load_endpoint(name, body, expected=expected)
        except DamagedRowError as error:
            yield name, error
