"""
Unpreparing always succeeds, whatever has happened to the claim, the driver and the node since the
prepare, and even if a device vanishes while the driver runs.

Does not depend on container edits, or on taints other than the one for a vanished device.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from drakit.driver import PREPARE_METHODS, UNDO_METHODS, overrides
from drakit.layout import driver_directory
from drakit.testing.conformance.claims import within
from drakit.testing.conformance.facts import ClaimUnderTest
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rules import rule, steps


@rule(
    "unprepare",
    "a claim is unprepared, and its device is available again",
    why="The kubelet calls NodeUnprepareResources after all containers of a pod have terminated. "
    "While the call fails, the pod stays in Terminating, and no other pod gets its devices.",
)
async def unprepare(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    claim = kit.claim(device)
    for _ in range(2):  # a recreated pod uses the same claim
        await steps.prepared(kit, claim)
        await steps.must_unprepare(kit, claim, when="after its pod ended,")
        if kit.spec(claim) is not None:
            kit.fail("the claim is unprepared, but its CDI file still exists")
    await steps.free_again(kit, device, when="after the previous claim was unprepared")


@rule(
    "unprepare-again",
    "unprepare can be repeated",
    why="The kubelet repeats an unprepare until it gets a response, and calls all drivers of a "
    "claim again if one of them failed. If there is nothing to undo, unprepare must succeed.",
)
async def unprepare_again(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    claim = kit.claim(device)
    await steps.prepared(kit, claim)
    # The driver undoes its part, then the node plugin fails in its own part, so both have to run
    # again.
    obstacles = [_obstruct(path) for path in kit.cdi.glob(f"*{claim.uid}*.json")]
    error = (await kit.unprepare(claim)).get(claim.uid)
    for path in obstacles:
        (path / "obstacle").unlink(missing_ok=True)
        path.rmdir()
    if obstacles and error and "CDI file" not in error:
        kit.fail(f"after its pod ended, unprepare must succeed, but failed: {error}")
    for _ in range(2):
        await steps.must_unprepare(kit, claim, when="when the kubelet repeats the call,")
    await steps.free_again(kit, device, when="after an unprepare that was repeated")


def _obstruct(path: Path) -> Path:
    """Replace a file with a directory that cannot be removed as a file."""
    while path.is_file():
        path.unlink()
        # The node plugin restores missing files, and may do so at this moment.
        with contextlib.suppress(FileExistsError):
            path.mkdir()
    (path / "obstacle").touch()
    return path


@rule(
    "unprepare-without-prepare",
    "unprepare succeeds for a claim that was never prepared",
    why="A pod can be deleted before or during the prepare of its claim. The pod terminates only "
    "after the kubelet has unprepared the claim.",
)
async def unprepare_without_prepare(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    claim = kit.claim(device)
    await steps.must_unprepare(kit, claim, when="for a claim that was never prepared,")
    for _ in range(5):
        claim = kit.claim(device)
        async with steps.going_on(kit.prepare(claim)) as asked:
            await asyncio.sleep(0.001)
            await steps.must_unprepare(kit, claim, when="at the start of its prepare,")
            await asked
        # The claim may have been unprepared first and prepared afterward, as if its pod still
        # existed.
        await steps.must_unprepare(kit, claim, when="after prepare and unprepare at the same time,")
    await steps.free_again(kit, device, when="after claims whose pods were deleted immediately")


@rule(
    "unprepare-after-restart",
    "a new process can unprepare the claims of the previous process",
    why="Node plugins can crash or be updated while pods run. The data that the driver needs for "
    "an unprepare must be on disk, or be derived from the names of the claim and its devices.",
)
async def unprepare_after_restart(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    claim = kit.claim(device)
    await steps.prepared(kit, claim)
    await kit.stop()
    await kit.start()
    await steps.must_unprepare(kit, claim, when="after a restart of the node plugin,")
    await steps.free_again(kit, device, when="after an unprepare by a new process")
    claim = kit.claim(device)
    await steps.must_prepare(kit, claim, when="after a restart of the node plugin,")
    await kit.restart()
    await steps.must_unprepare(kit, claim, when="after a crash of the node plugin,")
    await steps.free_again(kit, device, when="after an unprepare by a new process")


@rule(
    "force-delete",
    "a claim whose object no longer exists can be unprepared",
    why="`kubectl delete --force` removes the pod and the claim from the API server immediately. "
    "The kubelet unprepares the claim later, from its own checkpoint, when the claim's object can "
    "no longer be read.",
)
async def force_delete(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    claim = kit.claim(device)
    await steps.prepared(kit, claim)
    kit.delete_claim(claim)
    await kit.restart()
    await steps.must_unprepare(kit, claim, when="after the claim's object was deleted,")
    if kit.spec(claim) is not None:
        kit.fail(
            "the claim, whose object no longer exists, is unprepared, but its CDI file still exists"
        )
    await steps.free_again(kit, device, when="after its claim was deleted by force")


@rule(
    "unprepare-after-failure",
    "a claim whose prepare failed can be unprepared, and leaves no side effects",
    why="The kubelet unprepares every claim that it has tried to prepare, even if the prepare "
    "failed halfway. Side effects must not prevent the next pod from using the device.",
)
async def unprepare_after_failure(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    await steps.prepared_once(kit, device)
    absent = {"pool": device.pool, "device": "no-such-device"}
    odd = [{"no-such-key": [1, {"a": None}]}]
    refused = 0
    for what, claim in (
        ("for a device that does not exist", kit.claim(results=[absent])),
        ("with unknown parameters", kit.claim(device, configs=odd)),
    ):
        refused += bool((await steps.answer_of(kit, claim)).error)
        await steps.must_unprepare(kit, claim, when=f"after a prepare {what},")
    await steps.free_again(kit, device, when="after a prepare that failed")
    if not refused:
        kit.skip("the driver prepares all claims, even for devices that do not exist")


@rule(
    "unprepare-after-reboot",
    "a claim that was prepared before a reboot can be unprepared after it",
    why="If a pod is deleted while its node is down, the kubelet unprepares its claim after the "
    "reboot, without a prepare call in between. The side effects of the prepare no longer exist.",
)
async def unprepare_after_reboot(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    claim = kit.claim(device)
    await steps.prepared(kit, claim)
    await kit.reboot()
    await steps.must_unprepare(kit, claim, when="after a reboot of the node,")
    await steps.free_again(kit, device, when="after a reboot and an unprepare")


@rule(
    "unprepare-without-parameters",
    "a claim can be unprepared without its opaque parameters",
    why="For an unprepare, the kubelet knows only a claim's name and UID. If the claim's object "
    "and the node plugin's checkpoint no longer exist, the parameters are unknown.",
)
async def unprepare_without_parameters(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    claim = await _with_parameters(kit)
    answer = await steps.answer_of(kit, claim)
    if answer.error:
        kit.skip(f"a claim with parameters cannot be prepared: {answer.error}")
    await kit.stop()
    for path in driver_directory(kit.root, kit.driver).glob("checkpoint.db*"):
        path.unlink()
    kit.delete_claim(claim)
    kit.pods.add(claim, answer, driver=kit.driver)
    await kit.start()
    await steps.must_unprepare(kit, claim, when="after its parameters were lost,")
    await steps.free_again(kit, device, when="after an unprepare without parameters")


async def _with_parameters(kit: Kit) -> ClaimUnderTest:
    """Store a claim with the target's parameters, or with an empty object."""
    device, *_ = await steps.usable(kit)
    if kit.target.parameters is not None:
        return kit.claim(device)
    return kit.claim(device, configs=[{}])


