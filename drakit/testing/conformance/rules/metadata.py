"""
Metadata files: the attributes that a container can read about its devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rules import rule, steps


@rule(
    "metadata",
    "the metadata files of a claim describe its devices, in the same way after a reboot",
    why="A container reads the attributes of its devices from a file (KEP-5304). A container that "
    "restarts gets the file of the latest prepare, and must find what it found before.",
)
async def metadata(kit: Kit) -> None:
    devices = (await steps.usable(kit))[:2]
    claim = kit.claim(*devices)
    await steps.prepared(kit, claim)
    first = _described(kit.metadata(claim))
    if not first:
        kit.skip("the driver has no metadata files")
    for device in devices:
        if (device.pool, device.name) not in first:
            kit.fail(f"the metadata files of a claim do not contain its device {device.name}")
        published = cast("Mapping[str, Any]", device.body.get("attributes") or {})
        if missing := sorted(published.keys() - first[device.pool, device.name].keys()):
            kit.fail(f"the metadata of device {device.name} lacks its attribute {missing[0]}")
    await kit.reboot()
    await steps.must_prepare(kit, claim, when="after a reboot,")
    second = _described(kit.metadata(claim))
    for (pool, name), before in first.items():
        after = second.get((pool, name), {})
        for attribute in sorted(before.keys() | after.keys()):
            old, new = before.get(attribute), after.get(attribute)
            if old != new:
                kit.fail(
                    f"in the metadata of device {name}, attribute {attribute} was {old}, and is "
                    f"{new} after a reboot"
                )


def _described(files: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the attributes of each device in metadata files, keyed by pool and name."""
    return {
        (device["pool"], device["name"]): device.get("attributes") or {}
        for file in files
        for request in file["requests"]
        for device in request["devices"]
    }
