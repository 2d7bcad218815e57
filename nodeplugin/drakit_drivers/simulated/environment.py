"""
What a container sees of its devices: environment variables, for there is nothing else to see.

``SIMULATED_<REQUEST>`` has the name of a device of the request, which is all that an application
needs whose request asks for one. ``SIMULATED_<REQUEST>__<DEVICE>`` has all that is known, as JSON,
and is there for each device: a share's name ends in the ID of the share, that of a device with
admin access in ``ADMIN``, for a container may have the device itself beside them.

It must not know the config, or files.
"""

from __future__ import annotations

import json
import re
from typing import Any

from drakit import AllocatedDevice, Capacity, ClaimReference, Device
from drakit_drivers.simulated.parameters import OUR_VARIABLES, SimulatedParameters

__all__ = ("environment",)


def environment(
    claim: ClaimReference,
    allocated: AllocatedDevice,
    device: Device,
    *,
    driver: str,
    parameters: SimulatedParameters,
) -> dict[str, str]:
    """Give the variables of one device of a claim; those of the user among them."""
    # Of a subrequest the request's own name: which alternative it got is in the JSON.
    request = OUR_VARIABLES + _variable(allocated.request.partition("/")[0])
    parts = [request, _variable(device.name)]
    if allocated.share_id:
        parts.append(_variable(allocated.share_id))
    if allocated.admin_access:
        parts.append("ADMIN")
    facts = _facts(claim, allocated, device, driver=driver, parameters=parameters)
    text = json.dumps(facts, separators=(",", ":"))
    return {**parameters.env, request: device.name, "__".join(parts): text}


def _facts(
    claim: ClaimReference,
    allocated: AllocatedDevice,
    device: Device,
    *,
    driver: str,
    parameters: SimulatedParameters,
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
        "parameters": parameters.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _capacity(allocated: AllocatedDevice, device: Device) -> dict[str, str]:
    """What the claim has of each capacity: its share, or all of it."""
    whole = {
        name: amount.value if isinstance(amount, Capacity) else amount
        for name, amount in device.capacity.items()
    }
    return {**whole, **allocated.consumed_capacity}


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", name.upper())
