"""
Concurrent claims: pods can start at the same time, no claim waits for another claim's device, and
no claim gets hardware that another claim holds.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from drakit.quantity import quantity_units
from drakit.testing.conformance.facts import (
    ClaimUnderTest,
    ConformanceError,
    PrepareResult,
    PublishedDevice,
)
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rules import rule, steps

CLAIMS = 8
"""Number of concurrent claims."""

LONG_SECONDS = 0.2
"""Minimum duration of a prepare to check for concurrency. For shorter prepares, it does not matter
whether they wait for each other."""

GET_INFO_SECONDS = 1.0
"""The kubelet's own deadline for GetInfo."""


_NUMBER = re.compile(r"(has|returned) device node [bc] \d+:\d+(, which| for device)")
"""Matches the error of a claim whose device number is held for other hardware."""


@rule(
    "device-numbers",
    "devices that share a device number have the same identity",
    why="The node plugin rejects a claim that needs a device number if another claim holds this "
    "number for other hardware. If a driver gives a shared device node the identity of a single "
    "device, pods cannot use the driver's devices at the same time.",
    kinds=("python", "backend"),  # a device plugin cannot return an identity
)
async def device_numbers(kit: Kit) -> None:
    devices = (await steps.usable(kit, at_least=2))[:CLAIMS]
    claims = [kit.claim(device) for device in devices]
    for claim, device in zip(claims, devices, strict=True):
        answer = await steps.answer_of(kit, claim)
        if _NUMBER.search(answer.error):
            kit.fail(
                f"while other claims hold devices, the claim of {device.name} was refused because "
                f"of the identity of a device node: {answer.error}"
            )
        if answer.error:
            kit.skip(f"the driver prepares no claim (see the rule prepare): {answer.error}")
    for claim in claims:
        await steps.must_unprepare(kit, claim, when="at the end of the rule,")


@rule(
    "concurrent-prepare",
    "claims for different devices are prepared concurrently",
    why="The kubelet starts pods in parallel, so calls for different claims overlap. State of one "
    "call must not leak into another call.",
)
async def concurrent_prepare(kit: Kit) -> None:
    devices = (await steps.usable(kit, at_least=2))[:CLAIMS]
    await steps.prepared_once(kit, devices[0])
    claims = [kit.claim(device) for device in devices]
    for claim, answer in zip(claims, await _all(kit, claims), strict=True):
        name = claim.devices[0].name if claim.devices else "a device"
        if answer.error:
            kit.fail(
                f"when {len(claims)} claims were prepared concurrently, the claim of {name} "
                f"failed: {answer.error}"
            )
        text = str(kit.spec(claim))
        if any(other.uid in text for other in claims if other is not claim):
            kit.fail(
                f"when {len(claims)} claims were prepared concurrently, the claim of {name} got "
                f"data of another claim: {steps.edits_of(kit, claim)}"
            )
    errors = await asyncio.gather(*(kit.unprepare(claim) for claim in claims))
    for claim, error in zip(claims, errors, strict=True):
        if error.get(claim.uid):
            kit.fail(
                f"when {len(claims)} claims were unprepared concurrently, one failed: "
                f"{error[claim.uid]}"
            )


