"""
Sharing: several claims use a device at the same time, as shares of its capacity or with admin
access.
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
    # A device plugin can only allocate whole devices, so such claims are rejected.
    kinds=("python", "backend"),
)
async def admin_access(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    held = await steps.hold(kit, kit.claim(device), who="the device's holder")
    claim = kit.claim(device, admin_access=True)
    when = "with admin access, while another claim holds the device,"
    await steps.must_prepare(kit, claim, when=when)
    await steps.must_unprepare(kit, claim, when=when)
    held.expect_paths("unpreparing a claim with admin access")
    await held.prepare_again(when="after a claim with admin access ended,")
    await steps.must_unprepare(kit, held.claim, when="after a claim with admin access ended,")


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
    held = await steps.hold(
        kit, other, who=f"another share of {device.name}", when="for a second share of a device,"
    )
    steps.skip_if_missing(kit, other)
    if not held.answer.devices or held.answer.devices[0].share_id is None:
        kit.fail(f"the response for a share of {device.name} lacks the share ID")
    await steps.must_unprepare(kit, one, when="for one of two shares of a device,")
    held.expect_paths(f"unpreparing one share of {device.name}")
    await held.prepare_again(when="after one share was unprepared,")
    await kit.reboot()
    await steps.must_prepare(kit, other, when="for a share, after a reboot of the node,")
    await steps.must_unprepare(kit, other, when="for the last share of a device,")


def _fits_twice(device: PublishedDevice) -> bool:
    """Return whether two claims that do not request an amount can share a device."""
    taken = default_share(device)
    return all(
        2 * quantity_units(taken[n]) <= quantity_units(v) for n, v in device.capacity.items()
    )
