"""The kubelet's side of device plugins: it registers them, lists their devices, and allocates."""

from __future__ import annotations

import asyncio
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2_grpc as pb_grpc

__all__ = ("FakeDeviceManager",)


class FakeDeviceManager(pb_grpc.RegistrationServicer):
    """
    ``async with FakeDeviceManager(directory) as kubelet``: a kubelet that starts, and is killed.

    Like the kubelet, it removes all sockets from the directory when it starts, and a stream that
    ends makes the devices of its resource unhealthy.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.registrations: list[pb.RegisterRequest] = []
        self.lists: dict[str, list[dict[str, str]]] = {}
        """The health by ID of each list, by resource."""
        self.last: dict[str, pb.ListAndWatchResponse] = {}
        self.refuse = False
        self._stubs: dict[str, Any] = {}
        self._channels: list[grpc.aio.Channel] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> FakeDeviceManager:
        for path in self.directory.iterdir():
            if stat.S_ISSOCK(path.stat().st_mode):
                path.unlink()
        self._server = grpc.aio.server()
        pb_grpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.directory / 'kubelet.sock'}")
        await self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        for task in self._tasks:
            task.cancel()
        for channel in self._channels:
            await channel.close()
        await self._server.stop(0)

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.Empty:
        if self.refuse:
            await context.abort(grpc.StatusCode.UNKNOWN, "not now")
        self.registrations.append(request)
        channel = grpc.aio.insecure_channel(
            f"unix:{self.directory / request.endpoint}",
            # Its own connection: the socket of the same path may be another one.
            options=[
                ("grpc.default_authority", "localhost"),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        self._channels.append(channel)
        stub: Any = pb_grpc.DevicePluginStub(channel)
        # It dials before it answers.
        await stub.GetDevicePluginOptions(pb.Empty(), timeout=5, wait_for_ready=True)
        self._stubs[request.resource_name] = stub
        self._tasks.append(asyncio.create_task(self._watch(request.resource_name, stub)))
        return pb.Empty()

    async def _watch(self, resource: str, stub: Any) -> None:
        lists = self.lists.setdefault(resource, [])
        with suppress(grpc.aio.AioRpcError):
            async for message in stub.ListAndWatch(pb.Empty()):
                self.last[resource] = message
                lists.append({device.ID: device.health for device in message.devices})
        lists.append(dict.fromkeys(lists[-1] if lists else (), "Unhealthy"))

    def health(self, resource: str) -> dict[str, str]:
        """The health of the devices of a resource, keyed by ID."""
        lists = self.lists.get(resource)
        return lists[-1] if lists else {}

    def drop(self, resource: str) -> None:
        """End the stream of a resource, as a kubelet does that fails to read it."""
        for request, task in zip(self.registrations, self._tasks, strict=True):
            if request.resource_name == resource:
                task.cancel()

    async def allocate(
        self, resource: str, *ids: str, seconds: float = 5
    ) -> pb.ContainerAllocateResponse:
        """Allocate devices to a container; raises the error of the call."""
        request = pb.AllocateRequest(
            container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)]
        )
        answer = await self._stubs[resource].Allocate(request, timeout=seconds)
        return answer.container_responses[0]

    async def start_container(self, resource: str, *ids: str) -> None:
        """Make the call before the start of a container."""
        request = pb.PreStartContainerRequest(devices_ids=ids)
        await self._stubs[resource].PreStartContainer(request, timeout=5)

    async def prefer(self, resource: str, *available: str, size: int) -> list[str]:
        """Ask which of these devices a container should get."""
        each = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, allocation_size=size
        )
        request = pb.PreferredAllocationRequest(container_requests=[each])
        answer = await self._stubs[resource].GetPreferredAllocation(request, timeout=5)
        return list(answer.container_responses[0].deviceIDs)
