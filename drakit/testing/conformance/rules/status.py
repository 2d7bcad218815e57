"""
Claim status: information about prepared devices for users and controllers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from drakit.testing.conformance.facts import ClaimUnderTest
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rules import rule, steps

WRITE_SECONDS = 2.0
"""Time limit for a status write. The node plugin normally writes the status within milliseconds
after its response."""


@rule(
    "claim-status",
    "the status of a claim has an entry with the same conditions after a reboot",
    why="The node plugin writes the data that a driver returns with its edits to the status of "
    "the claim (KEP-4817). Users and controllers wait for these conditions.",
)
async def claim_status(kit: Kit) -> None:
    devices = (await steps.usable(kit))[:2]
    claim = kit.claim(*devices)
    await steps.prepared(kit, claim)
    first = await _entries(kit, claim)
    if not first:
        kit.skip("the driver returns nothing for the status of claims")
    kit.api.store(_path(claim), dict(claim.body))
    await kit.reboot()
    await steps.must_prepare(kit, claim, when="after a reboot,")
    second = await _entries(kit, claim)
    for device, entry in first.items():
        if device not in second:
            kit.fail(f"the status of a claim lacks the entry of device {device} after a reboot")
        before, after = _conditions(entry), _conditions(second[device])
        if missing := sorted(before - after):
            kit.fail(
                f"in the status of a claim, device {device} lacks the condition {missing[0]} after "
                "a reboot"
            )


async def _entries(kit: Kit, claim: ClaimUnderTest) -> Mapping[str, Mapping[str, Any]]:
    """Wait for the driver's status entries, and return them, keyed by device. Empty if there are
    none."""
    until = asyncio.get_running_loop().time() + WRITE_SECONDS
    while True:
        stored: Any = kit.api.object(_path(claim)) or {}
        entries: list[Mapping[str, Any]] = stored.get("status", {}).get("devices") or []
        found = {each["device"]: each for each in entries if each["driver"] == kit.driver}
        if found or asyncio.get_running_loop().time() > until:
            return found
        await asyncio.sleep(0.05)


def _conditions(entry: Mapping[str, Any]) -> set[str]:
    return {each["type"] for each in entry.get("conditions") or ()}


def _path(claim: ClaimUnderTest) -> str:
    reference = claim.reference
    return (
        f"/apis/resource.k8s.io/v1/namespaces/{reference.namespace}/resourceclaims/{reference.name}"
    )
