"""
The rows of endpoints in a checkpoint: the names of their devices, so that a restart can finish what
had begun.

Each row is read and written alone, by its name: unlike claims, endpoints have one writer, and
nothing depends on an order. A damaged row is ignored: an endpoint reports its devices again when it
returns. The device manager decides what the rows are for
(:mod:`drakit_nodeplugin.devices.endpoint_store`).

Functions block. It must not know claims, asyncio, or what becomes of an endpoint.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import orjson

from drakit_nodeplugin.claims.checkpoint.records import DamagedRowError, checksum
from drakit_nodeplugin.devices.endpoint_store import StoredEndpoint

__all__ = ("damaged", "forget", "load", "read", "write")

_FIELDS = frozenset(field.name for field in fields(StoredEndpoint))

_READ = "SELECT name, checksum, body FROM endpoints"
_WRITE = "INSERT OR REPLACE INTO endpoints VALUES (?, ?, ?)"


def read(connection: sqlite3.Connection) -> list[StoredEndpoint]:
    """Return the endpoints by name; without those whose rows are damaged."""
    found = _rows(connection)
    return sorted((e for _, e in found if isinstance(e, StoredEndpoint)), key=lambda e: e.name)


def damaged(connection: sqlite3.Connection) -> Mapping[object, str]:
    """Return a sentence for each damaged row, by the stored name."""
    return {
        name: f"the row of endpoint {name}: {error}"
        for name, error in _rows(connection)
        if isinstance(error, DamagedRowError)
    }


def write(connection: sqlite3.Connection, endpoints: Iterable[StoredEndpoint]) -> None:
    """
    Write endpoints over their rows, within the caller's transaction.

    Raises ValueError for a name that is no JSON.
    """
    bodies = [(endpoint.name, _dump(endpoint)) for endpoint in endpoints]
    connection.executemany(_WRITE, [(name, checksum(body), body) for name, body in bodies])


def forget(connection: sqlite3.Connection, names: Collection[object]) -> None:
    """Delete rows by their stored names, within the caller's transaction; a missing one is fine."""
    connection.executemany("DELETE FROM endpoints WHERE name = ?", [(name,) for name in names])


def load(name: object, expected: object, body: object) -> StoredEndpoint:
    """Read a row; raise DamagedRowError if it is not what was written."""
    if not isinstance(body, bytes) or checksum(body) != expected:
        raise DamagedRowError("its checksum does not match")
    try:
        stored: dict[str, Any] = orjson.loads(body)
        # A later version may have added fields.
        known = {name: value for name, value in stored.items() if name in _FIELDS}
        known["pools"] = {pool: tuple(names) for pool, names in known["pools"].items()}
        endpoint = StoredEndpoint(**known)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedRowError(f"it cannot be read: {error}") from error
    if endpoint.name != name:
        raise DamagedRowError("it has another endpoint's content")
    return endpoint


def _rows(
    connection: sqlite3.Connection,
) -> Iterator[tuple[object, StoredEndpoint | DamagedRowError]]:
    for name, expected, body in connection.execute(_READ):
        try:
            yield name, load(name, expected, body)
        except DamagedRowError as error:
            yield name, error


def _dump(endpoint: StoredEndpoint) -> bytes:
    try:
        return orjson.dumps(endpoint, default=dict)
    except (TypeError, ValueError) as error:
        # The device manager checks everything but an endpoint's name.
        raise ValueError(f"endpoint {endpoint.name!r} is no JSON: {error}") from error
