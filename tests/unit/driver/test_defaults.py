"""The default methods: a batch calls prepare for each device; the rest does nothing."""

from __future__ import annotations

import asyncio

import pytest

from drakit import (
    AllocatedClaim,
    AllocatedDevice,
    Device,
    Driver,
    DriverError,
    Edits,
    Health,
)
from drakit.driver import DriverConfig
from tests.fakes.claims import NODE, reference
from tests.fakes.node import StaticNode

A, B = reference("uid-a"), reference("uid-b")


def device(name: str) -> AllocatedDevice:
    return AllocatedDevice(name=name, pool="", request="main")


def claim(claim, *names: str) -> AllocatedClaim:
    return AllocatedClaim(claim=claim, devices=tuple(device(name) for name in names))


class Plain(Driver[DriverConfig]):
    """Defines only what it must."""

    name = "camera.example.com"

    def __init__(self) -> None:
        super().__init__(DriverConfig(), StaticNode(name=NODE))

    async def devices(self):
        yield []


class Camera(Plain):
    """Works on one device, and records the order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.failing: dict[str, BaseException] = {}

    async def prepare(self, claim, device):
        self.calls.append(f"begin {device.name}")
        await asyncio.sleep(0)
        if device.name in self.failing:
            raise self.failing[device.name]
        self.calls.append(f"end {device.name}")
        return Edits(env={claim.uid: device.name})

    async def unprepare(self, claim, device):
        await self.prepare(claim, device)


class Direct(Plain):
    """The same with plain functions."""

    def prepare(self, claim, device):
        if device.name == "broken":
            raise DriverError("it is broken")
        return Edits(env={claim.uid: device.name})

    def unprepare(self, claim, device):
        self.prepare(claim, device)


# ------------------------------------------------------------ a batch calls the other granularity


async def test_devices_are_prepared_side_by_side_and_answered_in_order():
    driver = Camera()
    edits = await driver.prepare_claims([claim(A, "cam-0", "cam-1")])
    assert edits == {"uid-a": [Edits(env={"uid-a": "cam-0"}), Edits(env={"uid-a": "cam-1"})]}
    assert driver.calls == ["begin cam-0", "begin cam-1", "end cam-0", "end cam-1"]


@pytest.mark.parametrize("call", ["prepare_claims", "unprepare_claims"])
async def test_a_device_that_fails_fails_its_claim_once_the_others_have_ended(call):
    driver = Camera()
    driver.failing = {name: DriverError(f"{name} is dirty") for name in ("cam-0", "cam-1")}
    answers = await getattr(driver, call)([claim(A, *(f"cam-{number}" for number in range(3)))])
    assert answers == {"uid-a": driver.failing["cam-0"]}
    assert driver.calls[-1] == "end cam-2"


async def test_a_claim_of_several_fails_alone():
    driver = Camera()
    driver.failing["cam-1"] = DriverError("it is dirty")
    answers = await driver.prepare_claims([claim(A, "cam-0"), claim(B, "cam-1", "cam-2")])
    assert answers == {
        "uid-a": [Edits(env={"uid-a": "cam-0"})],
        "uid-b": driver.failing["cam-1"],
    }
    assert await driver.unprepare_claims([claim(A, "cam-0"), claim(B, "cam-1")]) == {
        "uid-a": None,
        "uid-b": driver.failing["cam-1"],
    }


async def test_a_claim_that_cancels_itself_fails_alone():
    driver = Camera()
    driver.failing["cam-1"] = asyncio.CancelledError()
    answers = await driver.prepare_claims([claim(A, "cam-0"), claim(B, "cam-1")])
    assert answers["uid-a"] == [Edits(env={"uid-a": "cam-0"})]
    assert "canceled its own call" in str(answers["uid-b"])


async def test_giving_up_a_batch_gives_up_all_of_it():
    driver = Camera()
    work = asyncio.create_task(driver.prepare_claims([claim(A, "cam-0"), claim(B, "cam-1")]))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not any(call.startswith("end") for call in driver.calls)


async def test_plain_functions_are_called_as_well():
    driver = Direct()
    answers = await driver.prepare_claims([claim(A, "cam-0"), claim(B, "broken")])
    assert answers["uid-a"] == [Edits(env={"uid-a": "cam-0"})]
    assert str(answers["uid-b"]) == "it is broken"
    undone = await driver.unprepare_claims([claim(A, "cam-0"), claim(B, "broken")])
    assert (undone["uid-a"], str(undone["uid-b"])) == (None, "it is broken")


# ------------------------------------------------------------ the rest


async def test_what_is_not_defined_does_nothing_and_can_be_awaited():
    driver = Plain()
    assert await driver.unprepare(A, device("cam-0")) is None
    assert await driver.unprepare_claims([claim(A, "cam-0")]) == {"uid-a": None}
    assert await driver.reset(device("cam-0")) is None
    assert await driver.check(A, device("cam-0")) is True
    assert await driver.health(Device(name="cam-0")) == Health.unknown()
    assert driver.close() is None
