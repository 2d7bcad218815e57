"""A driver as a device plugin, with the kubelet's side of it: two resources, and two devices."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from drakit import Device, Driver, DriverError, Edits, Health, PreparedDevice, Taint, Topology
from drakit_driver import device_plugin
from drakit_driver.device_plugin import DevicePluginServer
from drakit_driver.plugin_devices import DevicePluginOptions, resource_of, socket_path
from drakit_driver.runtime import endpoint
from drakit_driver.runtime.contract import traits_of
from drakit_driver.runtime.loading import LoadedDriver
from tests.fakes.devicemanager import FakeDeviceManager
from tests.fakes.node import StaticNode
from tests.unit.endpoints.camera import until
from tests.unit.endpoints.deviceplugin.conftest import THING, directory, short_delays, world

__all__ = ("directory", "short_delays", "world")

LAMP, TORCH = "lamps.example.com/lamp", "lamps.example.com/torch"


class Lamps(Driver):
    """A driver that the test controls: `listed`, `end`, `work`."""

    name = "lamps.example.com"
    side_effects = False
    reports_health = True
    listed: list[Device]
    changed: asyncio.Event
    runs = 0
    prepared: list[str]

    async def devices(self):
        kind = type(self)
        kind.runs += 1
        kind.loop = asyncio.get_running_loop()
        kind.changed = asyncio.Event()
        while True:
            listed = kind.listed
            if isinstance(listed, Exception):
                raise listed
            yield listed
            await kind.changed.wait()
            kind.changed.clear()

    async def prepare(self, claim, device):
        type(self).prepared.append(str(claim))
        return await type(self).work(device)


@pytest.fixture
def lamps() -> type[Lamps]:
    """A driver with a lamp and a torch."""

    class Mine(Lamps):
        @staticmethod
        async def work(device):
            edits = Edits(env={f"LAMP_{device.request}_{device.name}": "on"})
            return PreparedDevice(edits=edits, data={"level": 7})

    Mine.listed = [
        Device(name="desk", attributes={"kind": "lamp"}, topology=Topology(numa_node=1)),
        Device(name="pocket", attributes={"kind": "torch"}),
    ]
    Mine.prepared = []
    return Mine


def change(lamps: Any, listed: Any) -> None:
    lamps.listed = listed
    lamps.loop.call_soon_threadsafe(lamps.changed.set)


BOTH = (f"{LAMP}:kind=lamp", f"{TORCH}:kind=torch")


@asynccontextmanager
async def served(
    driver: type[Driver], directory: Path, *resources: str, config: Any = None, **options: Any
) -> AsyncIterator[DevicePluginServer]:
    """The driver, served to the kubelet of this directory."""
    given = config if config is not None else driver.config_type()
    loaded = LoadedDriver(
        name=driver.name,
        make=lambda: driver(given, StaticNode(name="node-1")),
        traits=traits_of(driver),
        where="--driver",
    )
    chosen = DevicePluginOptions(
        resources=tuple(resource_of(each) for each in resources), directory=directory, **options
    )
    server = DevicePluginServer(loaded, node="node-1", options=chosen)
    await server.start()
    task = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        task.cancel()
        await asyncio.wait({task})
        await server.stop()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("POLL", 0.05), ("WATCH", 0.3), ("LIST", 0.01), ("STOP", 0.1)):
        monkeypatch.setattr(device_plugin, f"{name}_SECONDS", seconds)
    monkeypatch.setattr(device_plugin, "RETRY_SECONDS", (0.05, 0.1))
    monkeypatch.setattr(endpoint, "RECONNECT_SECONDS", (0.3, 0.3))


@pytest.fixture
async def kubelet(lamps, tmp_path, fast) -> AsyncIterator[FakeDeviceManager]:
    """The kubelet's side of the driver, whose devices it knows."""
    async with FakeDeviceManager(tmp_path) as kubelet, served(lamps, tmp_path, LAMP):
        await until(lambda: kubelet.health(LAMP))
        yield kubelet


