"""
Vendors' processes: backends and device plugins whose own work costs nothing, all in one process.

    python -m bench.vendors --backends DIRECTORY COUNT --device-plugins DIRECTORY COUNT \
        --pods SOCKET

Written against the two contracts alone (``drakit.backend.v1`` and the kubelet's
``v1beta1``), in a process of its own, so that neither its memory nor its garbage is in the plugin's
numbers. What a call takes here is a part of what the plugin's caller waits, as with any vendor.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio

from drakit.testing.conformance.podlist import PodList
from drakit_proto.backend.v1 import backend_pb2 as backend
from drakit_proto.backend.v1 import backend_pb2_grpc as backend_grpc
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as plugin
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2_grpc as plugin_grpc

__all__ = (
    "DEVICES",
    "backend_entry",
    "backend_name",
    "plugin_entry",
    "resource_name",
)

DEVICES = 8
"""Devices of each backend and each device plugin."""

LOOK_SECONDS = 0.1
"""Between two polls for a new kubelet.sock: device plugins watch the directory."""

CALL_SECONDS = 5.0


def backend_name(number: int) -> str:
    """Name the driver of a backend."""
    return f"backend-{number}.bench.drakit.dev"


def backend_entry(number: int) -> str:
    """Name the entry of a backend, and its directory."""
    return f"backend-{number}"


def plugin_entry(number: int) -> str:
    """Name the entry of a device plugin, and its directory."""
    return f"thing-{number}"


def resource_name(number: int) -> str:
    """Name the resource of a device plugin."""
    return f"bench.drakit.dev/thing-{number}"


class Backend(backend_grpc.BackendServicer):
    """A backend that has all optional methods but health."""

    def __init__(self, number: int) -> None:
        self._name = backend_name(number)

    async def GetInfo(self, request, context):
        return backend.GetInfoResponse(driver_name=self._name, version="1")

    async def WatchDevices(self, request, context) -> AsyncIterator[backend.WatchDevicesResponse]:
        devices = [backend.Device(name=f"device-{number}") for number in range(DEVICES)]
        yield backend.WatchDevicesResponse(devices=devices)
        await asyncio.Event().wait()

    async def PrepareClaims(self, request, context):
        return backend.PrepareClaimsResponse(
            claims=[
                backend.PreparedClaim(
                    uid=claim.uid, edits=[_edits(device.name) for device in claim.devices]
                )
                for claim in request.claims
            ]
        )

    async def UnprepareClaims(self, request, context):
        done = [backend.UnpreparedClaim(uid=claim.uid) for claim in request.claims]
        return backend.UnprepareClaimsResponse(claims=done)


def _edits(name: str) -> backend.Edits:
    node = backend.DeviceNode(path=f"/dev/{name}", host_path="/dev/null", type="c")
    return backend.Edits(env={"BENCH_DEVICE": name}, device_nodes=[node])


class DevicePlugin(plugin_grpc.DevicePluginServicer):
    """A device plugin without options."""

    async def GetDevicePluginOptions(self, request, context):
        return plugin.DevicePluginOptions()

    async def ListAndWatch(self, request, context) -> AsyncIterator[plugin.ListAndWatchResponse]:
        yield plugin.ListAndWatchResponse(
            devices=[
                plugin.Device(ID=f"device-{number}", health="Healthy") for number in range(DEVICES)
            ]
        )
        await asyncio.Event().wait()

    async def Allocate(self, request, context):
        return plugin.AllocateResponse(
            container_responses=[
                plugin.ContainerAllocateResponse(
                    envs={"BENCH_DEVICE": ",".join(each.devices_ids)},
                    devices=[
                        plugin.DeviceSpec(
                            container_path=f"/dev/{id_}", host_path="/dev/null", permissions="rw"
                        )
                        for id_ in each.devices_ids
                    ],
                )
                for each in request.container_requests
            ]
        )


async def serve_backend(parent: Path, number: int) -> None:
    directory = parent / backend_entry(number)
    directory.mkdir(parents=True, exist_ok=True)
    server = grpc.aio.server()
    backend_grpc.add_BackendServicer_to_server(Backend(number), server)
    server.add_insecure_port(f"unix:{directory / 'backend.sock'}")
    await server.start()
    await server.wait_for_termination()


async def serve_device_plugins(parent: Path, number: int) -> None:
    """Serve and register whenever there is another kubelet.sock: that one has removed the sockets
    that were there."""
    directory = parent / plugin_entry(number)
    kubelet, seen = directory / "kubelet.sock", 0
    while True:
        found = kubelet.stat().st_ino if kubelet.exists() else 0
        if found not in (0, seen):
            await serve_device_plugin(directory, number)
        seen = found
        await asyncio.sleep(LOOK_SECONDS)


servers: list[grpc.aio.Server] = []
"""Kept: a server ends with its last reference."""


async def serve_device_plugin(directory: Path, number: int) -> None:
    server = grpc.aio.server()
    plugin_grpc.add_DevicePluginServicer_to_server(DevicePlugin(), server)
    socket = directory / "thing.sock"
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    servers.append(server)
    request = plugin.RegisterRequest(
        version="v1beta1", endpoint=socket.name, resource_name=resource_name(number)
    )
    options = [("grpc.default_authority", "localhost")]
    async with grpc.aio.insecure_channel(
        f"unix:{directory / 'kubelet.sock'}", options=options
    ) as channel:
        stub = plugin_grpc.RegistrationStub(channel)
        await stub.Register(request, timeout=CALL_SECONDS, wait_for_ready=True)


async def serve_pods(socket: Path) -> None:
    """List the node plugin's pod, as the kubelet does: without it, device plugins are unused."""
    async with PodList(socket):
        await asyncio.Event().wait()


async def serve(arguments: argparse.Namespace) -> None:
    async with asyncio.TaskGroup() as group:
        if arguments.pods is not None:
            group.create_task(serve_pods(arguments.pods))
        for directory, count in arguments.backends or ():
            for number in range(int(count)):
                group.create_task(serve_backend(Path(directory), number))
        for directory, count in arguments.device_plugins or ():
            for number in range(int(count)):
                group.create_task(serve_device_plugins(Path(directory), number))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.vendors", description=__doc__)
    for option in ("--backends", "--device-plugins"):
        parser.add_argument(option, nargs=2, action="append", metavar=("DIRECTORY", "COUNT"))
    parser.add_argument("--pods", type=Path, metavar="SOCKET")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
