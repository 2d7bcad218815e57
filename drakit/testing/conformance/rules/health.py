"""
Health: the device health in the status of pods.

Does not depend on taints.
"""

from __future__ import annotations

import asyncio
import time

from drakit.testing.conformance.facts import DeviceHealth
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rules import rule
from drakit.testing.kubelet import health_version

REPORT_SECONDS = 5.0
"""Time limit from the start of the rule until each device has a health report. A driver that polls
needs some time."""

TRUNCATED_BYTES = 1021
"""Minimum length of a truncated health message, in bytes. The node plugin truncates messages of
more than 1,024 bytes, and can remove part of a character."""


@rule(
    "health",
    "if a driver reports health, it reports it for every device",
    why="Since Kubernetes 1.36, the kubelet watches the health of devices and shows it in the "
    "status of pods. For a device without a report, the status stays Unknown.",
)
async def health(kit: Kit) -> None:
    devices = {(device.pool, device.name) for device in await kit.devices()}
    if not await _advertised(kit):
        kit.skip("the driver does not report health")
    reported: dict[tuple[str, str], DeviceHealth] = {}
    end = time.monotonic() + REPORT_SECONDS
    while devices - reported.keys() and (left := end - time.monotonic()) > 0:
        received = await kit.health(within_seconds=left)
        reported |= {key: health for key, health in received.items() if _is_report(health)}
        await asyncio.sleep(0.1)
    if not reported:
        # A backend or device plugin need not declare whether it reports health.
        if kit.target.kind == "python":
            kit.fail(
                f"the driver declares that it reports health, but reported no health of any device "
                f"within {REPORT_SECONDS:.0f} s; report health, or do not define health"
            )
        kit.skip("the driver does not report health")
    if silent := devices - reported.keys():
        kit.fail(
            f"the driver reports no health for {len(silent)} of {len(devices)} devices, such as "
            f"{sorted(silent)[0][1]}; report every device, if necessary with unknown health"
        )
    for (_, name), health in reported.items():
        if len(health.message.encode()) >= TRUNCATED_BYTES and health.message.endswith("..."):
            kit.fail(
                f"the message of device {name} has more than 1,024 bytes and was "
                f"truncated: {health.message[:80]!r}"
            )


def _is_report(health: DeviceHealth) -> bool:
    """Return whether the driver reported this health. Without a report, the kubelet gets Unknown
    and no message."""
    return health.status != "Unknown" or bool(health.message)


async def _advertised(kit: Kit) -> bool:
    """Return whether the driver advertises health reporting when it registers."""
    infos = [await kit.kubelet.get_info(path) for path in kit.kubelet.sockets()]
    return any(health_version(info.supported_versions) for info in infos if info.name == kit.driver)