async def test_each_resource_has_its_devices_and_their_numa_nodes(lamps, tmp_path):
    async with served(lamps, tmp_path, *BOTH) as server, FakeDeviceManager(tmp_path) as kubelet:
        assert server.unready() is not None
        await until(lambda: kubelet.health(LAMP) and kubelet.health(TORCH))
        await until(lambda: server.unready() is None)
        assert kubelet.health(LAMP) == {"desk": "Healthy"}
        assert kubelet.health(TORCH) == {"pocket": "Healthy"}
        (desk,) = kubelet.last[LAMP].devices
        assert [node.ID for node in desk.topology.nodes] == [1]
        assert not kubelet.last[TORCH].devices[0].HasField("topology")
        assert {each.endpoint for each in kubelet.registrations} == {
            "lamps.example.com_lamp.sock",
            "lamps.example.com_torch.sock",
        }
        assert not any(each.options.pre_start_required for each in kubelet.registrations)


async def test_a_container_gets_the_edits_of_prepare(lamps, kubelet):
    assert list(kubelet.health(LAMP)) == ["desk", "pocket"]
    answer = await kubelet.allocate(LAMP, "pocket", "desk")
    assert dict(answer.envs) == {"LAMP_lamp_desk": "on", "LAMP_lamp_pocket": "on"}
    assert sorted(lamps.prepared) == ["device-plugin/desk", "device-plugin/pocket"]
    assert await kubelet.prefer(LAMP, "pocket", "desk", size=1) == ["desk"]


@pytest.mark.parametrize(
    ("work", "problem"),
    [
        pytest.param(DriverError("the bulb is missing"), "the bulb is missing", id="refused"),
        pytest.param(KeyError("bulb"), "failed in prepare: KeyError: 'bulb'", id="a-bug"),
        pytest.param(Edits(additional_gids=(1,)), "supplementary groups", id="not-for-plugins"),
    ],
)
async def test_a_failed_prepare_is_the_text_of_the_failed_pod(lamps, kubelet, work, problem):
    async def fail(device):
        if device.name == "desk":
            if isinstance(work, Exception):
                raise work
            return work
        return Edits()

    lamps.work = fail
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await kubelet.allocate(LAMP, "pocket", "desk")
    assert problem in raised.value.details()
    assert "desk" in raised.value.details()
    await kubelet.allocate(LAMP, "pocket")
    with pytest.raises(grpc.aio.AioRpcError, match="no longer lists device 'cellar'"):
        await kubelet.allocate(LAMP, "cellar")


async def test_a_prepare_that_takes_too_long_fails_the_pod_and_delays_the_next_one(
    lamps, kubelet, monkeypatch
):
    monkeypatch.setattr(device_plugin, "ALLOCATE_SECONDS", 0.3)
    order: list[str] = []

    async def hang(device):
        lamps.work = quick
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)  # it cleans up
            order.append("cleaned up")

    async def quick(device):
        order.append("prepared")
        return Edits()

    lamps.work = hang
    with pytest.raises(grpc.aio.AioRpcError, match="did not prepare the devices within 0 s"):
        await kubelet.allocate(LAMP, "desk")
    monkeypatch.setattr(device_plugin, "ALLOCATE_SECONDS", 5)
    await kubelet.allocate(LAMP, "desk")
    assert order == ["cleaned up", "prepared"]


async def test_health_taints_and_changes_of_the_devices_reach_the_kubelet(lamps, kubelet):
    change(
        lamps,
        [
            Device(name="desk", health=Health.unhealthy("it flickers")),
            Device(name="floor", taints=(Taint(key="l.example/x", effect="NoSchedule"),)),
            Device(name="wall", taints=(Taint(key="l.example/x", effect="None"),)),
        ],
    )
    await until(
        lambda: (
            kubelet.health(LAMP) == {"desk": "Unhealthy", "floor": "Unhealthy", "wall": "Healthy"}
        )
    )
    change(lamps, [Device(name="desk", health=Health.unknown()), Device(name="wall")])
    await until(lambda: kubelet.health(LAMP) == {"desk": "Unhealthy", "wall": "Healthy"})
    change(lamps, [Device(name="desk", health=Health.healthy())])
    await until(lambda: kubelet.health(LAMP) == {"desk": "Healthy"})


async def test_a_driver_that_ends_makes_its_devices_unhealthy_until_it_lists_them_again(
    lamps, kubelet
):
    listed = lamps.listed
    change(lamps, RuntimeError("the bus is gone"))
    await until(lambda: set(kubelet.health(LAMP).values()) == {"Unhealthy"})
    with pytest.raises(grpc.aio.AioRpcError, match="is unavailable: RuntimeError: the bus is gone"):
        await kubelet.allocate(LAMP, "desk")
    lamps.listed = listed
    await until(lambda: kubelet.health(LAMP) == {"desk": "Healthy", "pocket": "Healthy"})
    assert lamps.runs >= 2
    assert len(kubelet.registrations) == 1, "the stream goes on"


