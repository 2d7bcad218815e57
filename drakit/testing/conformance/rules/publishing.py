"""
Publishing: devices that Kubernetes accepts, with stable names, from a stream that stays open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from drakit.testing.conformance.claims import within
from drakit.testing.conformance.facts import PublishedDevice
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rules import rule, steps

EVENT_SECONDS = 1.0
"""Time limit from the publication of a device until the Event about rejected devices."""

LISTED_SECONDS = 2.0
"""How long to wait after the node plugin starts. By then, it must have published the devices that
the driver lists at startup."""

WATCHED_SECONDS = 3.0
"""How long to watch a device stream. The node plugin reopens an ended stream after 1 to 2 s."""


DROPPED_SECONDS = 10.0
"""Time limit from the deletion of the slices until the slices with the fallback are published."""

SLICES = "/apis/resource.k8s.io/v1/resourceslices"

COMMON_FIELDS = frozenset(
    {"name", "attributes", "capacity", "consumesCounters", "allowMultipleAllocations", "taints"}
)
"""Device fields that all supported Kubernetes releases have, some behind feature gates."""


@rule(
    "devices-published",
    "all devices are published",
    why="The API server rejects a ResourceSlice with a device that exceeds a limit. The node "
    "plugin does not publish such a device, so no pod can get it.",
)
async def devices_published(kit: Kit) -> None:
    devices = await kit.devices()
    await within(EVENT_SECONDS, lambda: bool(_rejected(kit)))
    if rejected := _rejected(kit):
        kit.fail(f"{len(rejected)} devices are not published; the first: {rejected[0]}")
    keys = [(device.pool, device.name) for device in devices]
    if twice := {key for key in keys if keys.count(key) > 1}:
        kit.fail(f"two devices of one pool have the same name: {sorted(twice)[0][1]}")


def _rejected(kit: Kit) -> list[str]:
    return [note for note in kit.events() if " is not published: " in note]


@rule(
    "stable-names",
    "devices have the same names and pools after a restart",
    why="An allocation identifies its device by driver, pool and name while the claim exists. If a "
    "device gets a different name, pods whose claims have the old name do not start.",
)
async def stable_names(kit: Kit) -> None:
    before = await _settled(kit)
    after = await _restarted(kit)
    names, later = {(d.pool, d.name) for d in before}, {(d.pool, d.name) for d in after}
    if lost := names - later:
        came = f", but {_first(later - names)} is new" if later - names else ""
        kit.fail(
            f"device {_first(lost)} is no longer published after a restart of the node plugin"
            f"{came}; names must not change"
        )
    if added := later - names:
        kit.fail(f"device {_first(added)} is new after a restart of the node plugin")


@rule(
    "stable-order",
    "devices have the same order after a restart",
    why="The scheduler takes the first device that fits. A driver that orders its devices decides "
    "which one that is, and each change of the order writes ResourceSlices.",
)
async def stable_order(kit: Kit) -> None:
    await _settled(kit)
    before = _orders(kit)
    await _restarted(kit)
    after = _orders(kit)
    for pool in before.keys() & after.keys():
        names = [name for name in before[pool] if name in after[pool]]
        later = [name for name in after[pool] if name in before[pool]]
        for was, now in zip(names, later, strict=False):
            if was != now:
                kit.fail(
                    f"device {was} was tried before {now}, and {now} is tried first after a "
                    "restart of the node plugin; do not order devices by values that change"
                )


def _orders(kit: Kit) -> dict[str, list[str]]:
    """Return the names of the devices of each pool, in the order in which the scheduler tries
    them."""
    found: dict[str, list[str]] = {}
    for body in sorted(kit.slices(), key=lambda body: body["metadata"]["name"]):
        devices = body["spec"].get("devices") or ()
        found.setdefault(body["spec"]["pool"]["name"], []).extend(d["name"] for d in devices)
    return found


@rule(
    "dropped-fields",
    "if the API server drops newer fields of devices, the driver has a fallback",
    why="A driver can set fields that older API servers, or those with a disabled feature gate, "
    "drop. The node plugin does not publish a device without such a field, so no pod can get it. "
    "A driver that has no devices for such API servers declares an empty fallback.",
)
async def dropped_fields(kit: Kit) -> None:
    devices = await kit.devices()
    fields = {field for device in devices for field in device.body.keys() - COMMON_FIELDS}
    if not fields:
        kit.skip("no device has a field that an API server may not know")
    kit.api.dropped_device_fields |= fields
    for body in kit.slices():
        kit.api.remove(f"{SLICES}/{body['metadata']['name']}")
    # The node plugin recreates deleted slices.
    known = await within(DROPPED_SECONDS, lambda: bool(kit.slices()) and not _used(kit, fields))
    affected = sum(bool(fields & device.body.keys()) for device in devices)
    # The node plugin emits one Event per device.
    await within(EVENT_SECONDS, lambda: len(_rejected(kit)) >= affected)
    if rejected := _rejected(kit):
        kit.fail(
            f"{len(rejected)} devices are not published, and there is no fallback; the first: "
            f"{rejected[0]}"
        )
    if not known:
        kit.fail(f"no fallback is published without the fields {', '.join(sorted(fields))}")


def _used(kit: Kit, fields: set[str]) -> bool:
    return any(
        fields & device.keys()
        for body in kit.slices()
        for device in body["spec"].get("devices") or ()
    )


@rule(
    "restart-without-writes",
    "a restart without a change writes no ResourceSlice",
    why="All schedulers process every change of a ResourceSlice, and every node restarts its "
    "plugin during an update. Do not put timestamps, process IDs or random values into attributes.",
)
async def restart_without_writes(kit: Kit) -> None:
    before = await _settled(kit)
    writes = kit.slice_writes()
    after = await _restarted(kit)
    if (more := kit.slice_writes() - writes) == 0:
        return
    kit.fail(
        f"the node plugin wrote ResourceSlices {more} times after a restart without a change"
        f"{_difference(before, after)}; it must not write any"
    )


def _difference(before: Sequence[PublishedDevice], after: Sequence[PublishedDevice]) -> str:
    """Describe the first difference, if there is one."""
    old = {(device.pool, device.name): device for device in before}
    for device in after:
        was = old.get((device.pool, device.name))
        if was is None:
            return f": device {device.name} is new"
        for what, earlier, now in (
            ("attribute", was.attributes, device.attributes),
            ("capacity", was.capacity, device.capacity),
        ):
            if name := _changed(earlier, now):
                return (
                    f": {what} {name} of device {device.name} was {earlier.get(name)!r} and is "
                    f"{now.get(name)!r}"
                )
    return ""


def _changed(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first key whose value differs."""
    names = sorted(earlier.keys() | now.keys())
    return next((name for name in names if earlier.get(name) != now.get(name)), None)


