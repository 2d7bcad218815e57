"""examples/sensor: two sensors on each of two nodes, which are pseudo-terminals."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from drakit import AllocatedDevice, ClaimReference, Device, DeviceNode, DriverError, Health
from drakit_driver.runtime.contract import traits_of
from drakit_formats.resource.inventory import device_problems
from tests.fakes.node import StaticNode
from tests.fakes.terminals import Terminal
from tests.unit.docs.listings import ROOT, module

SOURCE = (ROOT / "examples" / "sensor" / "sensors.py").read_text()
CLAIM = ClaimReference(namespace="lab", name="climate", uid="uid-1")
OTHER = ClaimReference(namespace="lab", name="watch", uid="uid-2")


class SensorNode:
    """A node with a directory of links, and its driver."""

    def __init__(self, sensors: ModuleType, root: Path) -> None:
        self.links, self.state = root / "by-id", root / "state"
        self.links.mkdir(parents=True)
        self.state.mkdir()
        self.terminals: dict[str, Terminal] = {}
        config = sensors.SensorsConfig(directory=self.links, state=self.state)
        self.driver = sensors.Sensors(config, StaticNode(name=root.name))

    def plug(self, link: str) -> Terminal:
        """Plug a sensor in: it gets the next free number."""
        terminal = self.terminals[link] = Terminal()
        (self.links / link).symlink_to(terminal.path)
        return terminal

    def unplug(self, link: str) -> None:
        (self.links / link).unlink()
        self.terminals.pop(link).close()

    async def devices(self) -> dict[str, Device]:
        stream = self.driver.devices()
        found = await anext(stream)
        await stream.aclose()
        assert not [problem for device in found for problem in device_problems(device)]
        return {device.name: device for device in found}


AIR, SOIL = "usb-Acme_Air_Sensor_A100-if00-port0", "usb-Acme_Soil_S7"
AIR_NAME, SOIL_NAME = "usb-acme-air-sensor-a100-if00-port0", "usb-acme-soil-s7"


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SensorNode]]:
    sensors = module("sensors", SOURCE, monkeypatch)
    made = [SensorNode(sensors, tmp_path / name) for name in ("node-1", "node-2")]
    for node in made:
        node.plug(AIR)
        node.plug(SOIL)
    yield made
    for node in made:
        for link in list(node.terminals):
            node.unplug(link)


@pytest.fixture
def node(nodes: list[SensorNode]) -> SensorNode:
    return nodes[0]


def allocated(device: Device, **fields: Any) -> AllocatedDevice[Any]:
    given = {"name": device.name, "pool": "", "request": "sensor", "edits": device.edits}
    return AllocatedDevice(**(given | fields))


def node_of(device: Device) -> DeviceNode:
    (found,) = device.edits.device_nodes
    return found


async def test_each_node_lists_its_own_sensors(nodes):
    first, second = [await node.devices() for node in nodes]
    assert list(first) == list(second) == [AIR_NAME, SOIL_NAME]
    air = first[AIR_NAME]
    assert air.attributes == {"model": "Acme_Air_Sensor", "serial": "A100"}
    assert first[SOIL_NAME].attributes == {"model": "Acme_Soil", "serial": "S7"}
    number = os.stat(nodes[0].terminals[AIR].path).st_rdev
    assert node_of(air) == DeviceNode(
        path=f"/dev/{AIR_NAME}",
        host_path=nodes[0].terminals[AIR].path,
        type="c",
        major=os.major(number),
        minor=os.minor(number),
        identity=AIR,
    )
    assert node_of(air).minor != node_of(second[AIR_NAME]).minor


async def test_an_unplugged_sensor_is_no_longer_listed_and_cannot_be_prepared(node):
    device = (await node.devices())[AIR_NAME]
    node.unplug(AIR)
    assert list(await node.devices()) == [SOIL_NAME]
    with pytest.raises(DriverError, match="no longer on node node-1"):
        await node.driver.prepare(CLAIM, allocated(device, edits=None))
    node.driver.unprepare(CLAIM, allocated(device, edits=None))
    # udev has not removed the link yet.
    (node.links / AIR).symlink_to("/dev/missing")
    assert list(await node.devices()) == [SOIL_NAME]
    (node.links / AIR).unlink()


async def test_a_sensor_is_healthy_while_it_writes(node):
    devices = await node.devices()
    assert await node.driver.health(devices[AIR_NAME]) == Health.healthy()
    path = node.terminals[AIR].path
    node.terminals[AIR].fall_silent()
    while (health := await node.driver.health(devices[AIR_NAME])) == Health.healthy():
        pass  # the kernel has kept some readings
    assert health == Health.unhealthy(f"{path} has no reading for 3 s; check the sensor's cable")
    assert await node.driver.health(devices[SOIL_NAME]) == Health.healthy()


async def test_the_driver_does_not_read_what_a_pod_reads(node):
    device = (await node.devices())[AIR_NAME]
    assert traits_of(type(node.driver)).side_effects
    for _ in range(2):
        edits = await node.driver.prepare(CLAIM, allocated(device))
        assert edits == device.edits
    await node.driver.prepare(OTHER, allocated(device, admin_access=True))
    assert (await node.driver.health(device)).status == "unknown"
    node.driver.unprepare(OTHER, allocated(device, admin_access=True))
    assert (await node.driver.health(device)).status == "unknown"
    for _ in range(2):
        node.driver.unprepare(CLAIM, allocated(device))
    assert (await node.driver.health(device)).status == "healthy"
    assert not list(node.state.iterdir())


async def test_a_sensor_that_gets_another_number_is_prepared_again(node):
    before = await node.devices()
    for name in (AIR_NAME, SOIL_NAME):
        await node.driver.prepare(CLAIM, allocated(before[name]))
    node.unplug(AIR)
    node.plug("usb-Acme_Other_X1")  # it takes the number
    node.plug(AIR)
    after = await node.devices()
    assert node_of(after[AIR_NAME]).minor != node_of(before[AIR_NAME]).minor
    assert node_of(after[AIR_NAME]).identity == node_of(before[AIR_NAME]).identity
    assert {name for name, device in after.items() if device.prepare_again} == {AIR_NAME}

    edits = await node.driver.prepare(CLAIM, allocated(after[AIR_NAME]))
    assert edits.device_nodes == (node_of(after[AIR_NAME]),)
    assert not any(device.prepare_again for device in (await node.devices()).values())
    assert replace(after[AIR_NAME], prepare_again=False) == (await node.devices())[AIR_NAME]


async def test_a_device_that_is_closed_while_it_is_read_has_unknown_health(node):
    device = (await node.devices())[AIR_NAME]
    node.unplug(AIR)
    # The node plugin reports an error of `health` as unknown.
    with pytest.raises(OSError, match="No such file"):
        await asyncio.wait_for(node.driver.health(device), 5)


def test_the_driver_has_at_most_60_lines():
    assert len(SOURCE.splitlines()) <= 60
