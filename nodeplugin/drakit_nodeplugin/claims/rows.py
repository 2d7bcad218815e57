"""
The rows of a checkpoint: reading them, and writing a batch as compare-and-swap.

Functions over an open connection of the present schema (:mod:`.schema`). A row is written by whom
knows its generation, and nobody else; an exclusive device has one holder. When a connection is
opened, and what becomes of errors, is :mod:`.checkpoint`'s business.

They block. They must not know asyncio, files, or what the states of a claim lead to.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

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
    "claims_in_state",
    "claims_of",
    "count",
    "delete",
    "opens",
    "page",
    "transaction",
    "uids",
    "write",
)

_CHUNK = 500
"""Values per statement: SQLite binds at most 32,766 variables; a pod has at most a few claims."""

_COLUMNS = "uid, generation, body, checksum"

ValueT = TypeVar("ValueT")

_Key = tuple[str, str]
"""Pool and device."""


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
    """Not written: another claim has an exclusive device of theirs."""

    fenced: frozenset[str]
    """Not written: the stored row is not the one that the writer knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """A row of the batch as it is stored before the write."""

    id: int
    generation: int
    devices: frozenset[tuple[str, str, int]]


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
        query = f"SELECT {_COLUMNS} FROM claims WHERE uid IN ({_marks(chunk)})"  # noqa: S608
        yield from _load(connection.execute(query, chunk))


def claims_in_state(connection: sqlite3.Connection, state: State) -> list[StoredClaim]:
    """Give the claims in one state; raise DamagedRowError."""
    query = f"SELECT {_COLUMNS} FROM claims WHERE state = ?"  # noqa: S608
    return list(_load(connection.execute(query, (state,))))