@rule(
    "stream-stays-open",
    "the driver keeps its stream of devices open",
    why="If the stream ends, the node plugin treats the driver as unavailable: it taints the "
    "driver's devices, and unpublishes them after a grace period.",
)
async def stream_stays_open(kit: Kit) -> None:
    begun, end = len(kit.log()), time.monotonic() + WATCHED_SECONDS
    while time.monotonic() < end:
        if names := steps.stopped(await kit.devices()):
            reasons = steps.stop_reasons(kit.log())
            kit.fail(
                f"device {names[0]} got the taint {steps.STOPPED}: "
                f"{reasons[-1] if reasons else 'the driver was unavailable'}; keep the stream "
                f"open while nothing changes"
            )
        await asyncio.sleep(0.05)
    if reasons := steps.stop_reasons(kit.log()[begun:]):
        kit.fail(f"the driver stopped while it was idle: {reasons[0]}")


async def _settled(kit: Kit) -> list[PublishedDevice]:
    """Return the devices once the slices no longer change. They may change shortly after the
    start."""
    before = None
    for _ in range(20):
        now = (await kit.devices(), kit.slice_writes())
        if now == before:
            break
        before = now
        await asyncio.sleep(0.4)
    return await kit.devices()


async def _restarted(kit: Kit) -> list[PublishedDevice]:
    """Restart the node plugin, and return the devices that it then publishes."""
    await kit.restart()
    await asyncio.sleep(LISTED_SECONDS)
    return await kit.devices()


def _first(keys: set[tuple[str, str]]) -> str:
    return sorted(keys)[0][1]
