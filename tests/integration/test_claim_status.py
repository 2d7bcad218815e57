"""
The status of claims while the API server fails: no response waits for the status, and it is
written.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from drakit.testing.conformance.facts import ClaimUnderTest
from drakit.testing.conformance.kit import Kit, open_kit
from drakit.testing.conformance.targets import PythonTarget

TARGET = PythonTarget(reference="tests.fakes.broken.tidy:Tidy", values={"root": "{root}"})
STALL_SECONDS = 30.0
"""Longer than the test, so that a response that waited for the API server would be noticed."""


def path_of(claim: ClaimUnderTest) -> str:
    where = claim.reference
    return f"/apis/resource.k8s.io/v1/namespaces/{where.namespace}/resourceclaims/{where.name}"


async def entries(kit: Kit, claim: ClaimUnderTest, *, seconds: float = 15.0) -> list[Any]:
    """Wait for the entries of a claim's status."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        stored: Any = kit.api.object(path_of(claim)) or {}
        if found := stored["status"].get("devices"):
            return found
        await asyncio.sleep(0.05)
    return []


async def test_a_write_that_hangs_or_fails_delays_no_claim():
    async with open_kit(TARGET) as kit:
        await kit.start()
        lamps = await kit.devices()
        first, second, third = (kit.claim(lamp) for lamp in lamps[:3])
        # One hangs, one fails at first. The third one waits for both.
        kit.api.delay(STALL_SECONDS, "PATCH", f"{path_of(first)}/status")
        kit.api.fail("PATCH", f"{path_of(second)}/status", status=503, times=2)
        began = time.monotonic()
        answers = await kit.prepare(first, second, third)
        unprepared = await kit.unprepare(first)
        assert time.monotonic() - began < STALL_SECONDS / 3
        assert [answer.error for answer in answers.values()] == [""] * 3
        assert unprepared == {first.uid: ""}
        for claim, lamp in ((second, lamps[1]), (third, lamps[2])):
            (entry,) = await entries(kit, claim, seconds=40)
            assert (entry["driver"], entry["device"]) == (kit.driver, lamp.name)


async def test_a_token_without_permission_prepares_claims_as_before():
    async with open_kit(TARGET) as kit:
        await kit.start()
        lamp, other, *_ = await kit.devices()
        first, second = kit.claim(lamp), kit.claim(other)
        kit.api.fail("PATCH", f"{path_of(first)}/status", status=403, reason="Forbidden", times=9)
        answers = await kit.prepare(first, second)
        assert [answer.error for answer in answers.values()] == ["", ""]
        assert len(await entries(kit, second)) == 1
        assert await kit.unprepare(first, second) == {first.uid: "", second.uid: ""}
