"""
The rows of a checkpoint: reading them, and writing a batch as compare-and-swap.

Functions over an open connection of the present schema (:mod:`.schema`). A row is written by whom
knows its generation, and nobody else; who holds which device is :mod:`.holds`' business. When a
connection is opened, and what becomes of errors, is :mod:`.checkpoint`'s.

They block. They must not know asyncio, files, or what the states of a claim lead to.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from drakit_nodeplugin.claims.holds import HeldAs, Holders, devices_of
from drakit_nodeplugin.claims.stored import (
    DamagedRowError,
    State,
    StoredClaim,
    StoredDevice,
    checksum,
    dump,
    load,
)

__all__ = (
    "HeldDevice",
    "Outcome",
    "adopt",
    "claims_in_state",
    "claims_of",
    "count",
    "count_open",
    "delete",
    "next_generations",
    "opens",
    "page",
    "states",
    "touch",
    "transaction",
    "uids",
    "write",
)

_CHUNK = 500
"""Values per statement: SQLite binds at most 32,766 variables; a pod has at most a few claims."""

_SELECT = "SELECT uid, generation, body, checksum FROM claims JOIN bodies USING (id)"

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldDevice:
    """A device that a batch wanted, and the claim that has it."""

    device: StoredDevice
    holder: StoredClaim


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of the claims of one write; each is in exactly one of the three."""

    written: Mapping[str, StoredClaim]
    """As they are stored now, with their new generation and owner."""

    held: Mapping[str, HeldDevice]
    """Not written: another claim has a device of theirs, and one of the two wants it alone."""

    fenced: frozenset[str]
    """Not written: the stored row is not the one that the writer knows."""


class _Known(NamedTuple):
    """A row of a batch as it is stored before the write."""

    id: int
    generation: int
    devices: frozenset[HeldAs]