async def test_the_node_plugin_hosts_it_like_any_other_device_plugin(lamps, world, directory):
    async with served(lamps, directory, THING):
        await world.until_listed("desk", "pocket")
        assert world.reports[THING][-1].devices[0].topology == Topology(numa_node=1)
        (desk,) = await world.prepare("desk")
        assert desk.env == {"LAMP_thing_desk": "on"}
        change(lamps, [Device(name="desk", health=Health.unhealthy("it flickers"))])
        await until(lambda: world.health() == {"desk": "unhealthy"})


# ------------------------------------------------------------ registration


async def test_after_a_restart_of_the_kubelet_both_resources_are_registered_again(lamps, tmp_path):
    async with served(lamps, tmp_path, *BOTH):
        async with FakeDeviceManager(tmp_path) as kubelet:
            await until(lambda: kubelet.health(LAMP) and kubelet.health(TORCH))
        async with FakeDeviceManager(tmp_path) as kubelet:
            await until(lambda: kubelet.health(LAMP) and kubelet.health(TORCH))
            await asyncio.sleep(0.5)
            assert len(kubelet.registrations) == 2, "once each"
            assert (await kubelet.allocate(TORCH, "pocket")).envs
    assert not list(tmp_path.glob("lamps*")), "the sockets are removed at the end"


async def test_a_kubelet_that_returns_after_a_crash_need_not_wait_for_the_backoff(
    lamps, tmp_path, monkeypatch
):
    monkeypatch.setattr(device_plugin, "RETRY_SECONDS", (60, 60))
    async with served(lamps, tmp_path, LAMP):
        async with FakeDeviceManager(tmp_path) as kubelet:
            await until(lambda: kubelet.health(LAMP))
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(tmp_path / "kubelet.sock"))  # nobody removes it
        await asyncio.sleep(0.5)
        async with FakeDeviceManager(tmp_path) as kubelet:
            await until(lambda: kubelet.health(LAMP))


async def test_a_driver_without_prepare_gives_the_edits_of_its_devices(tmp_path):
    class Static(Driver):
        name = "static.example.com"
        side_effects = False

        async def devices(self):
            yield [Device(name="a", edits=Edits.of_device_nodes("/dev/null")), Device(name="b")]
            await asyncio.Event().wait()

    async with FakeDeviceManager(tmp_path) as kubelet, served(Static, tmp_path, LAMP):
        await until(lambda: kubelet.health(LAMP))
        (node,) = (await kubelet.allocate(LAMP, "a")).devices
        assert (node.host_path, node.permissions) == ("/dev/null", "rwm")
        assert not (await kubelet.allocate(LAMP, "b")).devices


async def test_a_refused_registration_and_an_ended_stream_are_repeated(lamps, tmp_path):
    async with FakeDeviceManager(tmp_path) as kubelet, served(lamps, tmp_path, LAMP):
        kubelet.refuse = True
        await asyncio.sleep(0.3)
        kubelet.refuse = False
        await until(lambda: kubelet.health(LAMP))
        before = len(kubelet.registrations)
        kubelet.drop(LAMP)
        await until(lambda: len(kubelet.registrations) > before)
        await until(lambda: kubelet.health(LAMP) == {"desk": "Healthy", "pocket": "Healthy"})


async def test_the_next_pod_of_an_update_takes_over_and_the_old_one_waits(lamps, kubelet, tmp_path):
    async with served(lamps, tmp_path, LAMP):
        await until(lambda: len(kubelet.registrations) == 2)
        await asyncio.sleep(0.6)
        assert len(kubelet.registrations) == 2, "they do not take turns"
    await until(lambda: len(kubelet.registrations) == 3)
    assert (await kubelet.allocate(LAMP, "desk")).envs


def test_a_socket_has_a_shorter_name_if_the_path_would_be_too_long(tmp_path):
    long = f"{'a' * 60}.example.com/{'b' * 60}"
    path = socket_path(Path("/var/lib/kubelet/device-plugins"), long)
    assert path is not None
    assert len(str(path)) < 60
    assert socket_path(Path("/" + "x" * 100), long) is None
