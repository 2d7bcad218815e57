"""
A backend on a Unix socket, served in the test's own loop. It does what a test tells it to do, even
if that is wrong.

Messages are sent as bytes, so that a test can send any content.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from drakit_proto.backend.v1 import backend_pb2 as pb

__all__ = ("FakeBackend", "Refusal", "device")

SERVICE = "drakit.backend.v1.Backend"
Answer = Any
"""A message, or its bytes."""


def device(name: str, **fields: Any) -> pb.Device:
    return pb.Device(name=name, **fields)


def _bytes(answer: Answer) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


class FakeBackend:
    """
    A backend: `async with FakeBackend(path, driver="gpu.example.com") as backend`.

    Each method is a field that a test may replace; None is a method that is not implemented.
    """

    def __init__(self, path: Path, driver: str = "gpu.example.com") -> None:
        self.path = path
        self.driver = driver
        self.listed: Answer = pb.WatchDevicesResponse(devices=[device("gpu-0")])
        """The first message of a stream of devices; None says nothing."""
        self.calls: list[tuple[str, Any]] = []
        """The calls, with their requests."""
        self.metadata: list[dict[str, str]] = []
        """The metadata of each call for claims."""
        self.streams: list[asyncio.Queue[Answer]] = []
        """Queues of the open streams of devices. An item is sent; None ends the stream."""
        self.healths: list[asyncio.Queue[Answer]] = []
        self.info: Callable[[Any], Awaitable[Answer]] = self._info
        self.prepare: Callable[[Any], Awaitable[Answer]] | None = self._prepare
        self.unprepare: Callable[[Any], Awaitable[Answer]] | None = self._unprepare
        self.check: Callable[[Any], Awaitable[Answer]] | None = self._check
        self.tells_health = True
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> FakeBackend:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Make the socket, as another file than before."""
        self.path.unlink(missing_ok=True)
        self._server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
        unary = {
            "GetInfo": (self._get_info, pb.GetInfoRequest),
            "PrepareClaims": (self._call("prepare"), pb.PrepareClaimsRequest),
            "UnprepareClaims": (self._call("unprepare"), pb.UnprepareClaimsRequest),
            "CheckClaims": (self._call("check"), pb.CheckClaimsRequest),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(method, kind.FromString, _bytes)
            for name, (method, kind) in unary.items()
        }
        for name, method in (("WatchDevices", self._devices), ("WatchHealth", self._health)):
            handlers[name] = grpc.unary_stream_rpc_method_handler(method, None, _bytes)
        handler = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()

    async def stop(self) -> None:
        """End at once, calls and all, as a process that dies; gRPC removes the socket."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    def send(self, answer: Answer) -> None:
        """Send something on all streams of devices."""
        for stream in self.streams:
            stream.put_nowait(answer)

    def send_devices(self, *devices: pb.Device) -> None:
        self.send(pb.WatchDevicesResponse(devices=devices))

    def send_health(self, answer: Answer) -> None:
        for stream in self.healths:
            stream.put_nowait(answer)

    def called(self, method: str) -> Sequence[Any]:
        """The requests of a method."""
        return [request for name, request in self.calls if name == method]

    # ------------------------------------------------------------ what is served

    async def _get_info(self, request: Any, context: Any) -> Answer:
        self.calls.append(("GetInfo", request))
        return await self.info(request)

    async def _info(self, request: Any) -> Answer:
        return pb.GetInfoResponse(driver_name=self.driver, version="1.0")

    async def _devices(self, request: bytes, context: Any) -> AsyncIterator[Answer]:
        self.calls.append(("WatchDevices", request))
        async for answer in _queued(self.streams, self.listed):
            yield answer

    async def _health(self, request: bytes, context: Any) -> AsyncIterator[Answer]:
        self.calls.append(("WatchHealth", request))
        if not self.tells_health:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no health")
        async for answer in _queued(self.healths, None):
            yield answer

    def _call(self, name: str) -> Callable[[Any, Any], Awaitable[Answer]]:
        async def call(request: Any, context: Any) -> Answer:
            self.calls.append((name, request))
            self.metadata.append(
                {str(key): str(value) for key, value in context.invocation_metadata()}
            )
            method = getattr(self, name)
            if method is None:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
            try:
                return await method(request)
            except Refusal as refusal:
                await context.abort(refusal.code, refusal.details)

        return call

    async def _prepare(self, request: Any) -> Answer:
        return pb.PrepareClaimsResponse(
            claims=[
                pb.PreparedClaim(
                    uid=claim.uid,
                    edits=[pb.Edits(env={"GPU": device.name}) for device in claim.devices],
                )
                for claim in request.claims
            ]
        )

    async def _unprepare(self, request: Any) -> Answer:
        claims = [pb.UnpreparedClaim(uid=claim.uid) for claim in request.claims]
        return pb.UnprepareClaimsResponse(claims=claims)

    async def _check(self, request: Any) -> Answer:
        claims = [pb.CheckedClaim(uid=claim.uid, prepared=True) for claim in request.claims]
        return pb.CheckClaimsResponse(claims=claims)


class Refusal(Exception):
    """Raised by a method: the call fails with this status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


async def _queued(streams: list[asyncio.Queue[Answer]], first: Answer) -> AsyncIterator[Answer]:
    queue: asyncio.Queue[Answer] = asyncio.Queue()
    streams.append(queue)
    try:
        if first is not None:
            yield first
        while (answer := await queue.get()) is not None:
            yield answer
    finally:
        streams.remove(queue)