@contextmanager
def transaction(connection: sqlite3.Connection) -> Generator[None]:
    """One write transaction; taken at once, so that a second process waits and does not fail."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk has rolled it back already
            connection.execute("ROLLBACK")
        raise


# ---------------------------------------------------------------- reading


def claims_of(connection: sqlite3.Connection, uids: Sequence[str]) -> Iterator[StoredClaim]:
    """Give the claims that are stored of these; raise DamagedRowError."""
    for chunk in _chunks(uids):
        # Only question marks are put into the text, here and below.
        query = f"{_SELECT} WHERE uid IN ({_marks(chunk)})"
        yield from _load(connection.execute(query, chunk))


def claims_in_state(connection: sqlite3.Connection, state: State) -> list[StoredClaim]:
    """Give the claims in one state; raise DamagedRowError."""
    return list(_load(connection.execute(f"{_SELECT} WHERE state = ?", (state,))))


def page(connection: sqlite3.Connection, *, after: str, size: int) -> list[StoredClaim]:
    """Give the next claims by UID; raise DamagedRowError."""
    query = f"{_SELECT} WHERE uid > ? ORDER BY uid LIMIT ?"
    return list(_load(connection.execute(query, (after, size))))


def uids(connection: sqlite3.Connection, *, state: State | None, boot_id: str | None) -> set[str]:
    """Give UIDs, of one state and of one boot where they are given."""
    given = {"state": state, "boot_id": boot_id}
    terms = " AND ".join(f"{name} = :{name}" for name, value in given.items() if value is not None)
    query = f"SELECT uid FROM claims WHERE {terms or 'TRUE'}"  # noqa: S608
    return {uid for (uid,) in connection.execute(query, given)}


def count(connection: sqlite3.Connection) -> int:
    """Count the claims."""
    (number,) = connection.execute("SELECT count(*) FROM claims").fetchone()
    return number


def states(connection: sqlite3.Connection) -> dict[str, int]:
    """Count the claims by their state."""
    return dict(connection.execute("SELECT state, count(*) FROM claims GROUP BY state"))


def opens(connection: sqlite3.Connection) -> int:
    """Tell how often the database was opened by a daemon."""
    (number,) = connection.execute("SELECT value FROM meta WHERE name = 'opens'").fetchone()
    return number


# ---------------------------------------------------------------- writing


def write(
    connection: sqlite3.Connection, claims: Collection[StoredClaim], *, owner: str, alone: bool
) -> Outcome:
    """
    Write claims whose generation is that of their row, within the transaction of the caller.

    Not `alone`: another process works on the database too; what is written without an intent of
    ours may then be the late end of something that it has undone. Raises ValueError for a claim
    that is given twice, or that is no JSON.
    """
    known = _known(connection, [claim.uid for claim in claims])
    fenced: set[str] = set()
    fresh: dict[str, StoredClaim] = {}
    for claim in claims:
        if claim.uid in fresh:
            raise ValueError(f"claim {claim} is given twice in one batch")
        row = known.get(claim.uid)
        straight = claim.generation == 0 and claim.state == "prepared"
        if claim.generation != (row.generation if row else 0) or (straight and not alone):
            fenced.add(claim.uid)
        else:
            fresh[claim.uid] = claim
    taken = _taken(connection, fresh.values(), known)
    passed = [claim for claim in fresh.values() if claim.uid not in taken]
    first = next_generations(connection, len(passed))
    written = {
        claim.uid: replace(claim, generation=generation, owner=owner)
        for generation, claim in enumerate(passed, start=first)
    }
    _put(connection, list(written.values()), known)
    # Read after the write: a holder may be of the same batch.
    holders = {c.uid: c for c in claims_of(connection, [uid for _, uid in taken.values()])}
    held = {uid: HeldDevice(device=d, holder=holders[holder]) for uid, (d, holder) in taken.items()}
    return Outcome(written=written, held=held, fenced=frozenset(fenced))


def adopt(connection: sqlite3.Connection, claims: Collection[StoredClaim]) -> frozenset[str]:
    """
    Take over rows of another database as they are, within the transaction of the caller.

    Gives the UIDs of those that were taken: of two that cannot have a device side by side the
    second is left out. Their claims must not be here yet.
    """
    taken = _taken(connection, claims, {})
    passed = [claim for claim in claims if claim.uid not in taken]
    highest = max((claim.generation for claim in passed), default=0)
    connection.execute(
        "UPDATE meta SET value = max(value, ?) WHERE name = 'generation'", (highest,)
    )
    _put(connection, passed, {})
    return frozenset(claim.uid for claim in passed)


def delete(connection: sqlite3.Connection, claims: Collection[StoredClaim]) -> frozenset[str]:
    """Delete rows of these generations, within the transaction of the caller; give the others."""
    known = _known(connection, [claim.uid for claim in claims])
    kept: set[str] = set()
    ids: list[tuple[int]] = []
    for claim in claims:
        row = known.get(claim.uid)
        if row is None:
            continue
        if row.generation == claim.generation:
            ids.append((row.id,))
        else:
            kept.add(claim.uid)
    for statement in ("devices WHERE claim", "bodies WHERE id", "claims WHERE id"):
        connection.executemany(f"DELETE FROM {statement} = ?", ids)  # noqa: S608
    return frozenset(kept)


def count_open(connection: sqlite3.Connection) -> int:
    """Count that a daemon opens the database, within the transaction of the caller."""
    connection.execute("UPDATE meta SET value = value + 1 WHERE name = 'opens'")
    return opens(connection)


def touch(connection: sqlite3.Connection) -> None:
    """Write something, to see whether that is possible, within the transaction of the caller."""
    next_generations(connection, 1)


def _known(connection: sqlite3.Connection, uids: Sequence[str]) -> dict[str, _Known]:
    found: list[tuple[str, int, int]] = []
    for chunk in _chunks(uids):
        query = f"SELECT uid, id, generation FROM claims WHERE uid IN ({_marks(chunk)})"  # noqa: S608
        found.extend(connection.execute(query, chunk))
    devices: dict[int, list[HeldAs]] = {id_: [] for _, id_, _ in found}
    for chunk in _chunks(list(devices)):
        query = f"SELECT * FROM devices WHERE claim IN ({_marks(chunk)})"  # noqa: S608
        for id_, *device in connection.execute(query, chunk):
            devices[id_].append(tuple(device))
    return {uid: _Known(id_, generation, frozenset(devices[id_])) for uid, id_, generation in found}


def _taken(
    connection: sqlite3.Connection,
    claims: Collection[StoredClaim],
    known: Mapping[str, _Known],
) -> dict[str, tuple[StoredDevice, str]]:
    """Find what wants a device that is held, by a row or by an earlier claim of the batch."""
    changed = [claim for claim in claims if _changed(claim, known)]
    holders = Holders(connection, changed)
    taken: dict[str, tuple[StoredDevice, str]] = {}
    for claim in changed:
        refusal = holders.refusal(claim)
        if refusal is not None:
            taken[claim.uid] = refusal
            continue
        row = known.get(claim.uid)
        holders.give(claim, former=row.devices if row else ())
    return taken


def _put(
    connection: sqlite3.Connection, claims: Sequence[StoredClaim], known: Mapping[str, _Known]
) -> None:
    """Write rows as they are given; what is not changed of their devices is left alone."""
    (last_id,) = connection.execute("SELECT coalesce(max(id), 0) FROM claims").fetchone()
    heads: list[tuple[object, ...]] = []
    bodies: list[tuple[int, int, bytes]] = []
    cleared: list[tuple[int]] = []
    devices: list[tuple[int, str, str, str]] = []
    for claim in claims:
        row = known.get(claim.uid)
        if row is None:
            last_id += 1
        id_ = row.id if row else last_id
        heads.append((id_, claim.uid, claim.state, claim.boot_id, claim.generation))
        body = dump(claim)
        bodies.append((id_, checksum(body), body))
        if _changed(claim, known):
            cleared.append((id_,))
            devices.extend((id_, *device) for device in devices_of(claim))
    connection.executemany(
        "INSERT INTO claims VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
        "state = excluded.state, boot_id = excluded.boot_id, generation = excluded.generation",
        heads,
    )
    connection.executemany(
        "INSERT INTO bodies VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
        "checksum = excluded.checksum, body = excluded.body",
        bodies,
    )
    connection.executemany("DELETE FROM devices WHERE claim = ?", cleared)
    connection.executemany("INSERT INTO devices VALUES (?, ?, ?, ?)", devices)


def next_generations(connection: sqlite3.Connection, number: int) -> int:
    """Take as many generations from the counter; give the first."""
    ((last,),) = connection.execute(
        "UPDATE meta SET value = value + ? WHERE name = 'generation' RETURNING value", (number,)
    ).fetchall()
    return last - number + 1


def _changed(claim: StoredClaim, known: Mapping[str, _Known]) -> bool:
    row = known.get(claim.uid)
    return row is None or row.devices != devices_of(claim)


def _load(rows: Iterable[tuple[str, int, object, int]]) -> Iterator[StoredClaim]:
    for uid, generation, body, expected in rows:
        try:
            claim = load(body, expected=expected)
        except DamagedRowError as error:
            raise DamagedRowError(f"the row of claim {uid}: {error}") from error
        if (claim.uid, claim.generation) != (uid, generation):
            raise DamagedRowError(f"the row of claim {uid} has another claim's content")
        yield claim


def _chunks(values: Sequence[ValueT]) -> Iterator[Sequence[ValueT]]:
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]


def _marks(values: Collection[object]) -> str:
    return ",".join("?" * len(values))
