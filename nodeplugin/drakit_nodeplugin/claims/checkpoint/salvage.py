"""
Salvage: what can still be read of a damaged checkpoint, copied into a new one.

A row is taken if its bytes pass their checksum, wherever it stands; what the damaged database
knows of other claims (their UIDs, in whatever is left of tables and indexes) is told, so that they
can be rebuilt from elsewhere. When this is done is :mod:`.open`'s business.

Functions block. It must not know asyncio, or what a claim's states lead to.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from drakit_nodeplugin.claims.checkpoint import endpoint_rows as endpointrows
from drakit_nodeplugin.claims.checkpoint import rows, schema
from drakit_nodeplugin.claims.checkpoint.records import DamagedRowError, StoredClaim, load
from drakit_nodeplugin.devices.endpoint_store import StoredEndpoint

__all__ = ("Salvage", "salvage")

_BATCH = 50
"""Rows in memory at once; each can hold 128 KiB of opaque parameters."""

_MAX_PROBES = 1_000_000
"""Highest number by which a row that a damaged page hides is asked for."""

_BEYOND = 200
"""Numbers above the highest known one that are also tried."""

_UNREADABLE = (sqlite3.Error, ValueError, MemoryError, OverflowError)
"""What damage can lead to: wrong sizes, and names or messages with damaged text in them, too."""

_Row = tuple[Any, ...]
"""As it was found: not even the types are sure. The first column is its key, or nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Salvage:
    """What became of the claims of a database that was set aside. Endpoints are not counted: those
    that are lost come back by themselves."""

    kept: int
    """Rows that were copied, each with its generation."""

    lost: int
    """Rows that are known to have been there and could not be read. There may have been more:
    of a database whose first page is gone nothing is known."""

    lost_uids: frozenset[str]
    """The claims of lost rows, as far as they are known."""


_BODIES = (
    "SELECT id, checksum, body FROM bodies",
    "SELECT NULL, checksum, body FROM bodies",
)
"""Queries for key, checksum and body of all rows. The second one does not need the key's name."""

_NAMES = (
    "SELECT id, uid FROM claims ORDER BY id",
    "SELECT id, uid FROM claims ORDER BY id DESC",
    "SELECT id, uid FROM claims ORDER BY uid",
    "SELECT id, uid FROM claims ORDER BY uid DESC",
)
"""Queries for key and UID of all rows; each uses another tree of pages."""


def salvage(path: Path, target: sqlite3.Connection) -> Salvage:
    """
    Copy what is readable at `path` into a new, empty database, within the caller's transaction.

    Raises sqlite3.Error if the target cannot be written, or the source not be opened. The counter
    of the target is above all that was seen.
    """
    # SQLite would wait for the other end of a pipe, and removes the log beside an empty file.
    if not path.is_file() or schema.is_empty(path):
        return Salvage(kept=0, lost=0, lost_uids=frozenset())
    connection = schema.connect_reading(path)
    # Damaged text must not hide the rest of its row.
    connection.text_factory = _decode
    with closing(connection):
        return _Copy(connection, target).run()


class _Copy:
    """One salvage under way."""

    def __init__(self, source: sqlite3.Connection, target: sqlite3.Connection) -> None:
        self._source = source
        self._target = target
        self._kept: dict[str, object] = {}
        """UIDs that were copied, with the key of their row."""
        self._named: dict[object, str] = {}
        self._met: set[object] = set()
        """Keys of rows that are there, good or bad."""
        self._refused: set[str] = set()
        self._failed = False
        """Whether the last query met damage."""

    def run(self) -> Salvage:
        # A table whose definition is damaged does not hide the others then.
        list(self._readable("PRAGMA writable_schema = ON"))
        for query in _NAMES:
            for key, uid in self._readable(query):
                if isinstance(uid, str):
                    self._named.setdefault(key, uid)
        claims = self._claims()
        while batch := list(islice(claims, _BATCH)):
            self._keep(batch)
        self._keep_endpoints()
        lost = (self._met | set(self._named)) - set(self._kept.values())
        uids = {self._named[key] for key in lost if key in self._named} | self._refused
        return Salvage(
            kept=len(self._kept), lost=len(lost), lost_uids=frozenset(uids - set(self._kept))
        )

    def _keep(self, batch: list[tuple[object, StoredClaim]]) -> None:
        new = {claim.uid: (key, claim) for key, claim in batch if claim.uid not in self._kept}
        adopted = rows.adopt(self._target, [claim for _, claim in new.values()])
        self._kept.update((uid, key) for uid, (key, _) in new.items() if uid in adopted)
        self._refused.update(uid for uid in new if uid not in adopted)

    def _keep_endpoints(self) -> None:
        found: dict[str, StoredEndpoint] = {}
        for order in ("", " DESC"):  # from both ends up to damage
            query = f"SELECT name, checksum, body FROM endpoints ORDER BY name{order}"  # noqa: S608
            for row in self._readable(query):
                with suppress(DamagedRowError):
                    endpoint = endpointrows.load(*row)
                    found[endpoint.name] = endpoint
        endpointrows.write(self._target, found.values())

    def _claims(self) -> Iterator[tuple[object, StoredClaim]]:
        for row in self._rows():
            bodies = [value for value in row if isinstance(value, bytes)]
            sums = [value for value in row if isinstance(value, int)]
            if not bodies:
                continue
            if row[0] is not None:
                self._met.add(row[0])
            for body, expected in product(bodies, sums):
                with suppress(DamagedRowError):
                    yield row[0], load(body, expected=expected)

    def _rows(self) -> Iterator[_Row]:
        """Read what can be read, some rows several times: in other words too, because the damage
        may be in a name; from both ends up to damage; at last one by one."""
        tables = self._readable("SELECT name FROM sqlite_master WHERE type = 'table'")
        unnamed = [f"SELECT * FROM {_quoted(t)}" for (t,) in tables if t != "endpoints"]  # noqa: S608
        for query in (*_BODIES, *unnamed):
            yield from self._readable(query)
            if not self._failed and query not in unnamed:
                return
            if self._failed:
                yield from self._readable(f"{query} ORDER BY 1 DESC")
        for key in self._hidden():
            yield from self._readable(f"{_BODIES[0]} WHERE id = ?", key)

    def _hidden(self) -> list[object]:
        """Give the keys of rows that may be behind damage: known ones, and numbers beside them."""
        kept = set(self._kept.values())
        known = {*self._named, *self._met}
        numbers = [key for key in known if isinstance(key, int)]
        guessed = range(1, min(max(numbers, default=0) + _BEYOND, _MAX_PROBES))
        return [key for key in dict.fromkeys((*known, *guessed)) if key not in kept]

    def _readable(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Give the rows of a query up to damage."""
        self._failed = False
        try:
            yield from self._source.execute(query, values)
        except _UNREADABLE:
            self._failed = True


def _quoted(name: object) -> str:
    return '"' + str(name).replace('"', '""') + '"'


def _decode(text: bytes) -> str:
    return text.decode(errors="replace")
