"""
Whether a checkpoint's database is sound: SQLite's own check, and each row against its checksum.

A claim stands in the database several times (head, body, devices), so that queries are fast; all
must say the same. Endpoints are no part of it: of them a damaged row is dropped alone
(:mod:`.endpoint_rows`). What becomes of a database that is not sound is :mod:`.open`'s business.

Functions block. It must not know files.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator

from drakit_nodeplugin.claims.checkpoint.holds import HeldAs, TakenFrom, counters_of, devices_of
from drakit_nodeplugin.claims.checkpoint.records import DamagedRowError, load

__all__ = ("problems",)


def problems(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield the problems of a database; may also raise sqlite3.Error."""
    yield from _integrity(connection)
    generation = 0
    devices: dict[int, set[HeldAs]] = defaultdict(set)
    for id_, *held in connection.execute("SELECT claim, pool, device, hold, amounts FROM devices"):
        devices[id_].add(tuple(held))
    counters: dict[int, set[TakenFrom]] = defaultdict(set)
    for id_, *taken in connection.execute(
        "SELECT claim, pool, counter_set, device, amounts FROM counters"
    ):
        counters[id_].add(tuple(taken))
    # One row at a time: a join with the devices would repeat the body for each device.
    heads = connection.execute(
        "SELECT id, uid, state, boot_id, generation, checksum, body "
        "FROM claims LEFT JOIN bodies USING (id) ORDER BY id"
    )
    for id_, uid, *head, expected, body in heads:
        try:
            claim = load(body, expected=expected)
        except DamagedRowError as error:
            yield f"the row of claim {uid}: {error}"
            continue
        generation = max(generation, claim.generation)
        if [uid, *head] != [claim.uid, claim.state, claim.boot_id, claim.generation]:
            yield f"the row of claim {uid}: its columns do not say what its body says"
        if frozenset(devices.pop(id_, ())) != devices_of(claim):
            yield f"the row of claim {uid}: its devices are not those of its body"
        if frozenset(counters.pop(id_, ())) != counters_of(claim):
            yield f"the row of claim {uid}: its counters are not those of its body"
    for table, column in (("devices", "claim"), ("counters", "claim"), ("bodies", "id")):
        query = f"SELECT 1 FROM {table} WHERE {column} NOT IN (SELECT id FROM claims)"  # noqa: S608
        if connection.execute(query).fetchone():
            yield f"there are {table} without a claim"
    yield from _numbers(connection, generation)


def _integrity(connection: sqlite3.Connection) -> Iterator[str]:
    for (verdict,) in connection.execute("PRAGMA integrity_check(10)"):
        # The first one has a heading before it.
        yield from (line for line in verdict.splitlines() if line != "ok" and line[:3] != "***")


def _numbers(connection: sqlite3.Connection, generation: int) -> Iterator[str]:
    numbers = dict(connection.execute("SELECT name, value FROM meta"))
    for name, least in (("generation", generation), ("opens", 0)):
        value = numbers.get(name)
        if not isinstance(value, int) or value < least:
            yield f"its counter of {name} is {value!r}, but must be {least} or more"
