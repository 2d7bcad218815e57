"""
The environment variables of a container: all that a simulated device gives it.

``SIMULATED_<REQUEST>`` has the name of a device of the request, which is enough for an application
that requests one device. ``SIMULATED_<REQUEST>__<DEVICE>`` describes each device as JSON. A share's
variable ends in the ID of the share, and that of a device with admin access in ``ADMIN``: a
container may have the device itself as well.

It must not know the config, or files.
"""

from __future__ import annotations

import json
import re
from typing import Any

from drakit import AllocatedDevice, Capacity, ClaimReference, Device
from drakit_drivers.simulated.parameters import OUR_VARIABLES, SimulatedParameters

__all__ = ("environment",)

Allocated = AllocatedDevice[SimulatedParameters]


def environment(
    claim: ClaimReference, allocated: Allocated, device: Device, *, driver: str
) -> dict[str, str]:
    """Return the variables of one device of a claim, including those of the user."""
    # The request's own name, without the subrequest's: the JSON has the allocated alternative.
    request = OUR_VARIABLES + _variable(allocated.request.partition("/")[0])
    parts = [request, _variable(device.name)]
    if allocated.share_id:
        parts.append(_variable(allocated.share_id))
    if allocated.admin_access:
        parts.append("ADMIN")
    facts = _facts(claim, allocated, device, driver=driver)
    text = json.dumps(facts, separators=(",", ":"))
    return {**allocated.parameters.env, request: device.name, "__".join(parts): text}


def _facts(
    claim: ClaimReference, allocated: Allocated, device: Device, *, driver: str
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "driver": driver,
        "device": device.name,
        "pool": device.pool,
        "claim": str(claim),
        "request": allocated.request,
        "type": device.attributes.get("type"),
        "parent": device.attributes.get("parent"),
        "profile": device.attributes.get("profile"),
        "numaNode": device.topology.numa_node,
        "capacity": _capacity(allocated, device),
        "shareID": allocated.share_id,
        "adminAccess": allocated.admin_access or None,
        "parameters": allocated.parameters.model_dump(
            mode="json", by_alias=True, exclude_none=True
        ),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _capacity(allocated: Allocated, device: Device) -> dict[str, str]:
    """Return the claim's part of each capacity: its share, or all of it."""
    whole = {
        name: amount.value if isinstance(amount, Capacity) else amount
        for name, amount in device.capacity.items()
    }
    return {**whole, **allocated.consumed_capacity}


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", name.upper())
