"""
Which drivers of backends a node has known: a small file each, beside the driver's checkpoint.

A backend's driver is hosted when its socket is first seen. After a restart it must be hosted
before that, with or without its backend: its claims are still to be unprepared, and its devices to
be tainted. Each record names its registration directory, because two releases of the chart share
the node's data directory, and each hosts only the backends of its own registration directory.

Functions block. It must not know how backends are found, or how a driver is hosted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from pathlib import Path
from typing import Any, cast

from drakit.resource.names import is_driver_name
from drakit_nodeplugin.private import private_directory, private_file

__all__ = ("forget_driver", "known_drivers", "remember_driver")

logger = logging.getLogger(__name__)

RECORD = "backend.json"
VERSION = 1


def known_drivers(drivers: Path, registrations: Path) -> list[str]:
    """
    Return the names of all known drivers below the parent of their data directories.

    What is no record is set aside and told in the log. One that cannot be read now, or that a later
    version wrote, is known by the name of its directory: its claims are still to be unprepared.
    Records of another registration directory are skipped.
    """
    found: list[str] = []
    for path in sorted(drivers.glob(f"*/{RECORD}")):
        name = path.parent.name
        try:
            record = cast("dict[str, Any]", json.loads(path.read_bytes()))
            if record["driver"] != name or not is_driver_name(name):
                raise ValueError(f"it is no record of driver {name}")
            if _is_foreign(record, registrations):
                continue
        except OSError as error:
            logger.error(
                "record of a backend cannot be read",
                extra={"file": str(path), "error": str(error)},
            )
            if not is_driver_name(name):
                continue
        except (ValueError, KeyError, TypeError) as error:
            aside = path.with_name(f"{RECORD}.unreadable")
            logger.error(
                "record of a backend is set aside", extra={"file": str(aside), "error": str(error)}
            )
            with contextlib.suppress(OSError):
                path.replace(aside)
                private_file(aside)
            continue
        found.append(name)
    return found


def _is_foreign(record: dict[str, Any], registrations: Path) -> bool:
    return record.get("directory", str(registrations)) != str(registrations)


def _belongs_elsewhere(path: Path, registrations: Path) -> bool:
    try:
        return _is_foreign(json.loads(path.read_bytes()), registrations)
    except (OSError, ValueError, AttributeError):
        return False


def remember_driver(drivers: Path, name: str, registrations: Path) -> None:
    """Make sure that a driver is known after a restart. Raises OSError."""
    path = drivers / name / RECORD
    private_directory(path.parent)
    private_file(path)
    if path.exists() and not _belongs_elsewhere(path, registrations):
        return
    # Two instances may do this at once, and in containers both have the same process id.
    temporary = path.with_name(f".{RECORD}.{secrets.token_hex(4)}")
    try:
        with temporary.open("w") as file:
            private_file(temporary)
            record = {"driver": name, "directory": str(registrations), "version": VERSION}
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        temporary.unlink(missing_ok=True)


def forget_driver(drivers: Path, name: str, registrations: Path) -> None:
    """A driver is not hosted any more, at the next start either. Raises OSError."""
    path = drivers / name / RECORD
    if not _belongs_elsewhere(path, registrations):
        path.unlink(missing_ok=True)
