"""
The rows of a checkpoint: reading them, and writing a batch as compare-and-swap.

Functions over an open connection of the present schema (:mod:`.schema`). A row is written by whom
knows its generation, and no other; the holders of devices are :mod:`.holds`' concern. When a
connection is opened, and what becomes of errors, is :mod:`.store`'s.

They block. They must not know asyncio, files, or what the states of a claim lead to.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from drakit_nodeplugin.claims.checkpoint.holds import (
    HeldAs,
    Refusal,
    TakenFrom,
    contested,
    counters_of,
    devices_of,
    incomplete,
    refusal,
)
from drakit_nodeplugin.claims.checkpoint.records import (
    DamagedRowError,
    State,
    StoredClaim,
    StoredDevice,
    checksum,
    dump,
    load,
)
from drakit_nodeplugin.devices.hardware import Hardware

__all__ = (
    "Held",
    "Outcome",
    "adopt",
    "claims_in_state",
    "claims_of",
    "count",
    "count_open",
    "delete",
    "generations",
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
class Held:
    """A device that a claim of a batch cannot have."""

    device: StoredDevice
    holder: StoredClaim | None
    """The conflicting claim; None if the claim alone exceeds the inventory."""

    beside: str = ""
    """The holder's device."""

    shortage: str | None = None
    """The reason why both do not fit, as a clause; None if both want one device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of the claims of one write; each is in exactly one of the three."""

    written: Mapping[str, StoredClaim]
    """As they are stored now, with their new generation and owner."""

    held: Mapping[str, Held]
    """Not written: other claims hold one of their devices, or hardware that they need."""

    fenced: frozenset[str]
    """Not written: the stored row is not the one that the writer knows."""

    unplaced: Mapping[str, OSError] = field(default_factory=dict[str, OSError])
    """Written, but their CDI files could not be put in place."""


class _Known(NamedTuple):
    """A row of a batch as it is stored before the write."""

    id: int
    generation: int
    devices: frozenset[HeldAs]
    counters: frozenset[TakenFrom]


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


def generations(connection: sqlite3.Connection, uids: Sequence[str]) -> dict[str, int]:
    """Return the generations of the rows that are stored of these."""
    found: dict[str, int] = {}
    for chunk in _chunks(uids):
        query = f"SELECT uid, generation FROM claims WHERE uid IN ({_marks(chunk)})"  # noqa: S608
        found.update(connection.execute(query, chunk))
    return found


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
    """Return how often a daemon opened the database."""
    (number,) = connection.execute("SELECT value FROM meta WHERE name = 'opens'").fetchone()
    return number


# ---------------------------------------------------------------- writing


