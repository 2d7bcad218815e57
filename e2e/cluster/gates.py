"""
The feature gates of the tests' clusters, by minor release of Kubernetes.

The defaults are those of Kubernetes' own table, which `make kubernetes-tables` writes.
"""

import json
from collections.abc import Mapping
from pathlib import Path

TABLE = Path(__file__).parent.parent.parent / "tests" / "oracle" / "gates.json"

NEEDED = frozenset(
    {
        "DRAConsumableCapacity",
        "DRADeviceBindingConditions",
        "DRADeviceTaintRules",
        "DRADeviceTaints",
        "DRAExtendedResource",
        "DRAPartitionableDevices",
        "DynamicResourceAllocation",
        "ResourceHealthStatus",
    }
)
"""The feature gates that the tests need. Each is enabled in every release that has it."""


def defaults(minor: str) -> dict[str, bool]:
    """Return the gates of DRA in a minor release, such as 1.36, and whether they are enabled by
    default."""
    steps: Mapping[str, list[tuple[str, bool, str]]] = json.loads(TABLE.read_text())["gates"]
    found = {
        name: [on for since, on, _ in each if _number(since) <= _number(minor)]
        for name, each in steps.items()
    }
    return {name: states[-1] for name, states in found.items() if states}


def gates_of_tests(minor: str) -> dict[str, bool]:
    """Return the gates that the tests' clusters of a minor release set in addition to the
    defaults."""
    return {name: True for name, on in sorted(defaults(minor).items()) if name in NEEDED and not on}


def runtime_config_of_tests(minor: str) -> dict[str, bool]:
    """Return the API versions that the tests' clusters of a minor release serve in addition to the
    defaults."""
    # Before 1.36, DeviceTaintRules have only an alpha version.
    rules = ["v1alpha3"] if in_range(minor, newest="1.35") else []
    versions = ["v1beta1", "v1beta2", *rules]
    return {f"resource.k8s.io/{version}": True for version in versions}


def in_range(minor: str, *, oldest: str | None = None, newest: str | None = None) -> bool:
    """Return whether a minor release is neither before `oldest` nor after `newest`."""
    return (oldest is None or _number(oldest) <= _number(minor)) and (
        newest is None or _number(minor) <= _number(newest)
    )


def _number(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split("."))
