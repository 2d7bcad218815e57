"""
Manual operations on a checkpoint: inspecting it, and forgetting a claim.

An inspection never writes: it does not quarantine anything, and creates no files while the daemon
is down. Only the driver's active instance writes to a checkpoint. Therefore, a claim is forgotten
by a request: a small file next to the checkpoint. The active instance handles the request and
removes the file. If no instance is active, :func:`forget` takes the driver's lock for one
transaction. :mod:`drakit_cli` decides when a claim can be forgotten, and updates everything outside
the checkpoint.

Functions block. The module does not depend on CDI files or the kubelet.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from drakit.layout import write_private
from drakit_nodeplugin.state import quarantine, rows, schema
from drakit_nodeplugin.state.lock import try_lock
from drakit_nodeplugin.state.quarantine import DATABASE_ERRORS, CheckpointError
from drakit_nodeplugin.state.records import StoredClaim, StoredEndpoint

FORGET_SECONDS = 10.0
"""Time limit for the node plugin to handle the request. It checks for requests once a second."""

REQUEST_PREFIX = "forget-"

_ATTEMPTS = 3
"""Maximum number of attempts to read a database while its daemon is starting."""


class InspectionError(Exception):
    """A checkpoint cannot be inspected, or changed manually. The message is a sentence."""

    def __init__(self, text: str, *, foreign: bool = False) -> None:
        super().__init__(text)
        self.foreign = foreign
        """Whether the file at the path belongs to another program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """A snapshot of a checkpoint."""

    version: int | None
    """The schema version, or None if it cannot be read."""

    claims: tuple[StoredClaim, ...]
    """The claims, sorted by UID. For a damaged database, only claims with intact rows."""

    endpoints: tuple[StoredEndpoint, ...] = ()
    """The endpoints with intact rows, sorted by name."""

    problems: tuple[str, ...] = ()
    """Problems with the database itself. The node plugin quarantines the database at its next
    start."""

    dropped: tuple[str, ...] = ()
    """Damaged endpoint rows. The node plugin drops them at its next start."""

    damage: str | None = None
    """The reason why entries were lost, until they have been rebuilt."""

    quarantined: tuple[str, ...] = ()
    """The names of quarantined files next to the database."""


def inspect(path: Path) -> Inspection:
    """Inspect a checkpoint. Raises :class:`InspectionError` if that is not possible."""
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


def read_device_numbers(path: Path) -> list[StoredClaim]:
    """Return the claims in a checkpoint that may hold device numbers. Raises
    :class:`CheckpointError`."""
    try:
        if schema.recognize(path) == 0:
            return []
        with closing(schema.connect_reading(path)) as connection:
            return rows.identified(connection)
    except (OSError, schema.UnfitError, schema.NewerVersionError, *DATABASE_ERRORS) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error


def forget(path: Path, claim: StoredClaim) -> None:
    """
    Delete a claim's row, if it is still the row that was inspected.

    Raises :class:`InspectionError` if nothing was changed.
    """
    try:
        gone = _forget_alone(path, claim)
        if gone is None:
            gone = _forget_by_request(path, claim)
    except (schema.UnfitError, schema.NewerVersionError) as error:
        raise InspectionError(
            f"the checkpoint {path} cannot be changed: {error}; restart the node plugin"
        ) from error
    except (OSError, *DATABASE_ERRORS) as error:
        raise InspectionError(f"the checkpoint {path} cannot be changed: {error}") from error
    if not gone:
        raise InspectionError(
            f"claim {claim} has changed in the checkpoint {path} since this command read it; "
            f"check it with 'drakit node checkpoint show', and try again"
        )


def _forget_alone(path: Path, claim: StoredClaim) -> bool | None:
    """Delete a row while no instance is active. Return whether it was still the same row, or None
    if an instance is active."""
    with try_lock(path.parent) as locked:
        if not locked:
            return None
        if schema.recognize(path) == 0:
            raise InspectionError(f"the checkpoint {path} is empty")
        with closing(schema.connect(path)) as connection, rows.transaction(connection):
            return not rows.delete(connection, [claim])


def _forget_by_request(path: Path, claim: StoredClaim) -> bool:
    """Send a request to the active instance. Return whether the row is gone."""
    request = path.with_name(f"{REQUEST_PREFIX}{claim.uid}")
    write_private(request, str(claim.generation).encode())
    try:
        until = time.monotonic() + FORGET_SECONDS
        while request.exists():
            if (gone := _forget_alone(path, claim)) is not None:  # the instance has stopped
                return gone
            if time.monotonic() > until:
                raise InspectionError(
                    f"the node plugin did not respond within {FORGET_SECONDS:g} s; check its log"
                )
            time.sleep(0.1)
    finally:
        request.unlink(missing_ok=True)
    return not any(entry.uid == claim.uid for entry in inspect(path).claims)


def requests(folder: Path) -> Mapping[str, int]:
    """Return the claims to forget, keyed by UID, with the generations of their rows."""
    found: dict[str, int] = {}
    for entry in folder.glob(f"{REQUEST_PREFIX}*"):
        with suppress(OSError, ValueError):
            found[entry.name.removeprefix(REQUEST_PREFIX)] = int(entry.read_text())
    return found


def remove_request(folder: Path, uid: str) -> None:
    """Remove a request."""
    folder.joinpath(f"{REQUEST_PREFIX}{uid}").unlink(missing_ok=True)


def _inspect(path: Path) -> Inspection:
    version: int | None = None
    try:
        version = schema.recognize(path)
        if version == 0:
            return Inspection(version=0, claims=())
        for _ in range(_ATTEMPTS):
            quiet = not schema.has_log(path)
            found = _read(path, version)
            # Without a log, the file is read without locks, so check that no writer has started.
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
    """Read a database. Damage becomes part of the result, so that the caller can retry: another
    process that opens the database at the same time can cause such errors. Other errors are
    raised."""
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
    """Return the inspection of a damaged database. If the error does not indicate damage, re-raise
    it."""
    if not quarantine.is_damage(error):
        raise error
    return _of_damaged(path, version, str(error))


def _of_damaged(path: Path, version: int | None, *problems: str) -> Inspection:
    """Copy the intact rows of a damaged database into memory, and read them there."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as memory:
        schema.create(memory)
        quarantine.copy_rows(path, memory)
        return Inspection(
            version=version,
            claims=tuple(rows.page(memory)),
            endpoints=tuple(rows.endpoints(memory)),
            problems=problems,
        )