def write(
    connection: sqlite3.Connection,
    claims: Collection[StoredClaim],
    *,
    owner: str,
    alone: bool,
    hardware: Hardware | None = None,
) -> Outcome:
    """
    Write claims whose generation is that of their row, within the transaction of the caller.

    Not `alone`: another process works on the database too; what is written without an intent of
    ours may then be the late end of something that it has undone. Without `hardware`, claims are
    compared only by the names of devices. Raises ValueError for a claim that is given twice, or
    that is not JSON.
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
    if hardware is not None:
        _complete(connection, list(fresh.values()), hardware)
    first = next_generations(connection, len(fresh))
    entries = {
        uid: (replace(claim, generation=generation, owner=owner), known.get(uid))
        for generation, (uid, claim) in enumerate(fresh.items(), start=first)
    }
    refused = _put(connection, entries, hardware=hardware)
    written = {uid: claim for uid, (claim, _) in entries.items() if uid not in refused}
    names = {why.holder for why in refused.values()} - {None}
    holders = {c.uid: c for c in claims_of(connection, [uid for uid in names if uid])}
    held = {
        uid: Held(
            device=why.device,
            holder=None if why.holder is None else holders[why.holder],
            beside=why.held,
            shortage=why.shortage,
        )
        for uid, why in refused.items()
    }
    return Outcome(written=written, held=held, fenced=frozenset(fenced))


def adopt(connection: sqlite3.Connection, claims: Collection[StoredClaim]) -> frozenset[str]:
    """
    Take over rows of another database as they are, within the transaction of the caller.

    Returns the UIDs of those that were written: of two that conflict, the second is left out.
    Their claims must not have rows yet.
    """
    refused = _put(connection, {claim.uid: (claim, None) for claim in claims})
    passed = [claim for claim in claims if claim.uid not in refused]
    highest = max((claim.generation for claim in passed), default=0)
    connection.execute(
        "UPDATE meta SET value = max(value, ?) WHERE name = 'generation'", (highest,)
    )
    return frozenset(claim.uid for claim in passed)


def delete(connection: sqlite3.Connection, claims: Collection[StoredClaim]) -> frozenset[str]:
    """Delete rows of these generations, within the transaction of the caller; give the others."""
    known = _known(connection, [claim.uid for claim in claims])
    kept: set[str] = set()
    ids: list[tuple[int]] = []
    with_counters: list[tuple[int]] = []
    for claim in claims:
        row = known.get(claim.uid)
        if row is None:
            continue
        if row.generation != claim.generation:
            kept.add(claim.uid)
            continue
        ids.append((row.id,))
        if row.counters:
            with_counters.append((row.id,))
    connection.executemany("DELETE FROM counters WHERE claim = ?", with_counters)
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
    counters: dict[int, list[TakenFrom]] = {id_: [] for id_ in devices}
    for chunk in _chunks(list(devices)):
        query = f"SELECT * FROM devices WHERE claim IN ({_marks(chunk)})"  # noqa: S608
        for id_, *device in connection.execute(query, chunk):
            devices[id_].append(tuple(device))
        query = (
            "SELECT claim, pool, counter_set, device, amounts FROM counters "  # noqa: S608
            f"WHERE claim IN ({_marks(chunk)})"
        )
        for id_, *taken in connection.execute(query, chunk):
            counters[id_].append(tuple(taken))
    return {
        uid: _Known(id_, generation, frozenset(devices[id_]), frozenset(counters[id_]))
        for uid, id_, generation in found
    }


_Entry = tuple[StoredClaim, _Known | None]
"""A claim to be written, and its present row."""


def _put(
    connection: sqlite3.Connection,
    entries: Mapping[str, _Entry],
    *,
    hardware: Hardware | None = None,
) -> dict[str, Refusal]:
    """Write rows by UID; return those that are not written because of the holds of others."""
    moved = {
        uid
        for uid, (claim, row) in entries.items()
        if row is not None and _names(row) != _names_of(claim)
    }
    judged = [claim for uid, (claim, row) in entries.items() if row is None or uid in moved]
    # A row whose devices change gives up some: in its turn, and not before.
    doubtful = moved | contested(connection, judged)
    _store(connection, [entry for uid, entry in entries.items() if uid not in doubtful])
    refused: dict[str, Refusal] = {}
    # One after the other: devices of one claim are taken for the rest of the batch.
    for uid, (claim, row) in entries.items():
        if uid not in doubtful:
            continue
        why = refusal(connection, claim, row=row.id if row else 0, hardware=hardware)
        # What is to be undone may be more than is listed now: only a holder is in its way.
        if why is not None and (why.holder or claim.state != "unpreparing"):
            refused[uid] = why
        else:
            _store(connection, [(claim, row)])
    return refused


def _store(connection: sqlite3.Connection, entries: Collection[_Entry]) -> None:
    """Write rows that do not conflict, with a few statements however many they are."""
    if not entries:
        return
    (next_id,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM claims").fetchone()
    heads: list[tuple[object, ...]] = []
    changed: list[tuple[object, ...]] = []
    bodies: list[tuple[int, StoredClaim]] = []
    devices: list[tuple[object, ...]] = []
    counters: list[tuple[int, frozenset[TakenFrom]]] = []
    for claim, row in entries:
        head = (claim.uid, claim.state, claim.boot_id, claim.generation)
        held, taken = devices_of(claim), counters_of(claim)
        if row is None:
            id_, next_id = next_id, next_id + 1
            heads.append((id_, *head))
        else:
            id_ = row.id
            changed.append((*head, id_))
            if row.devices != held:
                connection.execute("DELETE FROM devices WHERE claim = ?", (id_,))
        bodies.append((id_, claim))
        if row is None or row.devices != held:
            devices += [(id_, *device) for device in held]
        if taken != (row.counters if row else frozenset()):
            counters.append((id_, taken))
    connection.executemany("INSERT INTO claims VALUES (?, ?, ?, ?, ?)", heads)
    connection.executemany(
        "UPDATE claims SET uid = ?, state = ?, boot_id = ?, generation = ? WHERE id = ?", changed
    )
    _put_bodies(connection, bodies)
    connection.executemany("INSERT INTO devices VALUES (?, ?, ?, ?, ?)", devices)
    for id_, taken in counters:
        _put_counters(connection, id_, taken)


def _put_bodies(connection: sqlite3.Connection, bodies: Iterable[tuple[int, StoredClaim]]) -> None:
    dumped = [(id_, dump(claim)) for id_, claim in bodies]
    connection.executemany(
        "INSERT INTO bodies VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
        "checksum = excluded.checksum, body = excluded.body",
        [(id_, checksum(body), body) for id_, body in dumped],
    )


def _put_counters(
    connection: sqlite3.Connection, id_: int, counters: Collection[TakenFrom]
) -> None:
    connection.execute("DELETE FROM counters WHERE claim = ?", (id_,))
    connection.executemany(
        "INSERT INTO counters (claim, pool, counter_set, device, amounts) VALUES (?, ?, ?, ?, ?)",
        [(id_, *taken) for taken in counters],
    )


def _complete(
    connection: sqlite3.Connection, claims: Collection[StoredClaim], hardware: Hardware
) -> None:
    """
    Add the consumption of their devices to rebuilt rows that block claims.

    Their generation stays: only the knowledge about them changes.
    """
    wanted = {uid for claim in claims for uid in incomplete(connection, claim)}
    wanted -= {claim.uid for claim in claims}  # they are written as they are given
    if not wanted:
        return
    known = _known(connection, [*wanted])
    for claim in [*claims_of(connection, [*wanted])]:
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
        row = known[claim.uid]
        if (counters := counters_of(completed)) != row.counters:
            _put_bodies(connection, [(row.id, completed)])
            _put_counters(connection, row.id, counters)


def next_generations(connection: sqlite3.Connection, number: int) -> int:
    """Take as many generations from the counter; give the first."""
    ((last,),) = connection.execute(
        "UPDATE meta SET value = value + ? WHERE name = 'generation' RETURNING value", (number,)
    ).fetchall()
    return last - number + 1


def _names(row: _Known) -> frozenset[tuple[str, str, str]]:
    return frozenset((pool, device, hold) for pool, device, hold, _ in row.devices)


def _names_of(claim: StoredClaim) -> frozenset[tuple[str, str, str]]:
    return frozenset((device.pool, device.device, device.hold) for device in claim.devices)


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