@rule(
    "unprepare-defined",
    "a driver that defines prepare also defines unprepare, or declares no side effects",
    why="drakit finds `unprepare` by its name. If the method is missing or its name is misspelled, "
    "every unprepare succeeds, but the side effects remain.",
    kinds=("python",),
)
async def unprepare_defined(kit: Kit) -> None:
    kind = steps.class_of(kit.target)
    if kind is None or not overrides(kind, *PREPARE_METHODS):
        kit.skip("the driver defines no prepare of its own, and the default one changes nothing")
    if not getattr(kind, "side_effects", True):
        kit.skip("the driver has side_effects = False, so there is nothing to undo")
    if not overrides(kind, *UNDO_METHODS):
        kit.fail(
            "the driver prepares, but defines none of unprepare, unprepare_claims and reset; "
            "define unprepare, or set side_effects = False if prepare only returns edits"
        )


# ---------------------------------------------------------------- devices that vanish

CLAIMS = 8
"""The number of concurrent claims."""

GONE_SECONDS = 15.0
"""Time limit from the removal of a device until it is tainted. A driver may poll for devices."""

RELEASED_SECONDS = 5.0
"""Time limit from the unprepare of the claim until the vanished device is unpublished. The node
plugin checks every second."""


@rule(
    "vanish",
    "a device that vanishes affects only its own claim, which can be unprepared",
    why="Devices can fail or be unplugged while pods use them. Until the claim is unprepared, the "
    "pod stays in Terminating. A pod that was scheduled before the device vanished needs an error "
    "that names the cause.",
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

    if not await within(GONE_SECONDS, some_gone):
        kit.fail(
            f"{GONE_SECONDS:.0f} s after a device was removed, the driver still lists all devices "
            f"that claims hold; yield the devices again when they change"
        )
    for key in sorted(gone):
        claim = claims.pop(key)
        await steps.must_unprepare(kit, claim, when="after its device had vanished,")
        await steps.must_unprepare(kit, claim, when="after its device had vanished, once more,")
        if not await within(RELEASED_SECONDS, lambda: key not in _published(kit)):  # noqa: B023
            kit.skip(
                f"the driver lists device {key[1]} again, so the rest of the rule cannot be tested"
            )
        late = kit.claim(*claim.devices)
        error = (await steps.answer_of(kit, late)).error
        if not error:
            kit.fail(f"a claim of device {key[1]} was prepared after the device had vanished")
        steps.check_sentence(kit, error, "for a device that had vanished")
        await steps.must_unprepare(kit, late, when="after a prepare that failed,")
    for claim in claims.values():
        await steps.must_unprepare(kit, claim, when="after another device had vanished,")
        await steps.free_again(kit, *claim.devices, when="after another device had vanished")
    if reasons := steps.stop_reasons(kit.log()[begun:]):
        kit.fail(f"a device that vanished has stopped the driver: {reasons[0]}")


def _gone(kit: Kit) -> set[tuple[str, str]]:
    return {key for key, taints in _published(kit).items() if steps.GONE in taints}


def _published(kit: Kit) -> dict[tuple[str, str], set[str]]:
    """Return the keys of the taints of all published devices, keyed by pool and name."""
    return {
        (body["spec"]["pool"]["name"], device["name"]): {
            taint["key"] for taint in device.get("taints") or ()
        }
        for body in kit.slices()
        for device in body["spec"].get("devices") or ()
    }
