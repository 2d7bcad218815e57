"""
Reads a cluster's feature gates that change the meaning of a CEL selector or the behavior of the
scheduler's allocator.

The API server's metrics contain its gates. The scheduler, which evaluates selectors, normally has
the same gates. Nothing else in the API shows them: the schemas include the fields of disabled
gates.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Protocol

from drakit_explain.selectors import FeatureGates

PATH = "/metrics"

READ_SECONDS = 15.0
"""How long to wait for the metrics. An API server with many of them needs seconds to write them."""

MAX_BYTES = 64 << 20
"""Maximum number of bytes to read before the gates. The metrics are sorted, so the gates are in the
middle."""

METRIC = b"kubernetes_feature_enabled"
_OF_GATES = re.compile(r"\b(allowMultipleAllocations|includes)\b")
"""Matches the fields and functions in selectors that exist only if a gate is enabled."""

_LINE = re.compile(rb'kubernetes_feature_enabled\{.*\bname="(\w+)".*\} ([01])\b')


ALLOCATOR_GATES = (
    "DRAAdminAccess",
    "DRAConsumableCapacity",
    "DRADerivedAttributes",
    "DRADeviceBindingConditions",
    "DRADeviceCompatibilityGroups",
    "DRADeviceTaints",
    "DRAFractionalCapacityRange",
    "DRAListTypeAttributes",
    "DRAOptionalNodeOperations",
    "DRAPartitionableDevices",
    "DRAPrioritizedList",
    "DRAResourceClaimDeviceStatus",
)
"""The gates that can change a verdict (``operator/cel/release.go``)."""

_ON_IN_1_34 = frozenset({"DRAAdminAccess", "DRAPrioritizedList", "DRAResourceClaimDeviceStatus"})
_ON_IN_1_36 = _ON_IN_1_34 | {
    "DRAConsumableCapacity",
    "DRADeviceBindingConditions",
    "DRADeviceTaints",
    "DRAPartitionableDevices",
}

DEFAULT_GATES: Mapping[str, frozenset[str]] = {
    "1.34": _ON_IN_1_34,
    "1.35": _ON_IN_1_34,
    "1.36": _ON_IN_1_36,
    # DRAFractionalCapacityRange is enabled only with --min-compatibility-version=1.37.
    "1.37": _ON_IN_1_36,
    "1.38": _ON_IN_1_36,  # as of 1.38.0-alpha.0
}
"""The gates in `ALLOCATOR_GATES` that are enabled by default, keyed by minor version (Kubernetes'
``pkg/features/kube_features.go``)."""


class GatesUnknownError(Exception):
    """The API server's metrics do not contain its feature gates, or are too large or too slow."""


class TextReader(Protocol):
    """A session that can read text from the API server."""

    def lines(self, path: str) -> AsyncGenerator[bytes]:
        """Read text line by line. Raises ApiError."""
        ...


def gates_of(enabled: Mapping[str, bool]) -> FeatureGates:
    """
    Select the gates that affect selectors, from all gates of an API server.

    A missing gate is disabled, because this version of Kubernetes does not have it.
    """
    return FeatureGates(
        consumable_capacity=enabled.get("DRAConsumableCapacity", False),
        list_attributes=enabled.get("DRAListTypeAttributes", False),
    )


def allocator_gates(enabled: Mapping[str, bool]) -> dict[str, bool]:
    """Select the gates that can change a verdict, from all gates of an API server."""
    return {name: enabled.get(name, False) for name in ALLOCATOR_GATES}


def rules_work(enabled: Mapping[str, bool]) -> bool:
    """Return whether DeviceTaintRules have an effect, given all gates of an API server. In
    Kubernetes 1.34, they do not have a separate gate, and in a later release, the gate may be
    removed."""
    return enabled.get("DRADeviceTaintRules", enabled.get("DRADeviceTaints", True))


def depend_on_gates(expressions: Iterable[str]) -> bool:
    """Return whether a selector uses a feature that depends on a gate."""
    return any(_OF_GATES.search(each) for each in expressions)


async def read_all_gates(session: TextReader, path: str = PATH) -> dict[str, bool]:
    """
    Return the feature gates of the API server, or of another component that serves the metric
    ``kubernetes_feature_enabled``, keyed by gate name.

    :raises GatesUnknownError: the metrics do not contain feature gates, or are too large or slow.
    :raises ApiError: the component does not respond, or access to its metrics is forbidden.
    """
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await _read(session, path)
    except TimeoutError:
        why = f"{path} of the API server could not be read within {READ_SECONDS:.0f} s"
        raise GatesUnknownError(why) from None


async def _read(session: TextReader, path: str) -> dict[str, bool]:
    enabled: dict[str, bool] = {}
    size = 0
    async with aclosing(session.lines(path)) as lines:
        async for line in lines:
            size += len(line)
            if size > MAX_BYTES:
                raise GatesUnknownError(f"{path} of the API server has more than {MAX_BYTES} bytes")
            if found := _LINE.match(line):
                enabled[found[1].decode()] = found[2] == b"1"
            elif enabled and not line.startswith(METRIC):
                break  # all samples of a metric are consecutive, and the rest can be many MiB
    if not enabled:
        raise GatesUnknownError(f"{path} of the API server has no {METRIC.decode()}")
    return enabled
