"""What a driver need not define: the larger grain calls the smaller; the rest does no harm."""

from __future__ import annotations

import asyncio

import pytest

from drakit import (
    AllocatedClaim,
    AllocatedDevice,
    Device,
    DeviceNode,
    Driver,
    DriverError,
    Edits,
    Health,
)
from drakit.device import Inventory
from drakit.driver import DriverConfig
from tests.fakes.claims import NODE, reference
from tests.fakes.node import StaticNode

A, B = reference("uid-a"), reference("uid-b")


def device(name: str, *, pool: str = "") -> AllocatedDevice:
    return AllocatedDevice(name=name, pool=pool, request="main")


def claim(claim, *names: str) -> AllocatedClaim:
    return AllocatedClaim(claim=claim, devices=tuple(device(name) for name in names))


class Plain(Driver[DriverConfig]):
    """Defines nothing that it need not."""

    name = "camera.example.com"

    def __init__(self, inventory: Inventory | None = None) -> None:
        super().__init__(DriverConfig(), StaticNode(name=NODE))
        self.inventory = inventory

    async def devices(self):
        yield []


class Camera(Plain):
    """Works on one device, and says in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.failing: dict[str, BaseException] = {}

    async def prepare(self, claim, device):
        self.said.append(f"begin {device.name}")
        await asyncio.sleep(0)
        if device.name in self.failing:
            raise self.failing[device.name]
        self.said.append(f"end {device.name}")
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


# ------------------------------------------------------------ node paths


@pytest.mark.parametrize(
    ("asked", "paths"),
    [
        pytest.param(device("cam-0"), ["/dev/video0", "/dev/media0"], id="all-its-paths"),
        pytest.param(device("cam-0", pool="roof"), ["/dev/video7"], id="same-name-in-another-pool"),
        pytest.param(device("cam-1"), [], id="a-device-without-paths"),
        pytest.param(device("whole"), ["/dev/gpu"], id="published-instead-of-its-partitions"),
    ],
)
async def test_a_container_gets_the_devices_node_paths(asked, paths):
    inventory = Inventory(
        devices=[
            Device(name="cam-0", pool="roof", node_paths=("/dev/video7",)),
            Device(name="cam-0", node_paths=("/dev/video0", "/dev/media0")),
            Device(name="cam-1"),
        ],
        fallback=[Device(name="whole", node_paths=("/dev/gpu",))],
    )
    edits = await Plain(inventory).prepare(A, asked)
    assert edits == Edits(device_nodes=tuple(DeviceNode(path=path) for path in paths))


@pytest.mark.parametrize(
    "inventory",
    [
        pytest.param(None, id="nothing-listed-yet"),
        pytest.param(Inventory(devices=[Device(name="cam-1")]), id="unplugged"),
        pytest.param(Inventory(devices=[Device(name="cam-0", pool="roof")]), id="another-pool"),
    ],
)
async def test_a_device_that_is_not_listed_cannot_be_prepared(inventory):
    with pytest.raises(DriverError, match=f"device cam-0 is not on node {NODE} any more; delete"):
        await Plain(inventory).prepare(A, device("cam-0"))


# ------------------------------------------------------------ the larger grain calls the smaller


async def test_a_claims_devices_are_prepared_side_by_side_and_answered_in_order():
    driver = Camera()
    edits = await driver.prepare_claim(A, [device("cam-0"), device("cam-1")])
    assert edits == [Edits(env={"uid-a": "cam-0"}), Edits(env={"uid-a": "cam-1"})]
    assert driver.said == ["begin cam-0", "begin cam-1", "end cam-0", "end cam-1"]


@pytest.mark.parametrize("call", ["prepare_claim", "unprepare_claim"])
async def test_a_device_that_fails_fails_its_claim_once_the_others_have_ended(call):
    driver = Camera()
    driver.failing = {name: DriverError(f"{name} is dirty") for name in ("cam-0", "cam-1")}
    with pytest.raises(DriverError, match="cam-0 is dirty"):
        await getattr(driver, call)(A, [device(f"cam-{number}") for number in range(3)])
    assert driver.said[-1] == "end cam-2"


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
    assert "was cancelled, but not by its caller" in str(answers["uid-b"])


async def test_giving_up_a_batch_gives_up_all_of_it():
    driver = Camera()
    work = asyncio.create_task(driver.prepare_claims([claim(A, "cam-0"), claim(B, "cam-1")]))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not any(said.startswith("end") for said in driver.said)


async def test_plain_functions_are_called_as_well():
    driver = Direct()
    assert await driver.prepare_claim(A, [device("cam-0")]) == [Edits(env={"uid-a": "cam-0"})]
    answers = await driver.prepare_claims([claim(A, "cam-0"), claim(B, "broken")])
    assert answers["uid-a"] == [Edits(env={"uid-a": "cam-0"})]
    assert str(answers["uid-b"]) == "it is broken"
    assert await driver.unprepare_claim(A, [device("cam-0")]) is None
    undone = await driver.unprepare_claims([claim(A, "cam-0"), claim(B, "broken")])
    assert (undone["uid-a"], str(undone["uid-b"])) == (None, "it is broken")


async def test_a_claim_grain_of_the_drivers_own_serves_the_batch():
    class PerClaim(Plain):
        def prepare_claim(self, claim, devices):
            return [Edits(env={"of": str(len(devices))}) for _ in devices]

    answers = await PerClaim().prepare_claims([claim(A, "cam-0", "cam-1")])
    assert answers == {"uid-a": [Edits(env={"of": "2"})] * 2}


# ------------------------------------------------------------ the rest


async def test_what_is_not_defined_does_nothing_and_can_be_awaited():
    driver = Plain()
    assert await driver.unprepare(A, device("cam-0")) is None
    assert await driver.unprepare_claim(A, [device("cam-0")]) is None
    assert await driver.unprepare_claims([claim(A, "cam-0")]) == {"uid-a": None}
    assert await driver.reset(device("cam-0")) is None
    assert await driver.check(A, device("cam-0")) is True
    assert await driver.health(Device(name="cam-0")) == Health.unknown()
    assert driver.close() is None
