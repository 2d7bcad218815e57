"""
Whether a checkpoint's database is sound: SQLite's own check, and each row against its checksum.

A claim stands in the database several times (head, body, devices), so that queries are fast; all
must say the same. Endpoints are no part of it: of them a damaged row is dropped alone
(:mod:`.endpointrows`). What becomes of a database that is not sound is :mod:`.opening`'s business.

Functions block. It must not know files.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from itertools import groupby

from drakit_nodeplugin.claims.holds import devices_of
from drakit_nodeplugin.claims.stored import DamagedRowError, load

__all__ = ("problems",)


def problems(connection: sqlite3.Connection) -> Iterator[str]:
    """Report what is wrong with a database; may raise sqlite3.Error, too."""
    yield from _integrity(connection)
    generation = 0
    joined = connection.execute(
        "SELECT claims.id, uid, state, boot_id, generation, checksum, body, pool, device, hold "
        "FROM claims LEFT JOIN bodies USING (id) LEFT JOIN devices ON devices.claim = claims.id "
        "ORDER BY claims.id"
    )
    for _, group in groupby(joined, key=lambda row: row[0]):
        found = list(group)
        _, uid, *head, expected, body = found[0][:-3]
        devices = {row[-3:] for row in found}
        try:
            claim = load(body, expected=expected)
        except DamagedRowError as error:
            yield f"the row of claim {uid}: {error}"
            continue
        generation = max(generation, claim.generation)
        if [uid, *head] != [claim.uid, claim.state, claim.boot_id, claim.generation]:
            yield f"the row of claim {uid}: its columns do not say what its body says"
        if devices != (devices_of(claim) or {(None, None, None)}):
            yield f"the row of claim {uid}: its devices are not those of its body"
    for table, column in (("devices", "claim"), ("bodies", "id")):
        query = f"SELECT 1 FROM {table} WHERE {column} NOT IN (SELECT id FROM claims)"  # noqa: S608
        if connection.execute(query).fetchone():
            yield f"there are {table} without a claim"
    yield from _counters(connection, generation)


def _integrity(connection: sqlite3.Connection) -> Iterator[str]:
    for (verdict,) in connection.execute("PRAGMA integrity_check(10)"):
        # The first one has a heading before it.
        yield from (line for line in verdict.splitlines() if line != "ok" and line[:3] != "***")


def _counters(connection: sqlite3.Connection, generation: int) -> Iterator[str]:
    counters = dict(connection.execute("SELECT name, value FROM meta"))
    for name, least in (("generation", generation), ("opens", 0)):
        value = counters.get(name)
        if not isinstance(value, int) or value < least:
            yield f"its counter of {name} is {value!r}, but must be {least} or more"
