"""
The names of a pool's slices: the same after a restart and for every instance.

It must not know what is in a slice.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

__all__ = ("PoolIdentity", "natural", "slice_index", "slice_name")

MAX_OBJECT_NAME = 253

_INDEX = re.compile(r"(?P<index>[0-9a-f]{5})-")
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolIdentity:
    """A pool of one driver on one node."""

    driver: str
    node: str
    node_uid: str
    pool: str
    """Its name in the API: that of the node, or one that begins with it."""


def slice_name(pool: PoolIdentity, index: int) -> str:
    """
    Return the name of a pool's slice.

    It begins with the index in hexadecimal, since the allocator walks slices in the order of
    their names, and ends in a digest, since two drivers and two pools may join to one text.
    """
    identity = f"{pool.driver}/{pool.pool}".encode()
    end = f"-{hashlib.sha256(identity).hexdigest()[:8]}"
    name = f"{index:05x}-{pool.driver}-{pool.pool.replace('/', '-')}"
    return name[: MAX_OBJECT_NAME - len(end)].rstrip(".-") + end


def slice_index(pool: PoolIdentity, name: str) -> int | None:
    """Return the index in the name of a pool's slice; None for a name that we did not make."""
    form = _INDEX.match(name)
    if form is None:
        return None
    index = int(form["index"], 16)
    return index if slice_name(pool, index) == name else None


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort ``kvm-10`` behind ``kvm-9``: the allocator takes devices in this order."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name))
