"""The server of a driver's class in a process of its own; :mod:`tests.unit.homes` tests what it
passes on."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from drakit.device import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimReference,
    Device,
    Edits,
    Hook,
    Inventory,
    Mount,
)
from drakit_driver.messages import claims_of
from drakit_driver.runtime.backend import message_of, value_of
from drakit_driver.runtime.contract import DeviceKey
from drakit_driver.sockets import ServerSocket, socket_identity
from drakit_nodeplugin.endpoints.backend.claimcalls import claim_message
from drakit_proto.backend.v1 import backend_pb2 as pb
from tests.unit.driverprocess.conftest import loaded, serving
from tests.unit.endpoints.camera import NODE
from tests.unit.homes.homes import Script, Scripted

CLAIM = ClaimReference(namespace="lab", name="desk", uid="uid-a")
OTHER = ClaimReference(namespace="lab", name="hot", uid="uid-b")
LAMP = AllocatedDevice(name="lamp-0", pool=NODE, request="main")
ROOF = AllocatedDevice(name="lamp-1", pool=f"{NODE}/roof", request="main")


@pytest.fixture(autouse=True)
def script(monkeypatch) -> None:
    monkeypatch.setattr(Scripted, "script", Script(listed=Inventory(devices=())), raising=False)


async def test_a_second_instance_takes_the_path_and_the_first_leaves_it(sockets):
    path = sockets / "driver.sock"
    async with serving(*loaded(Scripted), path) as server:
        first = path.stat().st_ino
        async with serving(*loaded(Scripted), path):
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
            """The second instance starts after the first one has read the existing files."""
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


def test_edits_that_no_entry_permits_are_the_same_on_the_other_side():
    edits = Edits(
        mounts=(Mount(host_path="/a", container_path="/b", type="tmpfs"),),
        hooks=(Hook(name="prestart", path="/a", env={"A": "b"}, timeout_seconds=0),),
    )
    assert (
        value_of(pb.Edits.FromString(message_of(edits, pb.Edits).SerializeToString()), Edits)
        == edits
    )


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


@pytest.mark.parametrize("trait", ["claim_data", "metadata_files"])
async def test_a_driver_that_needs_more_asks_for_it(
    sockets, endpoint, listener, monkeypatch, trait
):
    monkeypatch.setattr(Scripted, trait, True)
    async with serving(*loaded(Scripted), sockets / "driver.sock"):
        await listener.names()
        assert getattr(endpoint.traits, trait)


def test_an_attribute_without_a_value_does_not_affect_the_claims_of_its_device():
    """A backend can list it so after the device was allocated: the device is refused."""
    listed = value_of(
        pb.Device(name="lamp-0", attributes={"good": pb.Attribute(int=5), "bad": pb.Attribute()}),
        Device,
    )
    item = AllocatedClaim(claim=CLAIM, devices=(replace(LAMP, pool=""),))
    message = claim_message(item, {DeviceKey("", "lamp-0"): listed})
    assert message.devices[0].attributes["good"].int == 5
