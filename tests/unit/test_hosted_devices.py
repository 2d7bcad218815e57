"""The path of a driver's devices from the checkpoint to the manager, and from there to users."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from drakit import Device, Inventory
from drakit_nodeplugin.config import NodePluginConfig
from drakit_nodeplugin.devices.hardware import HeldDevice
from drakit_nodeplugin.endpoints.contract import DriverTraits
from drakit_nodeplugin.endpoints.policies import PolicyFeed
from drakit_nodeplugin.file_poller import FileWatch
from drakit_nodeplugin.host.driver_devices import HostedDevices
from drakit_nodeplugin.host.node import Environment, NodeEvents, PluginNode
from drakit_nodeplugin.kubelet.podresources import PodResources
from drakit_nodeplugin.metrics import Metrics
from drakit_nodeplugin.slices.contents import StoredSlice
from tests.fakes.file_poller import AlwaysDue

DRIVER, NODE = "camera.example.com", "node-1"


class Rows:
    """The checkpoint, as far as devices are concerned."""

    def __init__(self) -> None:
        self.unpreparing: tuple[str, ...] = ()
        self.endpoints_stored: dict = {}

    async def held_beside_unpreparing(self):
        return [
            HeldDevice(pool=NODE, device=name, consumes={}, unpreparing=True)
            for name in self.unpreparing
        ]

    def watch(self):
        return FileWatch(Path("/nowhere/checkpoint.db"), settled_seconds=10)

    async def held_devices(self):
        return {NODE: frozenset({"cam-0", "cam-1"}), "no-such-pool": frozenset({"x"})}

    async def devices_in_use(self):
        return {}

    async def endpoints(self):
        return list(self.endpoints_stored.values())

    async def write_endpoints(self, endpoints):
        self.endpoints_stored.update({endpoint.name: endpoint for endpoint in endpoints})

    async def forget_endpoints(self, names):
        for name in names:
            self.endpoints_stored.pop(name, None)


def hosted(
    rows: Rows,
    metrics: Metrics | None = None,
    *,
    health: bool = False,
    policies: PolicyFeed | None = None,
) -> HostedDevices:
    session = asyncio.get_running_loop().create_future()
    config = NodePluginConfig.model_validate({"drivers": [{"driver": "cameras"}]})
    metrics = metrics or Metrics()
    environment = Environment(
        config=config,
        node=PluginNode(NODE),
        boot_id="boot-1",
        instance_uid="uid",
        session=session,
        podresources=PodResources(config.podresources, own_pod=None),
        metrics=metrics,
        file_poller=AlwaysDue(),
    )
    return HostedDevices(
        DRIVER,
        traits=DriverTraits(health=health),
        checkpoint=rows,
        environment=environment,
        events=NodeEvents(NODE, session),
        metrics=metrics.for_driver(DRIVER),
        expected=(DRIVER,),
        primary=asyncio.Event(),
        registered=lambda: True,
        policies=policies,
    )


def gauge(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"driver": DRIVER})


def tainted(devices: HostedDevices) -> set[str]:
    return {
        device.name
        for pool in devices.manager.publication().pools.values()
        for device in pool.devices
        if any(taint.key == "drakit.dev/unpreparing" for taint in device.taints)
    }


async def test_a_driver_with_policies_learns_which_devices_claims_hold_before_it_starts():
    feed = PolicyFeed()
    await hosted(Rows(), policies=feed).restore()
    assert feed.held == {"cam-0", "cam-1", "x"}


@pytest.mark.looptime
async def test_a_device_whose_unprepare_does_not_end_is_tainted_until_it_does():
    rows = Rows()
    devices = hosted(rows)
    await devices.restore()
    devices.manager.replaced(
        DRIVER, Inventory(devices=(Device(name="cam-0"), Device(name="cam-1")))
    )
    watching = asyncio.create_task(devices.parts()["unpreparing"]())
    await asyncio.sleep(6)
    rows.unpreparing = ("cam-0",)
    await asyncio.sleep(5)
    assert tainted(devices) == set(), "a single check may have met a normal unprepare"
    await asyncio.sleep(5)
    assert tainted(devices) == {"cam-0"}
    rows.unpreparing = ()
    await asyncio.sleep(5)
    assert tainted(devices) == set()
    watching.cancel()


async def test_devices_that_an_earlier_process_began_to_unprepare_are_tainted_from_the_start():
    rows = Rows()
    rows.unpreparing = ("cam-0",)
    devices = hosted(rows)
    await devices.restore()
    devices.manager.replaced(
        DRIVER, Inventory(devices=(Device(name="cam-0"), Device(name="cam-1")))
    )
    assert tainted(devices) == {"cam-0"}


async def test_all_devices_that_are_left_out_are_counted_and_not_the_named_ones_alone():
    metrics = Metrics()
    devices = hosted(Rows(), metrics)
    bad = [Device(name=f"No_Name_{number}") for number in range(150)]
    devices.manager.replaced(DRIVER, Inventory(devices=bad))
    await devices.measure()
    assert gauge(metrics, "drakit_devices_left_out") == 150


async def test_devices_are_counted_by_state():
    metrics = Metrics()
    devices = hosted(Rows(), metrics)
    cameras = [Device(name=f"cam-{number}") for number in range(3)]
    devices.manager.replaced(DRIVER, Inventory(devices=cameras))
    await devices.measure()
    counts = {
        state: metrics.registry.get_sample_value(
            "drakit_devices", {"driver": DRIVER, "state": state}
        )
        for state in ("healthy", "unhealthy", "allocated")
    }
    assert counts == {"healthy": 3, "unhealthy": 0, "allocated": 2}


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        pytest.param(True, {"drakit.dev/unhealthy"}, id="that-knows-health-are-adopted"),
        pytest.param(False, set(), id="that-does-not-report-health-are-not"),
    ],
)
async def test_health_taints_of_a_driver(health: bool, expected: set[str]):
    devices = hosted(Rows(), health=health)
    taint = {"key": "drakit.dev/unhealthy", "effect": "NoSchedule"}
    spec = {"pool": {"name": NODE}, "devices": [{"name": "cam-0", "taints": [taint]}]}
    devices.adopt([StoredSlice.of({"spec": spec})])
    devices.manager.replaced(DRIVER, Inventory(devices=(Device(name="cam-0"),)))
    (device,) = devices.manager.publication().pools[NODE].devices
    assert {taint.key for taint in device.taints} == expected


async def test_an_event_that_cannot_be_written_does_not_end_the_others():
    written = []

    class Session:
        async def create(self, path, body, *, timeout_seconds=None):
            if "first" in body["note"]:
                raise ValueError("not of the API server")
            written.append(body["note"])

    session = asyncio.get_running_loop().create_future()
    session.set_result(Session())
    events = NodeEvents(NODE, session)
    for note in ("the first", "device usb-\udcff is not published"):
        events.emit(reason="DeviceLeftOut", action="Publish", note=note)
    run = asyncio.create_task(events.run())
    async with asyncio.timeout(5):
        while not written:
            await asyncio.sleep(0.001)
    run.cancel()
    assert written == ["device usb-\\udcff is not published"]
