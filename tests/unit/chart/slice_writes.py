"""
Updates of another driver's ResourceSlice that the node plugin's policy must allow or refuse.

A unit test evaluates the policy for them, and a test on a cluster sends them to the API server.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

TAINT = {"key": "drakit.dev/stopped", "effect": "NoSchedule"}
DEVICES = (
    {
        "name": "gpu-0",
        "attributes": {"model": {"string": "T4"}, "index": {"int": 0}},
        "capacity": {"memory": {"value": "15Gi"}},
        "taints": [{"key": "foreign.test/a", "effect": "NoSchedule"}],
    },
    {"name": "gpu-1", "attributes": {"model": {"string": "H200"}}},
)
"""The devices of the slice before the update."""


def tainted(*devices: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The devices with a taint of drakit, and with other values of fields."""
    return [{**copy.deepcopy(each), "taints": [TAINT], **fields} for each in devices]


FIRST, SECOND = DEVICES

ALLOWED = [
    pytest.param(tainted(*DEVICES), id="all-tainted"),
    pytest.param(tainted(*reversed(DEVICES)), id="another-order"),
    pytest.param(tainted(FIRST), id="one-less"),
    pytest.param([{**FIRST, "taints": [*FIRST["taints"], TAINT]}], id="with-its-other-taint"),
    pytest.param([], id="none"),
]

REFUSED = [
    pytest.param([*DEVICES], id="without-a-taint"),
    pytest.param([*tainted(FIRST), SECOND], id="one-without-a-taint"),
    pytest.param(
        tainted(FIRST, taints=[{"key": "foreign.test/drakit.dev", "effect": "NoSchedule"}]),
        id="the-taint-of-another",
    ),
    pytest.param(
        tainted(FIRST, taints=[TAINT | {"effect": "None"}]), id="a-taint-without-an-effect"
    ),
    pytest.param(tainted(FIRST, name="gpu-2"), id="invented"),
    pytest.param(tainted(FIRST, name="gpu-1"), id="with-the-name-of-another"),
    pytest.param(tainted(FIRST, attributes={}), id="without-its-attributes"),
    pytest.param(tainted(FIRST, attributes=SECOND["attributes"]), id="with-others-attributes"),
    pytest.param(
        tainted(SECOND, attributes=SECOND["attributes"] | {"index": {"int": 1}}),
        id="with-an-attribute-more",
    ),
    pytest.param(tainted(FIRST, capacity={"memory": {"value": "141Gi"}}), id="another-capacity"),
    pytest.param(tainted(SECOND, capacity=FIRST["capacity"]), id="with-a-capacity"),
    pytest.param(tainted(FIRST, allowMultipleAllocations=True), id="with-shares"),
    pytest.param(
        [each for n in range(64) for each in tainted(FIRST, name=f"gpu-{n}")], id="many-invented"
    ),
]
