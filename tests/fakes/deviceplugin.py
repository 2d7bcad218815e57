"""A device plugin as vendors write them: it listens, registers, lists, and does as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2_grpc as pb_grpc

__all__ = ("FakeDevicePlugin", "container_answer", "listed", "register")


def listed(*devices: str | tuple[str, str] | pb.Device) -> pb.ListAndWatchResponse:
    """A list of devices, given as IDs, as pairs of ID and health, or as messages."""
    made: list[pb.Device] = []
    for device in devices:
        if isinstance(device, pb.Device):
            made.append(device)
        elif isinstance(device, tuple):
            made.append(pb.Device(ID=device[0], health=device[1]))
        else:
            made.append(pb.Device(ID=device, health="Healthy"))
    return pb.ListAndWatchResponse(devices=made)


def container_answer(ids: Sequence[str]) -> pb.ContainerAllocateResponse:
    """The plugin's default response for devices."""
    return pb.ContainerAllocateResponse(envs={"THINGS": ",".join(ids)})


async def register(directory: Path, request: pb.RegisterRequest, *, seconds: float = 5.0) -> None:
    """Register as a plugin does; raises the RPC's error."""
    async with grpc.aio.insecure_channel(
        f"unix:{directory / 'kubelet.sock'}", options=[("grpc.default_authority", "localhost")]
    ) as channel:
        stub: Any = pb_grpc.RegistrationStub(channel)
        await stub.Register(request, timeout=seconds)


class FakeDevicePlugin:
    """
    A device plugin: ``async with FakeDevicePlugin(directory) as plugin`` listens and registers.

    What it was asked for is in `allocated` and `pre_started`, in order; `preferred` counts calls
    that must not come.
    """

    def __init__(
        self,
        directory: Path,
        *,
        resource: str = "vendor.example/thing",
        endpoint: str = "thing.sock",
        devices: Iterable[str | tuple[str, str] | pb.Device] | None = ("thing-0", "thing-1"),
        pre_start_required: bool = False,
        has_options: bool = True,
    ) -> None:
        """Without `devices`, the plugin lists nothing until the test sets them. Without options, it
        has no GetDevicePluginOptions, like old plugins."""
        self.directory = directory
        self.resource = resource
        self.endpoint = endpoint
        self.options = pb.DevicePluginOptions(
            pre_start_required=pre_start_required, get_preferred_allocation_available=True
        )
        self.has_options = has_options
        self.allocated: list[list[str]] = []
        self.pre_started: list[list[str]] = []
        self.preferred = 0
        self.streams = 0
        """Open ListAndWatch streams."""
        self.allow = asyncio.Event()
        """Clear it, and Allocate waits."""
        self.allow.set()
        self.answer: Callable[[list[str]], pb.ContainerAllocateResponse] = container_answer
        self.raw_answer: bytes | None = None
        """A response of Allocate that replaces the default; it can be invalid."""
        self.failure: tuple[grpc.StatusCode, str] | None = None
        """The error of Allocate."""
        self.pre_start_failure: tuple[grpc.StatusCode, str] | None = None
        self._messages: list[bytes] = []
        if devices is not None:
            self._messages.append(listed(*devices).SerializeToString())
        self._news = asyncio.Condition()
        self._end = False
        self._server: grpc.aio.Server | None = None

    @property
    def socket(self) -> Path:
        return self.directory / self.endpoint

    async def __aenter__(self) -> FakeDevicePlugin:
        await self.start()
        try:
            await self.register()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # ------------------------------------------------------------ what a test does

    async def start(self, endpoint: str | None = None) -> None:
        """Listen, at a socket of another name if one is given."""
        self.endpoint = endpoint or self.endpoint
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self._end = False
        self._server = grpc.aio.server()
        handlers: dict[str, Any] = {
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._list_and_watch),
            "GetPreferredAllocation": grpc.unary_unary_rpc_method_handler(self._prefer),
            "Allocate": grpc.unary_unary_rpc_method_handler(self._allocate),
            "PreStartContainer": grpc.unary_unary_rpc_method_handler(self._pre_start),
        }
        if self.has_options:
            handlers["GetDevicePluginOptions"] = grpc.unary_unary_rpc_method_handler(self._options)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", handlers),)
        )
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()

    async def stop(self) -> None:
        """End at once, as a process that is killed; its socket goes as well."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def register(self, **changes: Any) -> None:
        """Register, with other fields of the request where a test gives them."""
        request = pb.RegisterRequest(
            version="v1beta1",
            endpoint=self.endpoint,
            resource_name=self.resource,
            options=self.options,
        )
        request.MergeFrom(pb.RegisterRequest(**changes))
        await register(self.directory, request)

    async def list(self, *devices: str | tuple[str, str] | pb.Device) -> None:
        """List these devices, and no others."""
        await self.send(listed(*devices).SerializeToString())

    async def send(self, *messages: bytes) -> None:
        """Send messages in the stream, whatever they are; a new stream begins with the last."""
        async with self._news:
            self._messages += messages
            self._news.notify_all()

    async def end_streams(self) -> None:
        """End all streams, as a plugin that returns from ListAndWatch; it goes on to listen."""
        async with self._news:
            self._end = True
            self._news.notify_all()

    async def start_streams(self) -> None:
        """Let streams live again."""
        self._end = False

    # ------------------------------------------------------------ what it serves

    async def _options(self, request: bytes, context: Any) -> bytes:
        return self.options.SerializeToString()

    async def _list_and_watch(self, request: bytes, context: Any) -> Any:
        self.streams += 1
        at = max(0, len(self._messages) - 1)
        try:
            while True:
                while at < len(self._messages):
                    yield self._messages[at]
                    at += 1
                if self._end:
                    return
                async with self._news:
                    while at == len(self._messages) and not self._end:
                        await self._news.wait()
        finally:
            self.streams -= 1

    async def _prefer(self, request: bytes, context: Any) -> bytes:
        self.preferred += 1
        return b""

    async def _allocate(self, request: bytes, context: Any) -> bytes:
        asked = pb.AllocateRequest.FromString(request)
        containers = [list(container.devices_ids) for container in asked.container_requests]
        self.allocated += containers
        await self.allow.wait()
        if self.failure is not None:
            await context.abort(*self.failure)
        if self.raw_answer is not None:
            return self.raw_answer
        answers = [self.answer(ids) for ids in containers]
        return pb.AllocateResponse(container_responses=answers).SerializeToString()

    async def _pre_start(self, request: bytes, context: Any) -> bytes:
        self.pre_started.append(list(pb.PreStartContainerRequest.FromString(request).devices_ids))
        if self.pre_start_failure is not None:
            await context.abort(*self.pre_start_failure)
        return b""
