"""
The kubelet's own checkpoint of claims, ``dra_manager_state``, where a site lets us read it.

It names each claim that the kubelet has not seen unprepared yet, also of pods that are gone
already. Its format is the kubelet's private business: what is not exactly as known is not read.

It must not know what follows from a claim that is named.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any, cast

__all__ = ("StateFileError", "read_claim_uids")

_KIND, _VERSION = "DRACheckpoint", "checkpoint.dra.kubelet.k8s.io/v1"

_MAX_BYTES = 64 * 1024 * 1024
"""Some ten thousands of claims: a file beyond that is none of the kubelet's."""


class StateFileError(Exception):
    """The kubelet's state file says nothing that can be relied on. The text is a sentence."""


def read_claim_uids(path: Path) -> frozenset[str]:
    """Read the UIDs of the claims in the file; raise :class:`StateFileError`. Blocks."""
    try:
        with path.open("rb") as file:
            # The kubelet puts a new file in the place of the old one; a mount of the file alone
            # would show the old one for ever.
            if os.fstat(file.fileno()).st_nlink == 0:
                raise StateFileError(
                    f"{path} is a file that the kubelet has replaced meanwhile; mount its "
                    f"directory, not the file"
                )
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise StateFileError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise StateFileError(f"{path} is larger than {_MAX_BYTES} bytes")
    try:
        return _claim_uids(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateFileError(
            f"{path} is no checkpoint of a known kubelet: {type(error).__name__}: {error}"
        ) from error


def _claim_uids(data: bytes) -> frozenset[str]:
    outer: dict[str, Any] = json.loads(data)
    text = cast("str", outer["Data"])
    if zlib.crc32(text.encode()) != outer["Checksum"]:
        raise ValueError("its checksum does not match")
    inner: dict[str, Any] = json.loads(text)
    if (inner["kind"], inner["apiVersion"]) != (_KIND, _VERSION):
        raise ValueError(f"it is a {inner['kind']} of {inner['apiVersion']}")
    # Go writes an empty list as null.
    claims: list[dict[str, Any]] = inner["ClaimInfoStateList"] or []
    return frozenset(_text(claim["ClaimUID"]) for claim in claims)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is no UID")
    return value
