"""Stand-ins for what the claims engine is made of: a claim source, a driver, bodies of claims."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from drakit import AllocatedDevice, ClaimReference, DeviceNode, DriverError, Edits
from drakit.resource.claim import Claim, parse_claim
from drakit_nodeplugin.claims.errors import ClaimFetchError
from drakit_nodeplugin.claims.source import NoAnswerError

DRIVER = "camera.example.com"
NODE = "node-1"


def reference(uid: str, *, name: str | None = None) -> ClaimReference:
    return ClaimReference(namespace="lab", name=name or f"claim-{uid}", uid=uid)


def claim_body(
    uid: str,
    *devices: str | dict[str, Any],
    node: str | None = NODE,
    name: str | None = None,
    allocated: bool = True,
) -> dict[str, Any]:
    """A ResourceClaim; a device is a name or the fields of a result."""
    body: dict[str, Any] = {
        "metadata": {"namespace": "lab", "name": name or f"claim-{uid}", "uid": uid}
    }
    if allocated:
        results = [
            {"driver": DRIVER, "pool": NODE, "request": "main"}
            | ({"device": device} if isinstance(device, str) else device)
            for device in devices
        ]
        body["status"] = {"allocation": {"devices": {"results": results}}}
        if node is not None:
            term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
            body["status"]["allocation"]["nodeSelector"] = {"nodeSelectorTerms": [term]}
    return body


class FakeClaims:
    """The claims of a cluster; `answers` can be taken away, and a claim removed or replaced."""

    def __init__(self) -> None:
        self.bodies: dict[str, dict[str, Any]] = {}
        self.answers = True

    def store(self, *bodies: dict[str, Any]) -> None:
        for body in bodies:
            self.bodies[body["metadata"]["name"]] = body

    async def fetch(self, reference: ClaimReference, *, timeout_seconds: float) -> Claim:
        await asyncio.sleep(0)
        if not self.answers:
            raise NoAnswerError(claim=str(reference), cause="it gives no answer")
        if reference.name not in self.bodies:
            raise ClaimFetchError(claim=str(reference), cause="it does not exist any more")
        return parse_claim(self.bodies[reference.name])


class FakeDevices:
    """A driver: what is prepared at the moment, and how often it was asked."""

    def __init__(self) -> None:
        self.prepared: dict[str, str] = {}
        self.prepares = 0
        self.unprepares = 0
        self.failing: set[str] = set()
        self.away: Callable[[], Exception] | None = None

    async def prepare(self, claim: ClaimReference, device: AllocatedDevice) -> Edits:
        self.prepares += 1
        await asyncio.sleep(0)
        if self.away is not None:
            raise self.away()
        if device.name in self.failing:
            raise DriverError(f"{device.name} is broken; unplug it and plug it in again")
        self.prepared[device.name] = claim.uid
        return Edits(device_nodes=(DeviceNode(path=f"/dev/{device.name}"),))

    async def unprepare(self, claim: ClaimReference, device: AllocatedDevice) -> None:
        self.unprepares += 1
        await asyncio.sleep(0)
        if self.away is not None:
            raise self.away()
        if device.name in self.failing:
            raise DriverError(f"{device.name} is broken; unplug it and plug it in again")
        self.prepared.pop(device.name, None)
