"""
Which device stands in which ResourceSlice: stable, with room left.

A device keeps its slice for as long as it exists, so that a change of one device changes one slice.
What a slice looks like on the wire, and when one is written, is :mod:`.desired`'s and
:mod:`.publisher`'s.

It must not know the API server, attributes, or where devices come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ("PackingLimits", "pack")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingLimits:
    """How full a slice gets."""

    max_devices: int = 128
    """Devices a slice: the API server's limit without taints, counters and list attributes."""

    fill_devices: int = 112
    """Devices a slice that we place; the rest is room for what the limits may become."""


def pack(
    names: Sequence[str], *, placed: Mapping[str, int], limits: PackingLimits | None = None
) -> dict[str, int]:
    """
    Give each device its slice, counted from 0.

    `placed` is where devices stand now. One that is placed stays, unless its slice is over the
    maximum; new ones fill the first slices with room. Slices that have become empty at the end are
    given up by not being named; an empty one in the middle is filled before a new one is begun.
    """
    limits = limits or PackingLimits()
    load: dict[int, int] = {}
    result: dict[str, int] = {}
    new: list[str] = []
    for name in names:
        index = placed.get(name)
        if index is None or index < 0 or load.get(index, 0) >= limits.max_devices:
            new.append(name)
        else:
            result[name] = index
            load[index] = load.get(index, 0) + 1
    index = 0
    for name in new:
        while load.get(index, 0) >= limits.fill_devices:
            index += 1
        result[name] = index
        load[index] = load.get(index, 0) + 1
    return result