def page(connection: sqlite3.Connection, *, after: str, size: int) -> list[StoredClaim]:
    """Give the next claims by UID; raise DamagedRowError."""
    query = f"SELECT {_COLUMNS} FROM claims WHERE uid > ? ORDER BY uid LIMIT ?"  # noqa: S608
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
    ours may then be the late end of something that it has undone.
    """
    known = _known(connection, [claim.uid for claim in claims])
    fenced: set[str] = set()
    fresh: dict[str, StoredClaim] = {}
    for claim in claims:
        if claim.uid in fresh:
            raise ValueError(f"claim {claim} is written twice in one batch")
        row = known.get(claim.uid)
        straight = claim.generation == 0 and claim.state == "prepared"
        if claim.generation != (row.generation if row else 0) or (straight and not alone):
            fenced.add(claim.uid)
        else:
            fresh[claim.uid] = claim
    passed, held = _without_held(connection, fresh.values(), known)
    written = _put(connection, passed, known, owner=owner)
    return Outcome(written=written, held=held, fenced=frozenset(fenced))


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
    connection.executemany("DELETE FROM devices WHERE claim = ?", ids)
    connection.executemany("DELETE FROM claims WHERE id = ?", ids)
    return frozenset(kept)


def _known(connection: sqlite3.Connection, uids: Sequence[str]) -> dict[str, _Known]:
    rows: dict[str, tuple[int, int]] = {}
    devices: dict[int, set[tuple[str, str, int]]] = {}
    for chunk in _chunks(uids):
        query = f"SELECT uid, id, generation FROM claims WHERE uid IN ({_marks(chunk)})"  # noqa: S608
        rows.update((uid, (id_, gen)) for uid, id_, gen in connection.execute(query, chunk))
    for chunk in _chunks([id_ for id_, _ in rows.values()]):
        query = f"SELECT * FROM devices WHERE claim IN ({_marks(chunk)})"  # noqa: S608
        for id_, pool, device, exclusive in connection.execute(query, chunk):
            devices.setdefault(id_, set()).add((pool, device, exclusive))
    return {
        uid: _Known(id=id_, generation=generation, devices=frozenset(devices.get(id_, ())))
        for uid, (id_, generation) in rows.items()
    }


def _without_held(
    connection: sqlite3.Connection, claims: Collection[StoredClaim], known: Mapping[str, _Known]
) -> tuple[list[StoredClaim], dict[str, HeldDevice]]:
    """Leave out what wants a device that is held, by a row or by an earlier claim of the batch."""
    changed = [claim for claim in claims if _changed(claim, known)]
    holders = _holders(connection, {key for claim in changed for key in _exclusive(claim)})
    passed: dict[str, StoredClaim] = {}
    held: dict[str, tuple[StoredDevice, str]] = {}
    for claim in claims:
        taken = None
        if _changed(claim, known):
            wanted = _exclusive(claim)
            taken = next((k for k in wanted if holders.get(k, claim.uid) != claim.uid), None)
            if taken is None:
                former = [key for key, uid in holders.items() if uid == claim.uid]
                for key in former:
                    del holders[key]
                holders.update(dict.fromkeys(wanted, claim.uid))
            else:
                held[claim.uid] = (wanted[taken], holders[taken])
        if taken is None:
            passed[claim.uid] = claim
    found = {c.uid: c for c in claims_of(connection, [uid for _, uid in held.values()])}
    return list(passed.values()), {
        uid: HeldDevice(device=device, holder=passed.get(holder) or found[holder])
        for uid, (device, holder) in held.items()
    }


def _put(
    connection: sqlite3.Connection,
    claims: Sequence[StoredClaim],
    known: Mapping[str, _Known],
    *,
    owner: str,
) -> dict[str, StoredClaim]:
    if not claims:
        return {}
    generation = _next_generations(connection, len(claims))
    (last_id,) = connection.execute("SELECT coalesce(max(id), 0) FROM claims").fetchone()
    new: list[tuple[object, ...]] = []
    old: list[tuple[object, ...]] = []
    cleared: list[tuple[int]] = []
    devices: list[tuple[object, ...]] = []
    written: dict[str, StoredClaim] = {}
    for number, claim in enumerate(claims):
        stored = replace(claim, generation=generation + number, owner=owner)
        written[claim.uid] = stored
        body = dump(stored)
        values = (stored.state, stored.boot_id, stored.generation, owner, checksum(body), body)
        row = known.get(claim.uid)
        if row is None:
            last_id += 1
            new.append((*values, last_id, claim.uid))
        else:
            old.append((*values, row.id))
        if _changed(claim, known):
            id_ = row.id if row else last_id
            cleared.append((id_,))
            devices.extend((id_, *device) for device in _devices(claim))
    connection.executemany(
        "INSERT INTO claims (state, boot_id, generation, owner, checksum, body, id, uid) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        new,
    )
    connection.executemany(
        "UPDATE claims SET state = ?, boot_id = ?, generation = ?, owner = ?, checksum = ?, "
        "body = ? WHERE id = ?",
        old,
    )
    connection.executemany("DELETE FROM devices WHERE claim = ?", cleared)
    connection.executemany("INSERT INTO devices VALUES (?, ?, ?, ?)", devices)
    return written


def _next_generations(connection: sqlite3.Connection, number: int) -> int:
    """Take as many generations from the counter; give the first."""
    ((last,),) = connection.execute(
        "UPDATE meta SET value = value + ? WHERE name = 'generation' RETURNING value", (number,)
    ).fetchall()
    return last - number + 1


def _holders(connection: sqlite3.Connection, wanted: Collection[_Key]) -> dict[_Key, str]:
    holders: dict[_Key, str] = {}
    for chunk in _chunks(sorted(wanted)):
        pairs = ", ".join(["(?, ?)"] * len(chunk))
        rows = connection.execute(
            "SELECT devices.pool, devices.device, claims.uid FROM devices "  # noqa: S608
            f"JOIN claims ON claims.id = devices.claim WHERE devices.exclusive = 1 "
            f"AND (devices.pool, devices.device) IN (VALUES {pairs})",
            [part for key in chunk for part in key],
        )
        holders.update(((pool, device), uid) for pool, device, uid in rows)
    return holders


def _changed(claim: StoredClaim, known: Mapping[str, _Known]) -> bool:
    row = known.get(claim.uid)
    return row is None or row.devices != _devices(claim)


def _devices(claim: StoredClaim) -> frozenset[tuple[str, str, int]]:
    return frozenset((d.pool, d.device, int(d.exclusive)) for d in claim.devices)


def _exclusive(claim: StoredClaim) -> dict[_Key, StoredDevice]:
    return {(d.pool, d.device): d for d in claim.devices if d.exclusive}


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
