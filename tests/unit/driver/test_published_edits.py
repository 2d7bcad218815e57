"""A driver without a prepare of its own: a container gets the edits that the device carries."""

from __future__ import annotations

import asyncio

import pytest

from drakit import AllocatedDevice, Device, Driver, Edits, Inventory, PreparedDevice
from drakit.driver import DriverConfig
from drakit_driver.runtime.failures import DeviceFailedError
from tests.fakes.node import StaticNode
from tests.unit.endpoints.camera import CLAIM, NODE, Camera, Listener, new_endpoint, running


class Plain(Driver[DriverConfig]):
    """Yields the inventories that a test puts into its queue."""

    name = Camera.name

    def __init__(self, *inventories: Inventory) -> None:
        super().__init__(DriverConfig(), StaticNode(name=NODE))
        self.later: asyncio.Queue[Inventory] = asyncio.Queue()
        self._first = inventories

    async def devices(self):
        for inventory in self._first:
            yield inventory
        while True:
            yield await self.later.get()


def allocated(name: str, *, pool: str = NODE) -> AllocatedDevice:
    return AllocatedDevice(name=name, pool=pool, request="main")


def listing(*devices: Device, **fields) -> Inventory:
    return Inventory(devices=devices, **fields)


async def test_a_container_gets_the_edits_of_the_published_device():
    inventory = listing(
        Device(name="cam-0", pool="roof", edits=Edits.of_device_nodes("/dev/video7")),
        Device(name="cam-0", edits=Edits.of_device_nodes("/dev/video0", "/dev/media0")),
        Device(name="cam-1"),
        fallback=[Device(name="whole", edits=Edits(env={"GPU": "all"}))],
    )
    expected = [
        (allocated("cam-0"), Edits.of_device_nodes("/dev/video0", "/dev/media0")),
        (allocated("cam-0", pool=f"{NODE}/roof"), Edits.of_device_nodes("/dev/video7")),
        (allocated("cam-1"), Edits()),
        (allocated("whole"), Edits(env={"GPU": "all"})),
    ]
    async with running(new_endpoint(lambda: Plain(inventory), Listener(), Plain)) as endpoint:
        for device, edits in expected:
            assert await endpoint.prepare(CLAIM, [device]) == [PreparedDevice(edits=edits)]


async def test_edits_that_change_are_those_of_the_next_prepare():
    """Two devices that differ only in their edits are equal: nothing is published again."""
    drivers: list[Plain] = []

    def make() -> Plain:
        drivers.append(Plain(listing(Device(name="cam-0", edits=Edits(env={"AT": "0"})))))
        return drivers[0]

    listener = Listener()
    async with running(new_endpoint(make, listener, Plain)) as endpoint:
        before = await listener.hear()
        drivers[0].later.put_nowait(listing(Device(name="cam-0", edits=Edits(env={"AT": "1"}))))
        after = await listener.hear()
        assert before.devices[0] is after.devices[0]
        (prepared,) = await endpoint.prepare(CLAIM, [allocated("cam-0")])
        assert prepared.edits == Edits(env={"AT": "1"})


@pytest.mark.parametrize(
    "inventory",
    [
        pytest.param(listing(Device(name="cam-1")), id="unplugged"),
        pytest.param(listing(Device(name="cam-0", pool="roof")), id="another-pool"),
    ],
)
async def test_a_device_that_is_not_listed_cannot_be_prepared(inventory):
    async with running(new_endpoint(lambda: Plain(inventory), Listener(), Plain)) as endpoint:
        with pytest.raises(
            DeviceFailedError, match=f"device cam-0 is no longer on node {NODE}; delete the pod"
        ):
            await endpoint.prepare(CLAIM, [allocated("cam-0")])


async def test_a_prepare_of_the_drivers_own_can_add_to_them():
    class Adds(Plain):
        def prepare(self, claim, device):
            return Edits(env={"CLAIM": claim.uid}, device_nodes=device.edits.device_nodes)

    inventory = listing(Device(name="cam-0", edits=Edits.of_device_nodes("/dev/video0")))
    async with running(new_endpoint(lambda: Adds(inventory), Listener(), Adds)) as endpoint:
        (prepared,) = await endpoint.prepare(CLAIM, [allocated("cam-0")])
    edits = prepared.edits
    assert edits == Edits(env={"CLAIM": CLAIM.uid}, device_nodes=edits.device_nodes)
    assert [node.path for node in edits.device_nodes] == ["/dev/video0"]
