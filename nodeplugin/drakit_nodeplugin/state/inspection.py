"""
Manual operations on a checkpoint: inspect it, and forget a claim.

An inspection never writes: it quarantines nothing, and creates no file while the daemon is down.
Forgetting is one transaction, like those of the daemon, which may be running. The missing row
fences the daemon's current work on the claim. :mod:`drakit.cli` decides when that is allowed, and
updates everything outside the checkpoint.

Functions block. It must not know CDI files, the kubelet, or how results are shown.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from drakit_nodeplugin.state import quarantine, rows, schema
from drakit_nodeplugin.state.quarantine import DATABASE_ERRORS
from drakit_nodeplugin.state.records import StoredClaim, StoredEndpoint

__all__ = ("Inspection", "InspectionError", "forget", "inspect")

_ATTEMPTS = 3
"""Reads of a database whose daemon starts at the same moment."""


class InspectionError(Exception):
    """A checkpoint cannot be inspected, or changed by hand; the text is a sentence."""

    def __init__(self, text: str, *, foreign: bool = False) -> None:
        super().__init__(text)
        self.foreign = foreign
        """The file at the path belongs to another program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """A snapshot of a checkpoint."""

    version: int | None
    """The schema version; None if it cannot be read."""

    claims: tuple[StoredClaim, ...]
    """Claims, ordered by UID. For a damaged database, only claims whose rows are sound."""

    endpoints: tuple[StoredEndpoint, ...] = ()
    """Endpoints, ordered by name, without those whose rows are damaged."""

    problems: tuple[str, ...] = ()
    """Problems of the database itself; the node plugin quarantines it at its next start."""

    dropped: tuple[str, ...] = ()
    """Damaged rows of endpoints; the node plugin drops them at its next start."""

    damage: str | None = None
    """The cause of lost entries that are not rebuilt yet."""

    quarantined: tuple[str, ...] = ()
    """Names of the quarantined files beside it."""


def inspect(path: Path) -> Inspection:
    """Inspect a checkpoint; raise :class:`InspectionError` if that is not possible."""
    try:
        quarantined = [
            entry.name
            for kind in ("damaged", "foreign")
            for entry in path.parent.glob(f"{path.name}.{kind}-*")
            if not entry.name.endswith(("-wal", "-shm", "-journal"))
        ]
        found = _inspect(path)
    except (OSError, schema.NewerVersionError, *DATABASE_ERRORS) as error:
        raise InspectionError(f"the checkpoint {path} cannot be read: {error}") from error
    return replace(found, quarantined=tuple(sorted(quarantined)))


def forget(path: Path, claim: StoredClaim) -> None:
    """
    Delete the row of a claim, if it is still the one that was inspected.

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
            f"claim {claim} has changed in the checkpoint {path} since this command read it; "
            f"check it with 'drakit node checkpoint show', and try again"
        )


def _inspect(path: Path) -> Inspection:
    version: int | None = None
    try:
        version = schema.recognize(path)
        if version == 0:
            return Inspection(version=0, claims=())
        for _ in range(_ATTEMPTS):
            quiet = not schema.has_log(path)
            found = _read(path, version)
            # Without a log, the file was read as one without writers. Check that none has begun.
            if not quiet or not schema.has_log(path):
                return found
    except schema.UnfitError as error:
        if error.foreign:
            raise InspectionError(f"{path} is not a checkpoint: {error}", foreign=True) from error
        return _of_damaged(path, version, str(error))
    except DATABASE_ERRORS as error:
        return _of_damage(path, version, error)
    raise InspectionError(
        f"the checkpoint {path} is in constant use by another process; try again later"
    )


def _read(path: Path, version: int) -> Inspection:
    """Read a database. Errors are returned in the result, because a process that opens the database
    at the same time can cause them."""
    try:
        with closing(schema.connect_reading(path)) as connection:
            connection.execute("BEGIN")
            if problems := list(schema.problems(connection)):
                return _of_damaged(path, version, *problems)
            return Inspection(
                version=version,
                claims=tuple(rows.page(connection)),
                damage=quarantine.remembered_damage(connection),
                endpoints=tuple(rows.endpoints(connection)),
                dropped=tuple(rows.damaged_endpoints(connection).values()),
            )
    except DATABASE_ERRORS as error:
        return _of_damage(path, version, error)


def _of_damage(path: Path, version: int | None, error: Exception) -> Inspection:
    """Return the inspection of a damaged database; raise an error that is not damage."""
    if not quarantine.is_damage(error):
        raise error
    return _of_damaged(path, version, str(error))


def _of_damaged(path: Path, version: int | None, *problems: str) -> Inspection:
    """Copy the sound rows of a damaged database into memory, and read them there."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as memory:
        schema.create(memory)
        quarantine.copy_rows(path, memory)
        return Inspection(
            version=version,
            claims=tuple(rows.page(memory)),
            endpoints=tuple(rows.endpoints(memory)),
            problems=problems,
        )
