"""A driver's class in a process of its own behaves as in the node plugin."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from drakit.device import (
    AllocatedClaim,
    AllocatedDevice,
    Capacity,
    CapacityRange,
    ClaimConfig,
    ClaimConsumer,
    ClaimData,
    ClaimOwner,
    ClaimReference,
    Condition,
    CounterSet,
    Device,
    DeviceNode,
    Edits,
    Health,
    Hook,
    IntelRdt,
    Inventory,
    Mount,
    NetDevice,
    NetworkData,
    NodeAllocatableResource,
    OtherDevice,
    PreparedDevice,
    Taint,
    Topology,
    Version,
)
from drakit_driver.messages import (
    UnsendableError,
    claims_of,
    device_message,
    edits_message,
    prepared_message,
)
from drakit_driver.runtime.contract import DeviceKey, HealthReport
from drakit_driver.runtime.failures import DeviceFailedError, EndpointStoppedError
from drakit_driver.sockets import ServerSocket, socket_identity
from drakit_nodeplugin.endpoints.backend.claimcalls import claim_message
from drakit_nodeplugin.endpoints.backend.convert import device_of, edits_of, prepared_of
from drakit_proto.backend.v1 import backend_pb2 as pb
from tests.unit.driverprocess.conftest import loaded, serving
from tests.unit.driverprocess.lamps import LAMPS, Behaviour, Lamps
from tests.unit.endpoints.backend.conftest import Listener, call, call_both, new_endpoint
from tests.unit.endpoints.camera import NODE, running, until

CLAIM = ClaimReference(namespace="lab", name="desk", uid="uid-a")
OTHER = ClaimReference(namespace="lab", name="hot", uid="uid-b")
LAMP = AllocatedDevice(name="lamp-0", pool=NODE, request="main")
ROOF = AllocatedDevice(name="lamp-1", pool=f"{NODE}/roof", request="main")


@pytest.fixture
async def behaviour(monkeypatch):
    behaviour = Behaviour()
    monkeypatch.setattr(Lamps, "behaviour", behaviour, raising=False)
    return behaviour


@pytest.fixture
async def server(behaviour, sockets):
    async with serving(*loaded(Lamps, {"watts": 7}), sockets / "driver.sock") as server:
        yield server


@pytest.fixture
async def served(server, endpoint, listener):
    await names(listener)
    return endpoint


async def inventory(listener: Listener) -> Inventory:
    """Wait for the next inventory."""
    while not isinstance(heard := await listener.hear(), Inventory):
        pass
    return heard


async def names(listener: Listener) -> list[str]:
    """Wait for the next inventory, and return the names of its devices."""
    return [device.name for device in (await inventory(listener)).devices]


def colored(device: AllocatedDevice, color: str) -> AllocatedDevice:
    return replace(device, configs=({"color": color},))


async def test_devices_and_their_changes_reach_the_node_plugin(
    server, behaviour, endpoint, listener
):
    assert await names(listener) == ["lamp-0", "lamp-1"]
    behaviour.listed = Inventory(
        devices=(*LAMPS, Device(name="lamp-2")),
        counter_sets=(CounterSet(name="fuse", counters={"watts": "10"}),),
        fallback=LAMPS[:1],
        ordered=True,
        partition_type_attribute="lamps.example.com/size",
    )
    assert await inventory(listener) == behaviour.listed


async def test_the_polled_health_of_all_devices_reaches_the_node_plugin(served, listener):
    health: dict[DeviceKey, Health] = {}
    while len(health) < 2:
        if isinstance(heard := await listener.hear(), HealthReport):
            health.update(heard.devices)
    assert health == {
        DeviceKey("", "lamp-0"): Health.healthy(),
        DeviceKey("roof", "lamp-1"): Health.unhealthy("no light"),
    }


async def test_each_claim_has_its_own_result(served, behaviour):
    good, bad = await call_both(
        served.prepare, (CLAIM, colored(LAMP, "red")), (OTHER, colored(ROOF, "black"))
    )
    assert [dict(each.edits.env) for each in good] == [{"GPU_LAMP": "lamp-0 red 7"}]
    assert isinstance(bad, DeviceFailedError)
    assert "lamp lamp-1 cannot be black; choose another color" in str(bad)
    assert sorted(behaviour.calls) == [("prepare", "desk", "lamp-0"), ("prepare", "hot", "lamp-1")]


async def test_an_error_names_its_device_and_a_pending_release_is_pending(served):
    results = await call_both(served.prepare, (CLAIM, LAMP, colored(ROOF, "black")))
    assert isinstance(results[0], DeviceFailedError)
    assert (str(results[0]), results[0].index) == (
        "lamp lamp-1 cannot be black; choose another color",
        1,
    )
    (bug,) = await call_both(served.prepare, (CLAIM, colored(LAMP, "bug")))
    assert (str(bug), bug.index) == (
        "driver gpu.example.com failed in prepare: KeyError: 'lamp-0'",
        0,
    )
    (invalid,) = await call_both(served.prepare, (CLAIM, replace(LAMP, configs=({"size": 1},))))
    assert str(invalid).startswith("the opaque parameters for driver gpu.example.com are invalid:")
    (hot,) = await call_both(served.unprepare, (OTHER, LAMP))
    assert (str(hot), hot.pending, hot.index) == ("lamp lamp-0 cools down", True, 0)


async def test_unprepare_resets_and_check_answers(served, behaviour):
    assert await call_both(served.unprepare, (CLAIM, LAMP)) == [None]
    assert behaviour.calls == [("unprepare", "desk", "lamp-0"), ("reset", "", "lamp-0")]
    assert await call_both(served.check, (CLAIM, LAMP), (OTHER, ROOF)) == [True, False]


async def test_a_driver_that_raises_is_stopped_with_its_reason_and_restarted(
    served, behaviour, listener
):
    behaviour.failure = OSError("the bus is gone")
    while not isinstance(heard := await listener.hear(), str):
        pass
    assert "OSError: the bus is gone" in heard
    assert await names(listener) == ["lamp-0", "lamp-1"]
    assert behaviour.made == 2
    assert [dict(each.edits.env) for each in await call(served.prepare, CLAIM, [LAMP])]


async def test_calls_for_one_device_do_not_overlap_if_a_caller_no_longer_waits(served, behaviour):
    running, most, ends = 0, 0, []

    async def during(what: str) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1
        ends.append(what)

    behaviour.during = during
    lost = asyncio.create_task(call(served.prepare, CLAIM, [LAMP]))
    await until(lambda: running == 1)
    # The next node plugin does not know that the call of the previous one continues.
    await served.connection.close()
    await asyncio.wait({lost})
    await until(lambda: served.unavailable() is None)
    await call(served.unprepare, CLAIM, [LAMP])
    assert (most, ends) == (1, ["prepare", "unprepare", "reset"])


async def test_two_node_plugins_are_served_at_once_and_their_calls_do_not_overlap(
    served, behaviour, found
):
    running_now, most = 0, 0

    async def during(what: str) -> None:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0.05)
        running_now -= 1

    behaviour.during = during
    listener = Listener()
    async with running(new_endpoint(found, listener)) as other:
        assert await names(listener) == ["lamp-0", "lamp-1"]
        one, two = await asyncio.gather(
            call(served.prepare, CLAIM, [LAMP]), call(other.prepare, CLAIM, [LAMP])
        )
        assert one == two
        assert most == 1
        behaviour.listed = Inventory(devices=LAMPS[:1])
        assert await names(listener) == ["lamp-0"]
    assert served.unavailable() is None


async def test_a_stop_waits_for_calls_in_flight_and_removes_the_socket(
    server, served, behaviour, sockets
):
    async def during(what: str) -> None:
        await asyncio.sleep(0.2)

    behaviour.during = during
    prepared = asyncio.create_task(call(served.prepare, CLAIM, [LAMP]))
    await until(lambda: behaviour.calls)
    await server.drain()
    await server.stop()
    assert [dict(each.edits.env) for each in await prepared] == [{"GPU_LAMP": "lamp-0 white 7"}]
    assert list(sockets.iterdir()) == []
    assert behaviour.closed == 1
    assert isinstance(served.unavailable(), EndpointStoppedError)


async def test_a_second_instance_takes_the_path_and_the_first_leaves_it(server, behaviour, sockets):
    path = sockets / "driver.sock"
    first = path.stat().st_ino
    async with serving(*loaded(Lamps), path):
        assert path.stat().st_ino != first
        await server.drain()
        assert path.exists()
        assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert list(sockets.iterdir()) == []


def test_an_instance_that_is_replaced_while_it_stops_leaves_the_new_socket(sockets, monkeypatch):
    path = sockets / "driver.sock"
    instances = [ServerSocket(path) for _ in range(2)]
    listeners = [socket.socket(socket.AF_UNIX) for _ in instances]
    try:
        for instance, listener in zip(instances, listeners, strict=True):
            listener.bind(str(instance.hidden))
        first, second = instances
        first.publish()
        own = path.lstat().st_ino

        def replaced(_: Path) -> tuple[int, ...] | None:
            """The second instance comes after the first one has read what is there."""
            monkeypatch.undo()
            found = socket_identity(path)
            second.publish()
            return found

        monkeypatch.setattr("drakit_driver.sockets.socket_identity", replaced)
        first.remove()
        assert [each.name for each in sockets.iterdir()] == [path.name]
        assert path.lstat().st_ino != own
        second.remove()
        assert list(sockets.iterdir()) == []
    finally:
        for listener in listeners:
            listener.close()


# ---------------------------------------------------------------- messages


DEVICES = [
    Device(
        name="all",
        pool="roof",
        attributes={
            "text": "a",
            "int": 1,
            "flag": True,
            "version": Version("1.0.0"),
            "texts": ("a", "b"),
            "ints": (1, 2),
            "flags": (True, False),
            "versions": (Version("1.0.0"),),
        },
        capacity={
            "plain": "1Gi",
            "values": Capacity(value="4", default="1", valid_values=("1", "2")),
            "range": Capacity(
                value="4", default="1", valid_range=CapacityRange(min="1", max="4", step="1")
            ),
        },
        topology=Topology(numa_node=0, pcie_root="pci0000:00", pci_bus_id="0000:01:00.0"),
        consumes={"fuse": {"watts": "5"}},
        allow_multiple_allocations=True,
        taints=(Taint(key="a.example.com/b", value="c", effect="NoExecute"),),
        health=Health.unhealthy("no light", evict_pods=True),
        evict_if_gone=True,
        prepare_again=True,
    ),
    Device(name="numa", topology=Topology(numa_node=0)),
    Device(
        name="newer",
        consumes={"card": {"slots": "1"}},
        compatibility_groups={"card": ("mig", "vgpu")},
        binding_conditions=("x.y/attached", "Ready"),
        binding_failure_conditions=("x.y/failed",),
        binds_to_node=True,
        node_allocatable_resources={
            "cpu": NodeAllocatableResource(device_multiplier="8"),
            "memory": NodeAllocatableResource(
                capacity_key="m",
                capacity_multiplier="1",
                overhead_per_pod="1Gi",
                overhead_per_container="1Mi",
            ),
        },
        extra={"newField": [1, {"a": True, "é": 1.5}]},
    ),
    Device(name="plain"),
]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_a_device_is_the_same_on_the_other_side(device):
    assert device_of(pb.Device.FromString(device_message(device).SerializeToString())) == device


def test_edits_are_the_same_on_the_other_side():
    edits = Edits(
        env={"A": "b"},
        device_nodes=(
            DeviceNode(
                path="/dev/a",
                host_path="/dev/b",
                type="c",
                major=1,
                minor=0,
                permissions="r",
                file_mode=0o600,
                uid=0,
                gid=0,
                identity="x",
            ),
            DeviceNode(path="/dev/c"),
        ),
        mounts=(Mount(host_path="/a", container_path="/b", options=("rw",), type="tmpfs"),),
        hooks=(
            Hook(name="prestart", path="/a", args=("a", "b"), env={"A": "b"}, timeout_seconds=0),
        ),
        net_devices=(NetDevice(host_interface_name="eth1", name="net"),),
        additional_gids=(44,),
        intel_rdt=IntelRdt(clos_id="a", schemata=("L3:0=f",), enable_monitoring=True),
        cdi_devices=("vendor.example/class=name",),
    )
    assert edits_of(pb.Edits.FromString(edits_message(edits).SerializeToString())) == edits


def test_what_others_can_read_is_the_same_on_the_other_side():
    bare = PreparedDevice(edits=Edits(env={"A": "b"}))
    full = PreparedDevice(
        conditions=(Condition(type="Ready", status="True", reason="Lit", message="It is lit."),),
        data={"watts": 5, "colors": ["red"]},
        network_data=NetworkData(
            interface_name="net1", ips=("192.0.2.5/24",), hardware_address="00:00:5e:00:53:01"
        ),
        attributes={"vendor": "x", "lanes": 4, "fast": True},
    )
    message = prepared_message("uid-1", [bare, full])
    sent = pb.PreparedClaim.FromString(message.SerializeToString())
    assert [
        prepared_of(edits_of(edits), device)
        for edits, device in zip(sent.edits, sent.devices, strict=True)
    ] == [bare, full]
    assert not prepared_message("uid-1", [bare, bare]).devices


def test_a_claim_is_the_same_on_the_other_side():
    share = replace(
        LAMP,
        pool="",
        share_id="a-b",
        admin_access=True,
        consumed_capacity={"watts": "5"},
        configs=({"a": 1}, {"b": {"c": [None, True]}}),
    )
    claim = AllocatedClaim(claim=CLAIM, devices=(share, ROOF))
    assert claims_of([claim_message(claim)]) == [claim]


def test_the_rest_of_a_claim_is_the_same_on_the_other_side():
    data = ClaimData(
        labels={"team": "vision"},
        annotations={"note": "\u00e9"},
        owners=(ClaimOwner(api_version="v1", kind="Pod", name="p", uid="u", controller=True),),
        reserved_for=(
            ClaimConsumer(resource="pods", name="p", uid="u"),
            ClaimConsumer(api_group="batch.example.com", resource="trains", name="t", uid="v"),
        ),
        configs=(
            ClaimConfig(source="FromClass", parameters={"color": "red"}),
            ClaimConfig(source="FromClaim", requests=("main",), parameters={"a": [None]}),
        ),
        other_devices=(
            OtherDevice(driver="nic", pool="f", name="nic-0", request="r"),
            OtherDevice(
                driver="nic",
                pool="f",
                name="nic-1",
                request="r",
                share_id="s",
                admin_access=True,
                consumed_capacity={"bandwidth": "1G"},
            ),
        ),
    )
    devices = tuple(replace(device, claim_data=data) for device in (LAMP, ROOF))
    claim = AllocatedClaim(claim=CLAIM, devices=devices)
    (found,) = claims_of([claim_message(claim, {})])
    assert [device.claim_data for device in found.devices] == [data, data]
    (without,) = claims_of([claim_message(claim)])
    assert [device.claim_data for device in without.devices] == [None, None]


@pytest.mark.parametrize("trait", ["claim_data", "metadata_files"])
async def test_a_driver_that_needs_more_asks_for_it(
    behaviour, sockets, endpoint, listener, monkeypatch, trait
):
    monkeypatch.setattr(Lamps, trait, True)
    async with serving(*loaded(Lamps), sockets / "driver.sock"):
        await names(listener)
        assert getattr(endpoint.traits, trait)


@pytest.mark.parametrize(
    "values",
    [
        {"attributes": {"a": 1.5}},
        {"capacity": {"a": 3}},
        {"taints": (None,)},
        {"binding_conditions": "letters"},
        {"compatibility_groups": {"card": "letters"}},
        {"node_allocatable_resources": {"cpu": "8"}},
        {"extra": {"a": object()}},
    ],
    ids=lambda values: next(iter(values)),
)
def test_a_value_of_a_wrong_type_is_an_error_of_its_device(values):
    with pytest.raises(UnsendableError, match="wrong type"):
        device_message(replace(Device(name="a"), **values))


async def test_a_device_with_a_wrong_type_does_not_affect_the_others(served, behaviour, listener):
    bad = Device(name="lamp-1", pool="roof", attributes={"watts": 40.5}, evict_if_gone=True)
    behaviour.listed = Inventory(devices=(bad, *LAMPS[:1]))
    listed = await inventory(listener)
    assert [each.name for each in listed.devices] == ["lamp-0"]
    assert listed.withdrawn == ("roof/lamp-1",)
    (rejected,) = listed.rejected
    assert (rejected.device, rejected.reason) == ("roof/lamp-1", "Invalid")
    assert rejected.message.startswith("attribute 'watts' is of type float, which is neither text")


def test_an_attribute_without_a_value_does_not_affect_the_claims_of_its_device():
    """A backend can list it so after the device was allocated: the device is refused."""
    listed = device_of(
        pb.Device(name="lamp-0", attributes={"good": pb.Attribute(int=5), "bad": pb.Attribute()})
    )
    item = AllocatedClaim(claim=CLAIM, devices=(replace(LAMP, pool=""),))
    message = claim_message(item, {DeviceKey("", "lamp-0"): listed})
    assert message.devices[0].attributes["good"].int == 5
