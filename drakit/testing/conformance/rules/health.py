"""
Health: what is shown in the status of pods of the devices that they have.

It must not know taints.
"""

from __future__ import annotations

import asyncio
import time

from drakit.testing.conformance.facts import DeviceHealth
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rule import rule
from drakit.testing.health import health_version

__all__ = ()

TOLD_SECONDS = 5.0
"""From the start to the first health of each device; one that must be looked at takes a while."""

MESSAGE_BYTES = 1021
"""The kubelet takes 1,024, and what is longer is cut to about as many."""


@rule(
    "health",
    "a driver that has health says of each device how it is",
    why="Since Kubernetes 1.37 the kubelet follows the health of devices and shows it in the "
    "status of pods. Of a device of which it is told nothing it shows Unknown, for ever.",
)
async def health(kit: Kit) -> None:
    devices = {(device.pool, device.name) for device in await kit.devices()}
    if not await _advertised(kit):
        kit.skip("the driver has no health")
    said: dict[tuple[str, str], DeviceHealth] = {}
    end = time.monotonic() + TOLD_SECONDS
    while devices - said.keys() and (left := end - time.monotonic()) > 0:
        told = await kit.health(within_seconds=left)
        said |= {key: word for key, word in told.items() if _is_word(word)}
        await asyncio.sleep(0.1)
    if not said:
        if kit.target.kind == "python":  # a program need not say beforehand whether it has any
            kit.fail(
                f"the driver says that it has health, but said nothing of any device for "
                f"{TOLD_SECONDS:.0f} s; say how they are, or do not define health"
            )
        kit.skip("the driver tells no health")
    if silent := devices - said.keys():
        kit.fail(
            f"of {len(devices)} devices {len(silent)} have no health, first "
            f"{sorted(silent)[0][1]}; say of each how it is, if only that it is unknown, and why"
        )
    for (_, name), word in said.items():
        if len(word.message.encode()) >= MESSAGE_BYTES and word.message.endswith("..."):
            kit.fail(
                f"the message on device {name} was cut, as it has more than {MESSAGE_BYTES} bytes: "
                f"{word.message[:80]!r}"
            )


def _is_word(word: DeviceHealth) -> bool:
    """Tell what a driver has said from what is told because it has said nothing."""
    return word.status != "Unknown" or bool(word.message)


async def _advertised(kit: Kit) -> bool:
    """Tell whether the driver registers with health."""
    infos = [await kit.kubelet.get_info(path) for path in kit.kubelet.sockets()]
    return any(health_version(info.supported_versions) for info in infos if info.name == kit.driver)
