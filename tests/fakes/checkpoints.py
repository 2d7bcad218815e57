"""Checkpoint files for tests: what they hold, and what anybody can still read of damaged ones."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from drakit_nodeplugin.state.checkpoint import Checkpoint
from drakit_nodeplugin.state.records import (
    DamagedRowError,
    State,
    StoredClaim,
    StoredDevice,
    checksum,
    load,
)
from drakit_nodeplugin.state.schema import VERSION

PARTS = ("", "-wal", "-shm")
DRIVER = "camera.example.com"


def stored_claim(name: str, *, state: State = "preparing", **fields) -> StoredClaim:
    """Make an entry that has one device of its own, unless others are given."""
    fields.setdefault("devices", (stored_device(f"cam-{name}"),))
    return StoredClaim(
        uid=f"uid-{name}",
        namespace="lab",
        name=name,
        state=state,
        boot_id=fields.pop("boot_id", "boot-1"),
        **fields,
    )


def prepared_claim(name: str, **fields) -> StoredClaim:
    """Make an entry that is prepared, and has a CDI file."""
    claim = stored_claim(name, state="prepared", **fields)
    return replace(claim, cdi_spec=f'{{"kind": "{DRIVER}/claim", "of": "{claim.uid}"}}\n')


def stored_device(name: str, **fields) -> StoredDevice:
    fields = {"pool": "node-1", "request": "main"} | fields
    return StoredDevice(device=name, **fields)


async def fill(path: Path, *, count: int = 1, crash: Path | None = None) -> list[StoredClaim]:
    """Write prepared claims; with `crash`, copy the files there as a crash would leave them."""
    checkpoint = Checkpoint(path)
    await checkpoint.open()
    claims = [stored_claim(f"{number:03}") for number in range(count)]
    stored: list[StoredClaim] = []
    for start in range(0, count, 10):
        begun = await checkpoint.write(claims[start : start + 10])
        text = '{"devices": "%s"}' % ("x" * 300)
        done = [replace(c, state="prepared", cdi_spec=text) for c in begun.written.values()]
        stored += (await checkpoint.write(done)).written.values()
    if crash is not None:
        crash.parent.mkdir(parents=True, exist_ok=True)
        copy(path, crash)
    await checkpoint.close()
    return stored


def as_successor(connection: sqlite3.Connection) -> None:
    """Shape a database as the next version may, so that this one can still use it."""
    connection.execute("CREATE TABLE later (claim INTEGER PRIMARY KEY, more TEXT)")
    connection.execute("CREATE INDEX later_more ON later (more)")
    connection.execute("INSERT INTO later SELECT id, 'kept' FROM claims")
    connection.execute("UPDATE meta SET value = ? WHERE name = 'version'", (VERSION + 1,))
    connection.execute("INSERT INTO meta VALUES ('later', 'kept')")
    for table, key in (("bodies", "id"), ("endpoints", "name")):
        query = f"SELECT {key}, body FROM {table}"
        for row, body in connection.execute(query).fetchall():
            fields = json.loads(body) | {"later": {"any": ["thing"]}}
            for device in fields.get("devices", ()):
                device["later"] = 1
            changed = json.dumps(fields).encode()
            connection.execute(
                f"UPDATE {table} SET body = ?, checksum = ? WHERE {key} = ?",
                (changed, checksum(changed), row),
            )


def copy(path: Path, target: Path) -> None:
    for part in PARTS:
        if path.with_name(path.name + part).exists():
            shutil.copyfile(path.with_name(path.name + part), target.with_name(target.name + part))


async def delete(checkpoint: Checkpoint, claims: Collection[StoredClaim]) -> frozenset[str]:
    """Delete entries without CDI files; return the UIDs of those that were changed meanwhile."""
    changed, unremoved = await checkpoint.release(claims)
    assert not unremoved
    return changed


class Files:
    """CDI files of claims, for a checkpoint that only searches for lost entries."""

    def __init__(self, *uids: str, error: OSError | None = None) -> None:
        self._uids = set(uids)
        self._error = error

    def without_entry(self, known: Collection[str]) -> set[str]:
        if self._error is not None:
            raise self._error
        return self._uids - set(known)


async def reopen(path: Path) -> tuple[dict[str, StoredClaim], str | None]:
    """Open and close a checkpoint. Return its content, and the damage that it reports."""
    checkpoint = Checkpoint(path)
    await checkpoint.open()
    try:
        return {c.uid: c async for page in checkpoint.pages() for c in page}, checkpoint.damage
    finally:
        await checkpoint.close()


def readable(path: Path, *, scratch: Path) -> dict[str, StoredClaim]:
    """Return the sound rows that a plain reader finds, from both ends up to damage."""
    scratch.mkdir()
    file = scratch / "copy.db"
    copy(path, file)
    found: dict[str, StoredClaim] = {}
    with closing(sqlite3.connect(file)) as connection:
        for expected, body in _everything(connection):
            try:
                claim = load(body, expected=expected)
            except (DamagedRowError, TypeError):
                continue
            found[claim.uid] = claim
    shutil.rmtree(scratch)
    return found


def _everything(connection: sqlite3.Connection) -> Iterator[tuple[int, object]]:
    queries = [
        "SELECT checksum, body FROM bodies ORDER BY id",
        "SELECT checksum, body FROM bodies ORDER BY id DESC",
    ]
    for query in queries:
        try:
            yield from connection.execute(query)
        except (sqlite3.Error, UnicodeDecodeError):
            continue
