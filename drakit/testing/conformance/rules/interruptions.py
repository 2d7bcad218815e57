"""
Interrupted calls: the kubelet hangs up, the pod is deleted, the node plugin crashes or stops.

It must not know what is prepared.
"""

from __future__ import annotations

import asyncio
import time

from drakit.testing.conformance.facts import PublishedDevice
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rule import rule
from drakit.testing.conformance.rules import steps

__all__ = ()

UNPREPARE_SECONDS = 15.0
"""The time limit of an unprepare in the middle of a prepare, besides the prepare's own time: the
pod terminates only then."""

STOP_SECONDS = 10.0
"""The time limit of a stop: during a DaemonSet's update the scheduler loses the devices after 30 s,
and the new plugin must start as well."""

RECOVERY_SECONDS = 10.0
"""From the start of the driver's process to all of its devices."""


@rule(
    "kubelet-hangs-up",
    "a prepare can be repeated after its caller disconnected",
    why="The kubelet cancels a call after 45 s, or when it restarts, and calls again later. The "
    "work must then be done or in flight, and a second call must not disturb the first.",
)
async def kubelet_hangs_up(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    seconds = await _measure(kit, device)
    for part in (0.1, 0.5, 0.9):
        claim = kit.claim(device)
        await kit.cancel_prepare(claim, after_seconds=max(0.002, seconds * part))
        first = await steps.must_prepare(kit, claim, when="after the kubelet had hung up")
        edits = steps.edits_of(kit, claim)
        again = await steps.must_prepare(kit, claim, when="asked again")
        if again != first or steps.edits_of(kit, claim) != edits:
            kit.fail("after the kubelet had hung up two answers for one claim were not the same")
        await steps.must_unprepare(kit, claim, when="after an interrupted call")


@rule(
    "pod-deleted-meanwhile",
    "an abandoned prepare leaves nothing behind",
    why="A pod can be deleted while its claim is being prepared. The kubelet then calls unprepare. "
    "drakit cancels the prepare of a Python driver, and waits until the prepare of a backend has "
    "finished. Effects of the abandoned call must not keep other claims from using the device.",
)
async def pod_deleted_meanwhile(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    seconds = await _measure(kit, device)
    for part in (0.2, 0.5, 0.8):
        claim = kit.claim(device)
        async with steps.going_on(kit.prepare(claim)) as asked:
            await asyncio.sleep(seconds * part)
            began = time.monotonic()
            await steps.must_unprepare(kit, claim, when="while its prepare was in flight")
            if (took := time.monotonic() - began) > UNPREPARE_SECONDS + seconds:
                kit.fail(
                    f"an unprepare in the middle of a prepare was answered after {took:.0f} s; the "
                    f"pod terminates only then"
                )
            await asked
        await steps.free_again(
            kit, device, when="after a pod was deleted in the middle of a prepare"
        )


@rule(
    "crash-in-prepare",
    "a prepare that a crash interrupted can be repeated",
    why="If the node plugin is killed during a prepare, it starts again, and the kubelet repeats "
    "the call. Effects of the first attempt must not make the second one fail.",
)
async def crash_in_prepare(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    seconds = await _measure(kit, device)
    for part in (0.3, 0.8):
        claim = kit.claim(device)
        async with steps.going_on(kit.prepare(claim)):
            await asyncio.sleep(seconds * part)
            await kit.kill()
        await kit.start()
        first = await steps.must_prepare(
            kit, claim, when="after a crash in the middle of a prepare"
        )
        edits = steps.edits_of(kit, claim)
        if missing := steps.missing_paths(edits):
            kit.fail(
                f"after a crash in the middle of a prepare the claim was answered as prepared, but "
                f"on the host there is no {missing[0]}"
            )
        again = await steps.must_prepare(kit, claim, when="asked again")
        if again != first or steps.edits_of(kit, claim) != edits:
            kit.fail("after a crash two answers for one claim were not the same")
        await steps.must_unprepare(kit, claim, when="after a crash in the middle of its prepare")


@rule(
    "stop",
    "a stop is quick, and keeps prepared claims",
    why="The node plugin stops and starts at each update, while pods keep running. Their "
    "containers keep their devices, and can restart in the meantime.",
)
async def stop(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    claim = kit.claim(device)
    first = await steps.prepared(kit, claim)
    edits = steps.edits_of(kit, claim)
    began = time.monotonic()
    await kit.stop()
    if (took := time.monotonic() - began) > STOP_SECONDS:
        kit.fail(f"the node plugin took {took:.0f} s to stop; {STOP_SECONDS:.0f} s are allowed")
    if kit.spec(claim) is None or steps.edits_of(kit, claim) != edits:
        kit.fail("after a stop the CDI file of a prepared claim is not as it was")
    if missing := steps.missing_paths(edits):
        kit.fail(f"a stop has taken {missing[0]} from a claim that is prepared")
    await kit.start()
    again = await steps.must_prepare(kit, claim, when="after a stop and a start")
    if again != first or steps.edits_of(kit, claim) != edits:
        kit.fail("after a stop and a start a prepared claim got a different answer")
    if missing := steps.missing_paths(edits):
        kit.fail(f"a start has taken {missing[0]} from a claim that is prepared")


@rule(
    "process-killed",
    "a driver recovers after its process is killed, and can unprepare earlier claims",
    why="Programs crash and are updated while pods run. Prepared claims stay prepared; the driver "
    "must publish the devices again under the same names, and must be able to unprepare earlier "
    "claims.",
    kinds=("backend", "device-plugin"),
)
async def process_killed(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    names = {(device.pool, device.name) for device in await kit.devices()}
    claim = kit.claim(device)
    first = await steps.prepared(kit, claim)
    edits = steps.edits_of(kit, claim)
    await kit.kill_target()
    again = await steps.must_prepare(kit, claim, when="while the driver's process was down")
    if again != first or steps.edits_of(kit, claim) != edits:
        kit.fail("while the driver's process was down a prepared claim got a different answer")
    await kit.start_target()
    await steps.within(RECOVERY_SECONDS, lambda: not names - _usable_now(kit))
    if lost := names - _usable_now(kit):
        kit.fail(f"device {sorted(lost)[0][1]} is not available again with the driver's process")
    again = await steps.must_prepare(kit, claim, when="once the driver's process was up again")
    if again != first or steps.edits_of(kit, claim) != edits:
        kit.fail("once the driver's process was up again a prepared claim got a different answer")
    if missing := steps.missing_paths(edits):
        kit.fail(f"the end of the driver's process has taken {missing[0]} from a prepared claim")
    await steps.must_unprepare(kit, claim, when="once the driver's process was up again")
    await steps.free_again(kit, device, when="once the driver's process was up again")


def _usable_now(kit: Kit) -> set[tuple[str, str]]:
    """Return pool and name of the devices whose driver is available."""
    return {
        (body["spec"]["pool"]["name"], device["name"])
        for body in kit.slices()
        for device in body["spec"].get("devices") or ()
        if not any(taint.get("key") == steps.STOPPED for taint in device.get("taints") or ())
    }


async def _measure(kit: Kit, device: PublishedDevice) -> float:
    """Return how many seconds a prepare takes; skip the rule if it fails."""
    claim = kit.claim(device)
    began = time.monotonic()
    await steps.prepared(kit, claim)
    seconds = time.monotonic() - began
    await steps.must_unprepare(kit, claim, when="to begin with")
    return seconds