@rule(
    "prepare-not-serialized",
    "prepare calls for different devices do not wait for each other",
    why="The kubelet waits 45 s for a call. If long prepare calls wait for each other, "
    "pods on a node that has just started do not get their devices in time.",
)
async def prepare_not_serialized(kit: Kit) -> None:
    devices = (await steps.usable(kit, at_least=3))[: CLAIMS // 2]
    claim = kit.claim(devices[0])
    began = time.monotonic()
    await steps.prepared(kit, claim)
    alone = time.monotonic() - began
    await steps.must_unprepare(kit, claim, when="at the start of the rule,")
    if alone < LONG_SECONDS:
        kit.skip(f"a prepare takes less than {LONG_SECONDS:g} s")
    began = time.monotonic()
    for answer in await _all(kit, [kit.claim(device) for device in devices]):
        if answer.error:
            kit.skip(f"claims are not prepared concurrently: {answer.error}")
    together, count = time.monotonic() - began, len(devices)
    if together > 0.75 * count * alone:
        kit.fail(
            f"one prepare takes {alone:.1f} s, but {count} concurrent prepares of different "
            f"devices take {together:.1f} s, so each waits for the previous one; they must take "
            "little longer than one"
        )


@rule(
    "get-info",
    "the driver responds to GetInfo within a second while it prepares claims",
    why="A restarted kubelet calls GetInfo on each driver, and waits 1 s. If a driver "
    "blocks its process for longer, the kubelet does not register it, and pods that use it do not "
    "start.",
)
async def get_info(kit: Kit) -> None:
    devices = (await steps.usable(kit))[:CLAIMS]
    claims = [kit.claim(device) for device in devices]
    async with steps.going_on(_all(kit, claims)) as working:
        while True:
            done = working.done()
            await _ask(kit, count=len(claims))
            if done:
                break
            await asyncio.wait([working], timeout=0.05)
        answers = await working
    if all(answer.error for answer in answers):
        kit.skip(f"the driver prepares no claim: {answers[0].error}")


@rule(
    "partitions",
    "partitions of one piece of hardware are prepared and unprepared independently",
    why="A claim that needs the same hardware must wait until the device is unprepared. "
    "Unpreparing one partition must not affect a pod that uses another partition.",
    kinds=("python", "backend"),  # a device plugin has no counters
)
async def partitions(kit: Kit) -> None:
    devices = [d for d in steps.untainted(await kit.devices()) if not d.allow_multiple]
    found = next(_partitioned(devices, _counters(kit)), None)
    if found is None:
        kit.skip("no device shares counters with two devices that can be prepared at the same time")
    one, other, whole = found
    first, second, third = kit.claim(one), kit.claim(other), kit.claim(whole)
    await steps.prepared(kit, first)
    held = await steps.hold(
        kit, second, who=other.name, when=f"while {one.name} is prepared, which leaves room,"
    )
    if not (await steps.answer_of(kit, third)).error:
        kit.fail(
            f"{whole.name} was prepared while {one.name} was prepared, although their counters "
            f"overlap"
        )
    await steps.must_unprepare(kit, first, when=f"while {other.name} is prepared,")
    held.expect_paths(f"unpreparing {one.name}")
    await held.prepare_again(when=f"after {one.name} was unprepared,")
    await steps.must_unprepare(kit, second, when="for the last partition,")
    await steps.must_prepare(
        kit, third, when=f"after the partitions of {whole.name} were unprepared,"
    )
    await steps.must_unprepare(kit, third, when="at the end of the rule,")


def _counters(kit: Kit) -> Mapping[tuple[str, str], Mapping[str, int]]:
    """Return the published counter sets, keyed by pool and name."""
    return {
        (body["spec"]["pool"]["name"], counter_set["name"]): _amounts(counter_set)
        for body in kit.slices()
        for counter_set in body["spec"].get("sharedCounters") or ()
    }


def _partitioned(
    devices: Sequence[PublishedDevice], totals: Mapping[tuple[str, str], Mapping[str, int]]
) -> Iterator[tuple[PublishedDevice, PublishedDevice, PublishedDevice]]:
    """Yield two devices that can be prepared together, and a third one that overlaps with both."""
    for (pool, name), total in totals.items():
        taken = {
            device.name: (device, _amounts(consumed))
            for device in devices
            if device.pool == pool
            for consumed in device.body.get("consumesCounters") or ()
            if consumed["counterSet"] == name
        }
        fits = {
            frozenset(pair): all(
                sum(taken[each][1].get(counter, 0) for each in pair) <= amount
                for counter, amount in total.items()
            )
            for pair in combinations(taken, 2)
        }
        for one, other in (pair for pair in combinations(taken, 2) if fits[frozenset(pair)]):
            for third in taken.keys() - {one, other}:
                if not fits[frozenset((one, third))] and not fits[frozenset((other, third))]:
                    yield taken[one][0], taken[other][0], taken[third][0]


def _amounts(body: Mapping[str, Any]) -> Mapping[str, int]:
    return {name: quantity_units(str(each["value"])) for name, each in body["counters"].items()}


async def _ask(kit: Kit, *, count: int) -> None:
    """Call GetInfo. Fail the rule if the call exceeds the kubelet's deadline."""
    try:
        seconds = await kit.get_info_seconds()
    except ConformanceError as error:
        kit.fail(f"GetInfo failed while {count} claims were prepared: {error}")
    if seconds > GET_INFO_SECONDS:
        kit.fail(
            f"GetInfo took {seconds:.1f} s while {count} claims were prepared; the kubelet waits "
            f"{GET_INFO_SECONDS:.0f} s"
        )


async def _all(kit: Kit, claims: Sequence[ClaimUnderTest]) -> list[PrepareResult]:
    """Prepare claims concurrently, each in a separate call."""
    return list(await asyncio.gather(*(steps.answer_of(kit, claim) for claim in claims)))
