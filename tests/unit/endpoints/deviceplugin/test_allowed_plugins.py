"""Device plugins under an allow list: the permitted ones, and the answers that fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from drakit_nodeplugin.config import DevicePlugins
from drakit_nodeplugin.endpoints.deviceplugin.plugin_client import PluginClient
from drakit_nodeplugin.endpoints.failures import DeviceFailedError
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from tests.fakes.deviceplugin import FakeDevicePlugin
from tests.unit.endpoints.deviceplugin.conftest import THING, World, until

pytestmark = pytest.mark.usefixtures("short_delays")

OTHER = "vendor.example/other"
OWN = {"owner": {"uid": os.getuid()}}
ENTRY = f'devicePlugins.allowed["{THING}"]'


@asynccontextmanager
async def world_with(directory, **entries: Any) -> AsyncIterator[World]:
    """A world with a list of these entries: of `thing`, or `other`."""
    world = World(directory)
    named = {f"vendor.example/{name}": entry for name, entry in entries.items()}
    world.allowed = DevicePlugins.model_validate({"allowed": named}).allowed
    (directory / "dev").mkdir()
    async with world.running():
        yield world


# ------------------------------------------------------------ registration


@pytest.mark.parametrize("entries", [{}, {"other": OWN}], ids=["empty", "of-another"])
async def test_a_resource_that_is_not_on_the_list_is_refused(directory, entries):
    async with world_with(directory, **entries) as world:
        plugin = FakeDevicePlugin(directory)
        await plugin.start()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await plugin.register()
        await plugin.stop()
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert caught.value.details() == (
        f"the device plugin of {THING} is refused: devicePlugins.allowed has no entry for {THING}; "
        f"add one, or remove the program"
    )
    assert [(each.reason, each.note) for each in world.diagnostics] == [
        ("RegistrationRefused", caught.value.details())
    ]
    assert world.reports == {}


async def test_a_socket_of_another_owner_is_not_called(directory):
    other = {"owner": {"uid": os.getuid() + 1}}
    async with world_with(directory, thing=other, other=OWN) as world:
        async with FakeDevicePlugin(directory) as plugin:
            await until(lambda: world.diagnostics)
            async with FakeDevicePlugin(directory, resource=OTHER, endpoint="other.sock"):
                await world.until_listed("thing-0", "thing-1", resource=OTHER)
            assert plugin.streams == 0
        stop = await world.until_stopped()
    text = (
        f"its socket thing.sock belongs to user {os.getuid()} and group {os.getgid()}, not to user "
        f"{os.getuid() + 1}; change the socket's owner, or correct owner in {ENTRY}"
    )
    assert stop == f"it could not be started: {text}"
    assert [(each.reason, each.note) for each in world.diagnostics] == [
        ("RegistrationRefused", f"the device plugin of {THING} is refused: {text}")
    ]


async def test_a_plugin_on_the_list_may_listen_only_after_it_has_registered(directory):
    async with world_with(directory, thing=OWN) as world:
        plugin = FakeDevicePlugin(directory)
        await plugin.register()
        await plugin.start()
        await world.until_listed("thing-0", "thing-1")
        await plugin.stop()
    assert world.diagnostics == []


async def test_a_socket_that_is_replaced_while_it_is_connected_to_is_not_used(
    directory, monkeypatch
):
    replaced = []

    def replace(socket: Path) -> None:
        socket.rename(directory / "aside")
        (directory / "aside").rename(socket)

    async def ask_options(connection: PluginClient) -> None:
        if not replaced:
            replaced.append(connection.registration.socket)
            await asyncio.to_thread(replace, replaced[0])
        await usual(connection)

    usual = PluginClient._read_options
    monkeypatch.setattr(PluginClient, "_read_options", ask_options)
    async with world_with(directory, thing=OWN) as world, FakeDevicePlugin(directory):
        await world.until_listed("thing-0", "thing-1")
        assert world.stops() == [
            "it could not be started: its socket was replaced while the node plugin connected to it"
        ]


# ------------------------------------------------------------ edits


def answers(**fields: Any):
    return lambda ids: pb.ContainerAllocateResponse(envs={"A": "b"}, **fields)


async def test_containers_get_the_edits_that_the_entry_lists(directory):
    entry = {
        **OWN,
        "devices": ["/dev/thing*"],
        "mounts": {"/opt/thing": "ro", "/run/thing": "rw"},
        "cdiDevices": ["vendor.example/thing"],
    }
    async with world_with(directory, thing=entry) as world:
        (directory / "dev/thing").symlink_to("thing7")
        async with FakeDevicePlugin(directory) as plugin:
            await world.until_listed("thing-0", "thing-1")
            plugin.answer = answers(
                devices=[pb.DeviceSpec(container_path="/dev/x", host_path="/dev/thing")],
                mounts=[
                    pb.Mount(host_path="/opt/thing/lib", container_path="/a", read_only=True),
                    pb.Mount(host_path="/run/thing", container_path="/b"),
                ],
                cdi_devices=[pb.CDIDevice(name="vendor.example/thing=1")],
            )
            (edits,) = await world.prepare("thing-0")
    assert [(node.path, node.host_path) for node in edits.device_nodes] == [
        ("/dev/x", "/dev/thing7")
    ]
    assert [(mount.host_path, mount.options) for mount in edits.mounts] == [
        ("/opt/thing/lib", ("rbind", "rprivate", "rro")),
        ("/run/thing", ("rbind", "rprivate", "rw")),
    ]


@pytest.mark.parametrize(
    ("answer", "what", "setting"),
    [
        pytest.param(
            {"devices": [pb.DeviceSpec(container_path="/dev/thing", host_path="/dev/sda")]},
            "device node /dev/sda",
            "devices",
            id="device-node",
        ),
        pytest.param(
            {"devices": [pb.DeviceSpec(container_path="/dev/x", host_path="/dev/thing-link")]},
            "device node /dev/sda",
            "devices",
            id="link-to-a-device-node",
        ),
        pytest.param(
            {"mounts": [pb.Mount(host_path="/", container_path="/host", read_only=True)]},
            "a mount of /",
            "mounts",
            id="mount",
        ),
        pytest.param(
            {"annotations": {"cdi.k8s.io/x": "vendor.example/claim=a"}},
            "CDI device vendor.example/claim=a",
            "cdiDevices",
            id="cdi-device",
        ),
    ],
)
async def test_an_answer_outside_the_entry_fails_its_claim_alone(directory, answer, what, setting):
    async with world_with(directory, thing={**OWN, "devices": ["/dev/thing*"]}) as world:
        (directory / "dev/thing-link").symlink_to("sda")
        async with FakeDevicePlugin(directory) as plugin:
            await world.until_listed("thing-0", "thing-1")
            plugin.answer = lambda ids: answers(**(answer if ids == ["thing-1"] else {}))(ids)
            bad, good = await asyncio.gather(
                world.prepare("thing-1"), world.prepare("thing-0"), return_exceptions=True
            )
            assert world.stops() == []
    assert len(good) == 1
    assert isinstance(bad, DeviceFailedError)
    assert (str(bad), bad.index) == (
        f"the device plugin of {THING} asks for {what}, which is not allowed; to allow it, extend "
        f"{setting} in {ENTRY}",
        0,
    )
