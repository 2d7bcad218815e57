"""
Reads the feature gates of a cluster that change what a CEL selector means.

The API server's metrics name its gates; the scheduler, which evaluates selectors, normally has the
same ones. Nothing else in the API shows them: its schemas have the fields of a gate that is off.

It must not know who evaluates selectors, or when the gates are read.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from drakit.explain.selectors import FeatureGates

__all__ = ("GatesUnknownError", "read_all_gates", "read_gates")

PATH = "/metrics"
METRIC = b"kubernetes_feature_enabled"
_LINE = re.compile(rb'kubernetes_feature_enabled\{.*\bname="(\w+)".*\} ([01])\b')


class GatesUnknownError(Exception):
    """The API server's metrics do not have its feature gates."""


class TextReader(Protocol):
    """The request that is needed of a session."""

    def lines(self, path: str) -> AsyncGenerator[bytes]:
        """Get a text, line by line. Raises ApiError."""
        ...


async def read_gates(session: TextReader) -> FeatureGates:
    """
    Read the gates of the API server that concern selectors.

    A gate that it does not name is off: this version of Kubernetes does not have it.

    :raises GatesUnknownError: it names none at all.
    :raises ApiError: it does not answer, or its metrics may not be read.
    """
    enabled = await read_all_gates(session)
    return FeatureGates(
        consumable_capacity=enabled.get("DRAConsumableCapacity", False),
        list_attributes=enabled.get("DRAListTypeAttributes", False),
    )


async def read_all_gates(session: TextReader) -> dict[str, bool]:
    """Read all gates of the API server, by name. Raises as `read_gates` does."""
    enabled: dict[str, bool] = {}
    async with aclosing(session.lines(PATH)) as lines:
        async for line in lines:
            if found := _LINE.match(line):
                enabled[found[1].decode()] = found[2] == b"1"
            elif enabled and not line.startswith(METRIC):
                break  # all of a metric is in one place, and the rest can be many MiB
    if not enabled:
        raise GatesUnknownError(f"{PATH} of the API server has no {METRIC.decode()}")
    return enabled
