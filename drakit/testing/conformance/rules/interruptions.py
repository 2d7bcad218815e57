"""
Interrupted calls: the kubelet cancels a call, the pod is deleted, the node plugin crashes or stops.
"""

from __future__ import annotations

import asyncio
import time

from drakit.testing.conformance.claims import within
from drakit.testing.conformance.facts import PublishedDevice
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rules import rule, steps

UNPREPARE_SECONDS = 15.0
"""Time limit for an unprepare during a prepare, in addition to the duration of the prepare. The pod
cannot terminate until the unprepare ends."""

STOP_SECONDS = 10.0
"""Time limit for stopping. During a DaemonSet update, the devices become unavailable to the
scheduler after 30 s, and the new plugin must also start within that time."""

RECOVERY_SECONDS = 10.0
"""Time limit from the start of the driver's process until all of its devices can be used."""


@rule(
    "prepare-canceled",
    "a prepare call can be repeated after the kubelet has canceled it",
    why="The kubelet cancels a call after 45 s, or when it restarts, and calls again later. The "
    "second call must not interfere with the first.",
)
async def prepare_canceled(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    seconds = await _measure(kit, device)
    for part in (0.1, 0.5, 0.9):
        claim = kit.claim(device)
        await kit.cancel_prepare(claim, after_seconds=max(0.002, seconds * part))
        held = await steps.hold(kit, claim, when="after the kubelet canceled a call,")
        await held.prepare_again(when="when the kubelet repeats the call that it canceled,")
        await steps.must_unprepare(kit, claim, when="after a canceled call,")


@rule(
    "pod-deleted-during-prepare",
    "a prepare call whose pod is deleted leaves no side effects",
    why="A pod can be deleted while its claim is being prepared. The kubelet then calls "
    "unprepare. Side effects of the prepare call must not prevent other claims from using the "
    "device.",
)
async def pod_deleted_during_prepare(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    seconds = await _measure(kit, device)
    for part in (0.2, 0.5, 0.8):
        claim = kit.claim(device)
        async with steps.going_on(kit.prepare(claim)) as asked:
            await asyncio.sleep(seconds * part)
            began = time.monotonic()
            await steps.must_unprepare(kit, claim, when="during its prepare,")
            if (took := time.monotonic() - began) > UNPREPARE_SECONDS + seconds:
                kit.fail(
                    f"unprepare took {took:.0f} s during a prepare; the pod stays in Terminating "
                    "for that time"
                )
            await asked
        await steps.free_again(kit, device, when="after a pod was deleted during a prepare")


@rule(
    "crash-during-prepare",
    "a prepare call that was interrupted by a crash can be repeated",
    why="If the node plugin is killed during a prepare, it starts again, and the kubelet repeats "
    "the call. Side effects of the first attempt must not make the second attempt fail.",
)
async def crash_during_prepare(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    seconds = await _measure(kit, device)
    for part in (0.3, 0.8):
        claim = kit.claim(device)
        async with steps.going_on(kit.prepare(claim)):
            await asyncio.sleep(seconds * part)
            await kit.kill()
        await kit.start()
        held = await steps.hold(kit, claim, when="after a crash during a prepare,")
        if missing := steps.missing_paths(held.edits):
            kit.fail(
                f"after a crash during a prepare, the next prepare succeeds, but its edits name "
                f"{missing[0]}, which does not exist on the host"
            )
        await held.prepare_again(when="when the kubelet repeats the call after a crash,")
        await steps.must_unprepare(kit, claim, when="after a crash during its prepare,")


@rule(
    "graceful-stop",
    "the node plugin stops quickly, and claims stay prepared",
    why="The node plugin stops and starts at each update, while pods keep running and their "
    "containers can restart.",
)
async def graceful_stop(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    claim = kit.claim(device)
    held = await steps.hold(kit, claim)
    began = time.monotonic()
    await kit.stop()
    if (took := time.monotonic() - began) > STOP_SECONDS:
        kit.fail(f"the node plugin took {took:.0f} s to stop; the limit is {STOP_SECONDS:.0f} s")
    if kit.spec(claim) is None or steps.edits_of(kit, claim) != held.edits:
        kit.fail("after a stop, the CDI file of a prepared claim has changed")
    held.expect_paths("a stop")
    await kit.start()
    await held.prepare_again(when="after a stop and a start,")
    held.expect_paths("a start")


@rule(
    "process-killed",
    "a driver whose process was killed recovers, and can unprepare earlier claims",
    why="Programs can crash or be updated while pods run. The driver must publish the devices "
    "again under the same names, and must be able to unprepare earlier claims.",
    kinds=("backend", "device-plugin"),
)
async def process_killed(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    names = {(device.pool, device.name) for device in await kit.devices()}
    claim = kit.claim(device)
    held = await steps.hold(kit, claim)
    await kit.kill_target()
    await held.prepare_again(when="while the driver's process was down,")
    await kit.start_target()
    await within(RECOVERY_SECONDS, lambda: not names - _usable_now(kit))
    if lost := names - _usable_now(kit):
        kit.fail(f"device {sorted(lost)[0][1]} is not available after the driver's restart")
    await held.prepare_again(when="after the driver's restart,")
    held.expect_paths("the end of the driver's process")
    await steps.must_unprepare(kit, claim, when="after the driver's restart,")
    await steps.free_again(kit, device, when="after the driver's restart")


def _usable_now(kit: Kit) -> set[tuple[str, str]]:
    """Return the pool and name of each device whose driver is available."""
    return {
        (body["spec"]["pool"]["name"], device["name"])
        for body in kit.slices()
        for device in body["spec"].get("devices") or ()
        if not any(taint.get("key") == steps.STOPPED for taint in device.get("taints") or ())
    }


async def _measure(kit: Kit, device: PublishedDevice) -> float:
    """Return how many seconds a prepare takes. Skip the rule if the prepare fails."""
    claim = kit.claim(device)
    began = time.monotonic()
    await steps.prepared(kit, claim)
    seconds = time.monotonic() - began
    await steps.must_unprepare(kit, claim, when="at the start of the rule,")
    return seconds
