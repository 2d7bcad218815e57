"""
Devices that vanish while the driver runs: a stick is unplugged, a card fails.

It must not know taints besides the one of such a device.
"""

from __future__ import annotations

from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rule import rule
from drakit.testing.conformance.rules import steps

__all__ = ()

CLAIMS = 8
"""Claims at the same time."""

GONE_SECONDS = 15.0
"""From the removal of a device to its taint: a driver may poll."""

RELEASED_SECONDS = 5.0
"""From the unprepare of its claim until the device is unpublished; the node plugin checks each
second."""


@rule(
    "vanish",
    "a device that vanishes affects only its own claim, which can be unprepared",
    why=(
        "Devices can fail or be unplugged while pods use them. Until the claim is "
        "unprepared, the pod stays in Terminating. A pod that was scheduled before the "
        "device vanished needs an error that names the cause."
    ),
)
async def vanish(kit: Kit) -> None:
    devices = (await steps.usable(kit, at_least=2))[:CLAIMS]
    claims = {(device.pool, device.name): kit.claim(device) for device in devices}
    for claim in claims.values():
        await steps.prepared(kit, claim)
    begun = len(kit.log())
    await kit.unplug()
    gone: set[tuple[str, str]] = set()

    def some_gone() -> bool:
        gone.update(_gone(kit) & claims.keys())
        return bool(gone)

    if not await steps.within(GONE_SECONDS, some_gone):
        kit.fail(
            f"{GONE_SECONDS:.0f} s after a device was removed, the driver still lists all devices "
            f"that claims hold; yield the devices again when they change"
        )
    for key in sorted(gone):
        claim = claims.pop(key)
        await steps.must_unprepare(kit, claim, when="after its device had vanished,")
        await steps.must_unprepare(kit, claim, when="after its device had vanished, once more")
        if not await steps.within(RELEASED_SECONDS, lambda: key not in _published(kit)):  # noqa: B023
            kit.skip(
                f"the driver lists device {key[1]} again, so the rest of the rule cannot be tested"
            )
        late = kit.claim(*claim.devices)
        error = (await steps.answer_of(kit, late)).error
        if not error:
            kit.fail(f"a claim of device {key[1]} was prepared after the device had vanished")
        steps.check_sentence(kit, error, "for a device that had vanished")
        await steps.must_unprepare(kit, late, when="after a prepare that failed")
    for claim in claims.values():
        await steps.must_unprepare(kit, claim, when="after another device had vanished")
        await steps.free_again(kit, *claim.devices, when="after another device had vanished")
    if reasons := steps.stop_reasons(kit.log()[begun:]):
        kit.fail(f"a device that vanished has stopped the driver: {reasons[0]}")


def _gone(kit: Kit) -> set[tuple[str, str]]:
    return {key for key, taints in _published(kit).items() if steps.GONE in taints}


def _published(kit: Kit) -> dict[tuple[str, str], set[str]]:
    """Return the keys of the taints of all published devices, by pool and name."""
    return {
        (body["spec"]["pool"]["name"], device["name"]): {
            taint["key"] for taint in device.get("taints") or ()
        }
        for body in kit.slices()
        for device in body["spec"].get("devices") or ()
    }
