"""Device plugins under an allow list: the permitted ones, and the responses that fail."""

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

from drakit_driver.runtime.failures import DeviceFailedError
from drakit_nodeplugin.endpoints.deviceplugin.plugin_connection import PluginClient
from drakit_nodeplugin.endpoints.wire import Client
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from tests.fakes.deviceplugin import FakeDevicePlugin
from tests.unit.endpoints.camera import until
from tests.unit.endpoints.deviceplugin.conftest import OWN, THING, World, plugins_of

pytestmark = pytest.mark.usefixtures("short_delays")

OTHER = "vendor.example/other"
ENTRY = "devicePlugins.plugins.thing"


@asynccontextmanager
async def world_with(directory, **entries: Any) -> AsyncIterator[World]:
    """A world with these entries: `thing`, `other`."""
    world = World(directory)
    world.entries = plugins_of(**entries)
    (directory.parent / "dev").mkdir()
    async with world.running():
        yield world


# ------------------------------------------------------------ registration


@pytest.mark.parametrize(
    ("entries", "remedy"),
    [
        pytest.param({}, "add it to resources, or remove the program", id="of-no-entry"),
        pytest.param({"other": OWN}, "its directory is PARENT/other", id="of-another-entry"),
    ],
)
async def test_a_resource_that_the_entry_of_the_directory_does_not_list_is_refused(
    directory, entries, remedy
):
    async with world_with(directory, thing=OWN, **entries) as world:
        thief = FakeDevicePlugin(directory, resource=OTHER)
        await thief.start()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await thief.register()
        if entries:
            # Its own device plugin is unaffected, and registers at a kubelet.sock of its own.
            own = FakeDevicePlugin(directory.parent / "other", resource=OTHER, devices=["own"])
            async with own:
                await world.until_listed("own", resource=OTHER)
        await thief.stop()
        assert thief.streams == 0
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    details = str(caught.value.details())
    assert details.replace(str(directory.parent), "PARENT") == (
        f"the device plugin of {OTHER} is refused: {ENTRY} does not list this resource; {remedy}"
    )
    assert [(each.reason, each.note) for each in world.diagnostics] == [
        ("RegistrationRefused", details)
    ]


async def test_a_plugin_cannot_name_a_socket_of_another_directory(directory):
    async with world_with(directory, thing=OWN, other=OWN) as world:
        other = FakeDevicePlugin(directory.parent / "other", resource=OTHER)
        async with other:
            await world.until_listed("thing-0", "thing-1", resource=OTHER)
            (directory / "thing.sock").symlink_to(other.socket)
            thief = FakeDevicePlugin(directory)
            await thief.register()
            await asyncio.sleep(0.3)
            assert other.streams == 1
            assert THING not in world.reports
        (directory / "thing.sock").unlink()


async def test_a_link_in_the_directory_is_not_followed_by_the_registration_socket(directory):
    secret = directory.parent / "secret"
    secret.touch(mode=0o644)
    (directory / "kubelet.sock").symlink_to(secret)
    async with world_with(directory, thing=OWN) as world:
        await until((directory / "kubelet.sock").is_socket)
        async with FakeDevicePlugin(directory):
            await world.until_listed("thing-0", "thing-1")
    assert secret.stat().st_mode & 0o777 == 0o644


async def test_a_directory_that_was_replaced_is_served_again(directory):
    async with world_with(directory, thing=OWN) as world:
        directory.rename(directory.parent / "aside")
        directory.mkdir()
        await until((directory / "kubelet.sock").exists)
        async with FakeDevicePlugin(directory):
            await world.until_listed("thing-0", "thing-1")


async def test_a_socket_of_another_owner_is_not_called(directory):
    other = {"owner": {"uid": os.getuid() + 1}}
    async with world_with(directory, thing=other, other=OWN) as world:
        async with FakeDevicePlugin(directory) as plugin:
            await until(lambda: world.diagnostics)
            async with FakeDevicePlugin(directory.parent / "other", resource=OTHER):
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


async def test_a_socket_that_is_replaced_while_it_is_connected_to_is_not_mixed_up(
    directory, monkeypatch
):
    """The connection stays with the file whose owner was checked."""
    other = FakeDevicePlugin(directory, endpoint="other.sock", devices=["of-the-other"])

    def replace(socket: Path) -> None:
        socket.rename(directory / "aside")
        other.socket.rename(socket)

    async def read_options(plugin: PluginClient, client: Client) -> None:
        if not replaced:
            replaced.append(plugin.registration.socket)
            await asyncio.to_thread(replace, plugin.registration.socket)
        await usual(plugin, client)

    replaced: list[Path] = []
    usual = PluginClient._read_options
    monkeypatch.setattr(PluginClient, "_read_options", read_options)
    async with world_with(directory, thing=OWN) as world:
        await other.start()
        async with FakeDevicePlugin(directory):
            await world.until_listed("thing-0", "thing-1")
            assert world.stops() == []
            assert other.streams == 0
        await other.stop()


# ------------------------------------------------------------ edits


def answers(**fields: Any):
    return lambda ids: pb.ContainerAllocateResponse(**{"envs": {"A": "b"}, **fields})


async def test_containers_get_the_edits_that_the_entry_lists(directory):
    entry = {
        **OWN,
        "devices": ["/dev/thing*"],
        "mounts": {"/opt/thing": "ro", "/run/thing": "rw"},
        "cdiDevices": ["vendor.example/thing"],
        "env": ["A"],
    }
    async with world_with(directory, thing=entry) as world:
        (directory.parent / "dev/thing").symlink_to("thing7")
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
            {"devices": [pb.DeviceSpec(container_path="/dev/x", host_path="/dev/thing-link")]},
            "device node /dev/sda",
            "devices",
            id="link-to-a-device-node",
        ),
        pytest.param(
            {"annotations": {"cdi.k8s.io/x": "vendor.example/card=a"}},
            "CDI device vendor.example/card=a",
            "cdiDevices",
            id="cdi-device",
        ),
    ],
)
async def test_an_answer_outside_the_entry_fails_its_claim_alone(directory, answer, what, setting):
    async with world_with(
        directory, thing={**OWN, "devices": ["/dev/thing*"], "env": ["A"]}
    ) as world:
        (directory.parent / "dev/thing-link").symlink_to("sda")
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
