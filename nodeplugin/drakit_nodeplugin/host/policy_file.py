"""
The copy of a driver's policies on the node: the ones that the driver applied last.

A plugin that starts without the API server needs them, or it would withdraw devices. The file
contains the policies as the API server sent them, so that each version of a driver checks them
itself. A damaged file is quarantined, and the API server's list replaces it.

Functions block. They must not know the types of policies, or the conditions of a write.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from drakit.layout import write_private

__all__ = ("StoredPolicy", "read_policies", "write_policies")

logger = logging.getLogger(__name__)

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPolicy:
    """A policy as the API server sent it."""

    name: str
    uid: str
    created: str
    """``creationTimestamp``."""

    generation: int
    spec: Mapping[str, Any] | None
    """None if it is missing, or cannot be read."""


def read_policies(path: Path, *, quarantine: bool = True) -> list[StoredPolicy] | None:
    """
    Return the stored policies; None if there are none that can be used.

    :param quarantine: move a damaged file aside; otherwise, only log it.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.error("policies cannot be read", extra={"file": str(path), "error": str(error)})
        return None
    try:
        body = cast("dict[str, Any]", orjson.loads(content))
        if body["version"] != VERSION:  # another release needs it after a rollback
            facts = {"file": str(path), "version": body["version"]}
            logger.warning("policies of another version are not used", extra=facts)
            return None
        if body["checksum"] != zlib.crc32(orjson.dumps(body["policies"])):
            raise ValueError("its checksum is wrong")
        return [StoredPolicy(**each) for each in body["policies"]]
    except (ValueError, TypeError, KeyError) as error:
        if not quarantine:
            facts = {"file": str(path), "error": str(error)}
            logger.error("policies are damaged", extra=facts)
            return None
        aside = path.with_name(f"{path.name}.damaged")
        facts = {"file": str(path), "moved_to": str(aside), "error": str(error)}
        logger.error("damaged policies quarantined", extra=facts)
        try:
            path.replace(aside)
        except OSError as failure:
            facts = {"file": str(path), "error": str(failure)}
            logger.error("damaged policies cannot be quarantined", extra=facts)
        return None


def write_policies(path: Path, policies: Collection[StoredPolicy]) -> None:
    """Replace the file. Raises OSError."""
    listed = orjson.loads(orjson.dumps(sorted(policies, key=lambda each: each.name)))
    body = {
        "version": VERSION,
        "checksum": zlib.crc32(orjson.dumps(listed)),
        "policies": listed,
    }
    write_private(path, orjson.dumps(body))
