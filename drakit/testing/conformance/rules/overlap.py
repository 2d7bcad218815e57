"""
Calls side by side: pods start at the same time, and none waits for another's device.

It must not know what becomes of a claim alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from drakit.testing.conformance.errors import ConformanceError
from drakit.testing.conformance.kit import ClaimUnderTest, Kit, PrepareResult
from drakit.testing.conformance.rule import rule
from drakit.testing.conformance.rules import steps

__all__ = ()

CLAIMS = 8
"""Claims at a time."""

LONG_SECONDS = 0.2
"""Below that it does not matter whether prepares wait for each other."""

GET_INFO_SECONDS = 1.0
"""The kubelet's own deadline."""


@rule(
    "side-by-side",
    "claims of different devices are prepared side by side",
    why="The kubelet starts pods in parallel, so calls for different claims overlap. What a driver "
    "keeps of one call must not get into another.",
)
async def side_by_side(kit: Kit) -> None:
    devices = (await steps.usable(kit, at_least=2))[:CLAIMS]
    first = kit.claim(devices[0])
    await steps.prepared(kit, first)
    await steps.must_unprepare(kit, first, when="to begin with")
    claims = [kit.claim(device) for device in devices]
    for claim, answer in zip(claims, await _all(kit, claims), strict=True):
        name = claim.devices[0].name if claim.devices else "a device"
        if answer.error:
            kit.fail(
                f"of {len(claims)} claims that were prepared side by side that of {name} failed: "
                f"{answer.error}"
            )
        text = str(kit.spec(claim))
        if any(other.uid in text for other in claims if other is not claim):
            kit.fail(
                f"of {len(claims)} claims that were prepared side by side that of {name} got what "
                f"belongs to another one: {steps.edits_of(kit, claim)}"
            )
    errors = await asyncio.gather(*(kit.unprepare(claim) for claim in claims))
    for claim, error in zip(claims, errors, strict=True):
        if error.get(claim.uid):
            kit.fail(
                f"of {len(claims)} claims that were unprepared side by side one failed: "
                f"{error[claim.uid]}"
            )


@rule(
    "no-queue",
    "prepares of different devices do not wait for each other",
    why="The kubelet waits 45 s for a call. Where prepares take long and wait for each other, the "
    "pods of a node that starts do not get their devices in time.",
)
async def no_queue(kit: Kit) -> None:
    devices = (await steps.usable(kit, at_least=3))[: CLAIMS // 2]
    claim = kit.claim(devices[0])
    began = time.monotonic()
    await steps.prepared(kit, claim)
    alone = time.monotonic() - began
    await steps.must_unprepare(kit, claim, when="to begin with")
    if alone < LONG_SECONDS:
        kit.skip(f"a prepare takes less than {LONG_SECONDS:g} s")
    began = time.monotonic()
    for answer in await _all(kit, [kit.claim(device) for device in devices]):
        if answer.error:
            kit.skip(f"claims are not prepared side by side: {answer.error}")
    together, count = time.monotonic() - began, len(devices)
    if together > 0.75 * count * alone:
        kit.fail(
            f"one prepare takes {alone:.1f} s, and {count} of different devices at the same time "
            f"take {together:.1f} s: each waits for the one before; they had to take little more "
            f"than one"
        )


@rule(
    "get-info",
    "GetInfo is answered within a second while claims are prepared",
    why="A kubelet that restarts asks each driver who it is, and waits 1 s. A driver that holds up "
    "the process for longer is not registered, and its pods do not start.",
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
        kit.skip(f"no claim can be prepared to begin with: {answers[0].error}")


async def _ask(kit: Kit, *, count: int) -> None:
    """Ask for GetInfo; fail the rule if it takes longer than a kubelet waits."""
    try:
        seconds = await kit.get_info_seconds()
    except ConformanceError as error:
        kit.fail(f"while {count} claims were prepared there was no answer: {error}")
    if seconds > GET_INFO_SECONDS:
        kit.fail(
            f"while {count} claims were prepared GetInfo took {seconds:.1f} s; the kubelet waits "
            f"{GET_INFO_SECONDS:.0f} s"
        )


async def _all(kit: Kit, claims: Sequence[ClaimUnderTest]) -> list[PrepareResult]:
    """Prepare claims, each in a call of its own, at the same time."""
    return list(await asyncio.gather(*(steps.answer_of(kit, claim) for claim in claims)))
