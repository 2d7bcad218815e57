"""
Devices with several claims at the same time: by shares of their capacity, or with admin access.

It must not know the content of a share.
"""

from __future__ import annotations

from drakit.quantity import quantity_units
from drakit.testing.conformance.claims import default_share
from drakit.testing.conformance.facts import PublishedDevice
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rules import rule, steps


@rule(
    "admin-access",
    "a claim with admin access does not affect the claim that holds the device",
    why="Monitoring pods use adminAccess to get a device that another pod uses. Preparing and "
    "unpreparing their claims must not affect the claim that holds the device.",
    kinds=("python", "backend"),  # a device plugin can only allocate: such claims are refused
)
async def admin_access(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    holder = kit.claim(device)
    first = await steps.prepared(kit, holder)
    edits = steps.edits_of(kit, holder)
    claim = kit.claim(device, admin_access=True)
    await steps.must_prepare(
        kit, claim, when="with admin access, while another claim holds the device,"
    )
    await steps.must_unprepare(
        kit, claim, when="with admin access, while another claim holds the device,"
    )
    if missing := steps.missing_paths(edits):
        kit.fail(
            f"unpreparing a claim with admin access removed {missing[0]}, which the device's "
            f"holder needs"
        )
    again = await steps.must_prepare(kit, holder, when="after a claim with admin access ended,")
    if again != first or steps.edits_of(kit, holder) != edits:
        kit.fail("after a claim with admin access ended, the holder got a different response")
    await steps.must_unprepare(kit, holder, when="after a claim with admin access ended,")


@rule(
    "shares",
    "shares of a device are prepared and unprepared independently",
    why="A device with allowMultipleAllocations is allocated to several claims at the same time, "
    "each with its own share. When one pod terminates, the others must keep the device.",
)
async def shares(kit: Kit) -> None:
    devices = [
        d for d in steps.untainted(await kit.devices()) if d.allow_multiple and _fits_twice(d)
    ]
    if not devices:
        kit.skip(
            "no device has allowMultipleAllocations and enough capacity for two default requests"
        )
    device = devices[0]
    one, other = kit.claim(device), kit.claim(device)
    await steps.prepared(kit, one)
    first = await steps.must_prepare(kit, other, when="for a second share of a device,")
    steps.skip_if_missing(kit, other)
    edits = steps.edits_of(kit, other)
    share = first.devices[0].share_id if first.devices else None
    if share is None:
        kit.fail(f"the response for a share of {device.name} lacks the share ID")
    await steps.must_unprepare(kit, one, when="for one of two shares of a device,")
    if missing := steps.missing_paths(edits):
        kit.fail(
            f"unpreparing one share of {device.name} removed {missing[0]}, which the claim of the "
            f"other share needs"
        )
    again = await steps.must_prepare(kit, other, when="after another share was unprepared,")
    if again != first or steps.edits_of(kit, other) != edits:
        kit.fail("after one share was unprepared, the other share got a different response")
    await kit.reboot()
    await steps.must_prepare(kit, other, when="for a share, after a reboot of the node,")
    await steps.must_unprepare(kit, other, when="for the last share of a device,")


def _fits_twice(device: PublishedDevice) -> bool:
    """Return whether two claims that request no amount can share a device."""
    taken = default_share(device)
    return all(
        2 * quantity_units(taken[n]) <= quantity_units(v) for n, v in device.capacity.items()
    )
