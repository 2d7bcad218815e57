"""
Calls that are cut off: the kubelet hangs up, the pod is deleted, the node plugin crashes or stops.

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
"""What an unprepare may take that came in the middle of a prepare, beside the prepare's own time:
the pod is deleted only then."""

STOP_SECONDS = 10.0
"""What a stop may take: a DaemonSet's update takes the devices away from the scheduler after 30 s,
and the new plugin must start as well."""

COME_BACK_SECONDS = 10.0
"""From the start of the driver's process to all of its devices."""


@rule(
    "kubelet-hangs-up",
    "a prepare whose caller hung up is answered when it is asked for again",
    why="The kubelet gives up a call after 45 s, or when it is restarted, and calls again later. "
    "It must find the work done or going on, not in its own way.",
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
        await steps.must_unprepare(kit, claim, when="after a call that was cut off")


@rule(
    "pod-deleted-meanwhile",
    "a prepare that is given up leaves nothing",
    why="A pod can be deleted while its claim is being prepared. The kubelet unprepares then, and "
    "a Python driver's call is cancelled; a backend's goes on, and is followed by the unprepare. "
    "What the call has begun must not keep the device from others.",
)
async def pod_deleted_meanwhile(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    seconds = await _measure(kit, device)
    for part in (0.2, 0.5, 0.8):
        claim = kit.claim(device)
        async with steps.going_on(kit.prepare(claim)) as asked:
            await asyncio.sleep(seconds * part)
            began = time.monotonic()
            await steps.must_unprepare(kit, claim, when="while its prepare was going on")
            if (took := time.monotonic() - began) > UNPREPARE_SECONDS + seconds:
                kit.fail(
                    f"an unprepare in the middle of a prepare was answered after {took:.0f} s; the "
                    f"pod is not gone before"
                )
            await asked
        await steps.free_again(
            kit, device, when="after a pod was deleted in the middle of a prepare"
        )


@rule(
    "crash-in-prepare",
    "a prepare that a crash has cut off is done again",
    why="A node plugin that is killed in the middle of a prepare is started again, and the kubelet "
    "asks again. What the first try has left is no reason to fail.",
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
    "a stop is quick, and leaves what is prepared",
    why="The node plugin is stopped and started at each update, while pods go on. Their containers "
    "keep their devices, and may be made anew in the meantime.",
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
        kit.fail("after a stop and a start a prepared claim was answered in another way")
    if missing := steps.missing_paths(edits):
        kit.fail(f"a start has taken {missing[0]} from a claim that is prepared")


@rule(
    "process-killed",
    "a driver whose process is killed comes back, and knows what was prepared",
    why="Programs crash and are updated while pods run. What is prepared stays so; the devices "
    "must come back under their names, and claims from before be unprepared.",
    kinds=("backend", "device-plugin"),
)
async def process_killed(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    names = {(device.pool, device.name) for device in await kit.devices()}
    claim = kit.claim(device)
    first = await steps.prepared(kit, claim)
    edits = steps.edits_of(kit, claim)
    await kit.kill_target()
    again = await steps.must_prepare(kit, claim, when="while the driver's process was away")
    if again != first or steps.edits_of(kit, claim) != edits:
        kit.fail("while the driver's process was away a prepared claim was answered otherwise")
    await kit.start_target()
    await steps.within(COME_BACK_SECONDS, lambda: not names - _usable_now(kit))
    if lost := names - _usable_now(kit):
        kit.fail(f"device {sorted(lost)[0][1]} did not come back with the driver's process")
    again = await steps.must_prepare(kit, claim, when="once the driver's process was back")
    if again != first or steps.edits_of(kit, claim) != edits:
        kit.fail("once the driver's process was back a prepared claim was answered otherwise")
    if missing := steps.missing_paths(edits):
        kit.fail(f"the end of the driver's process has taken {missing[0]} from a prepared claim")
    await steps.must_unprepare(kit, claim, when="once the driver's process was back")
    await steps.free_again(kit, device, when="once the driver's process was back")


def _usable_now(kit: Kit) -> set[tuple[str, str]]:
    """Name the devices whose driver is there, by pool."""
    return {
        (body["spec"]["pool"]["name"], device["name"])
        for body in kit.slices()
        for device in body["spec"].get("devices") or ()
        if not any(taint.get("key") == steps.STOPPED for taint in device.get("taints") or ())
    }


async def _measure(kit: Kit, device: PublishedDevice) -> float:
    """Give how long a prepare takes, in seconds; skips the rule if it does not go."""
    claim = kit.claim(device)
    began = time.monotonic()
    await steps.prepared(kit, claim)
    seconds = time.monotonic() - began
    await steps.must_unprepare(kit, claim, when="to begin with")
    return seconds
