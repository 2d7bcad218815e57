"""
What people do to a checkpoint by hand: look at it, and forget a claim.

An inspection never writes: no salvage, and no other file while the daemon is down.
Forgetting is one transaction like those of the daemon, which may be running: what it does for the
claim at that moment is fenced by the missing row. Who may do so, and what is left to do, is
:mod:`drakit.cli`'s business.

Functions block. It must not know CDI files, the kubelet, or how things are shown.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from drakit_nodeplugin.claims.checkpoint import endpoint_rows as endpointrows
from drakit_nodeplugin.claims.checkpoint import open as opening
from drakit_nodeplugin.claims.checkpoint import rows, schema, soundness
from drakit_nodeplugin.claims.checkpoint.open import DATABASE_ERRORS
from drakit_nodeplugin.claims.checkpoint.records import StoredClaim
from drakit_nodeplugin.claims.checkpoint.salvage import salvage
from drakit_nodeplugin.devices.endpoint_store import StoredEndpoint

__all__ = ("Inspection", "InspectionError", "forget", "inspect")

_PAGE = 500
_ATTEMPTS = 3
"""Looks at a database whose daemon starts at the same moment."""


class InspectionError(Exception):
    """A checkpoint cannot be looked at, or changed by hand; the text is a sentence."""

    def __init__(self, text: str, *, foreign: bool = False) -> None:
        super().__init__(text)
        self.foreign = foreign
        """What is at the path is another program's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """A checkpoint as it is at a moment."""

    version: int | None
    """The schema version; None if it cannot be read."""

    claims: tuple[StoredClaim, ...]
    """By UID. Of a damaged database those that are still readable."""

    endpoints: tuple[StoredEndpoint, ...] = ()
    """By name; without those whose rows are damaged."""

    problems: tuple[str, ...] = ()
    """What is wrong with the database itself; the node plugin salvages it at its next start."""

    dropped: tuple[str, ...] = ()
    """Which rows of endpoints are damaged; the node plugin drops them at its next start."""

    damage: str | None = None
    """Why an earlier database was set aside, if the rest of it is not rebuilt yet."""

    set_aside: tuple[str, ...] = ()
    """Names of the files beside it that were set aside."""


def inspect(path: Path) -> Inspection:
    """Look at a checkpoint; raise :class:`InspectionError` where that is not possible."""
    try:
        aside = [
            entry.name
            for kind in ("damaged", "foreign")
            for entry in path.parent.glob(f"{path.name}.{kind}-*")
            if not entry.name.endswith(("-wal", "-shm", "-journal"))
        ]
        found = _look(path)
    except schema.NewerVersionError as error:
        raise InspectionError(f"the checkpoint {path} cannot be read: {error}") from error
    except (OSError, *DATABASE_ERRORS) as error:
        raise InspectionError(f"the checkpoint {path} cannot be read: {error}") from error
    return replace(found, set_aside=tuple(sorted(aside)))


def forget(path: Path, claim: StoredClaim) -> None:
    """
    Delete the row of a claim, if it is still the one that was looked at.

    Raises :class:`InspectionError`; then nothing was changed.
    """
    try:
        if schema.recognize(path) == 0:
            raise InspectionError(f"the checkpoint {path} is empty")
        before = os.stat(path)
        with closing(schema.connect(path)) as connection:
            with rows.transaction(connection):
                kept = rows.delete(connection, [claim])
            moved = not os.path.samestat(before, os.stat(path))
    except (schema.UnfitError, schema.NewerVersionError) as error:
        raise InspectionError(
            f"the checkpoint {path} cannot be changed: {error}; restart the node plugin"
        ) from error
    except (OSError, *DATABASE_ERRORS) as error:
        raise InspectionError(f"the checkpoint {path} cannot be changed: {error}") from error
    if kept or moved:
        raise InspectionError(
            f"claim {claim} has changed in the checkpoint {path} meanwhile: the node plugin works "
            f"on it; look again, and try again"
        )


def _look(path: Path) -> Inspection:
    try:
        version = schema.recognize(path)
    except schema.UnfitError as error:
        if error.foreign:
            raise InspectionError(f"{path} is no checkpoint: {error}", foreign=True) from error
        return _salvaged(path, None, str(error))
    except DATABASE_ERRORS as error:
        if not opening.is_damage(error):
            raise
        return _salvaged(path, None, str(error))
    if version == 0:
        return Inspection(version=0, claims=())
    for _ in range(_ATTEMPTS):
        quiet = not schema.has_log(path)
        found = _look_once(path, version)
        # Without a log it was read as a file that nobody writes: was that so to the end?
        if not quiet or not schema.has_log(path):
            return found
    raise InspectionError(f"the checkpoint {path} is being opened and closed again and again")


def _look_once(path: Path, version: int) -> Inspection:
    try:
        with closing(schema.connect_reading(path)) as connection:
            connection.execute("BEGIN")
            return _read(connection, path, version)
    except DATABASE_ERRORS as error:
        if not opening.is_damage(error):
            raise
        return _salvaged(path, version, str(error))


def _read(connection: sqlite3.Connection, path: Path, version: int) -> Inspection:
    if problems := list(soundness.problems(connection)):
        return _salvaged(path, version, *problems)
    damage, _ = opening.remembered_damage(connection)
    return Inspection(
        version=version,
        claims=tuple(_rows(connection)),
        damage=damage,
        endpoints=tuple(endpointrows.read(connection)),
        dropped=tuple(endpointrows.damaged(connection).values()),
    )


def _rows(connection: sqlite3.Connection) -> Iterator[StoredClaim]:
    after = ""
    while page := rows.page(connection, after=after, size=_PAGE):
        yield from page
        after = page[-1].uid


def _salvaged(path: Path, version: int | None, *problems: str) -> Inspection:
    """Read what is readable of a damaged database, into memory."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as memory:
        schema.create(memory)
        salvage(path, memory)
        return Inspection(
            version=version,
            claims=tuple(_rows(memory)),
            endpoints=tuple(endpointrows.read(memory)),
            problems=problems,
        )
