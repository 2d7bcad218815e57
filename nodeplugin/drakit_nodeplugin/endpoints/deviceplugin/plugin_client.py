"""
The RPCs of one registered device plugin: a channel to its socket, its stream of lists, its calls.

All messages are received as bytes and parsed here, so that a message outside the contract becomes a
sentence, and a large list is parsed in a thread. What happens when the stream ends, or the plugin
registers again, is :mod:`.plugin_connection`'s business.

It must not know claims, other resources, or the listener.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf.message import Message

from drakit.device import Inventory
from drakit.rate_limiter import RateLimiter
from drakit.tasks import cancelled_by_owner
from drakit_nodeplugin.endpoints.contract import ConnectionEndedError
from drakit_nodeplugin.endpoints.deviceplugin.device_list import (
    DeviceRoom,
    ListedDevices,
    TooManyDevicesError,
    devices_in,
    list_devices,
)
from drakit_nodeplugin.endpoints.deviceplugin.plugin_registration import Registration
from drakit_nodeplugin.endpoints.host_paths import SocketFile, socket_file
from drakit_nodeplugin.endpoints.latest_value import LatestValue
from drakit_nodeplugin.endpoints.wire import GarbageError, parse, printable
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from drakit_nodeplugin.endpoints.allowlist import Rights
    from drakit_nodeplugin.endpoints.failures import Diagnostics

__all__ = ("CONNECT_SECONDS", "PluginClient", "PluginFailedError")

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""The kubelet's limit for a plugin that has registered to listen and to return its options."""

POLL_SECONDS = 0.1
"""Pause between two checks for the socket of a plugin that has registered."""

ALLOCATE_SECONDS = 240.0
"""Time limit of Allocate. The kubelet has none; a claim's call has one of 300 s."""

PRE_START_SECONDS = 30.0
"""The kubelet's limit of PreStartContainer."""

MAX_BYTES = 4 * 1024 * 1024
"""Of a message: 256 for each device of the most that can be published. The kubelet accepts four
times as much, but has more memory."""

IN_LOOP_BYTES = 16 * 1024
"""Of a message that is parsed in the daemon's loop: some 250 devices, and some 2.5 ms. Larger ones
are parsed in a thread."""

MAX_PER_SECOND = 100.0
"""Lists that may come all the time. A plugin that sends more is cut off, because receiving alone
costs time of this loop."""

MAX_BURST = 200.0
"""Lists that may come at once, as when a bus is plugged in."""

_METHOD = "/v1beta1.DevicePlugin/"
_OPTIONS = [
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Channels to one path would share their connection: a plugin's next process, which listens at
    # the same path, would be confused with the one that ends.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]


class PluginFailedError(Exception):
    """A call of a device plugin failed. The text is a sentence that names the plugin."""


class PluginClient:
    """A client of one device plugin: `open`, then `next` again and again, then `close`."""

    def __init__(
        self,
        registration: Registration,
        *,
        diagnostics: Diagnostics,
        room: DeviceRoom,
        rights: Rights | None = None,
    ) -> None:
        self.registration = registration
        self.pre_start_required = registration.pre_start_required
        self._rights = rights
        self._plugin = f"the device plugin of {registration.resource}"
        self._diagnostics = diagnostics
        self._room = room
        # Without serializers, it returns bytes.
        self._channel: Any = grpc.aio.insecure_channel(
            f"unix:{quote(str(registration.socket))}", options=_OPTIONS
        )
        self._options_call: Any = None
        self._latest = LatestValue[bytes]()
        """The last list that was received."""
        self._receiving: asyncio.Task[None] | None = None
        self._listed: ListedDevices | None = None
        self._first: Inventory | None = None
        self._over: ConnectionEndedError | None = None

    # ------------------------------------------------------------ life cycle

    async def open(self) -> None:
        """Connect; raises :class:`ConnectionEndedError`. The caller closes it in any case."""
        if self._rights is None:
            await self._read_options()
        else:
            file = await self._owned_socket(self._rights)
            await self._read_options()
            if await asyncio.to_thread(_file_at, self.registration.socket) != file:
                text = "its socket was replaced while the node plugin connected to it"
                raise ConnectionEndedError(text, disorderly=True)
        if self._over is not None:
            raise self._over
        self._receiving = asyncio.create_task(self._receive())

    async def _owned_socket(self, rights: Rights) -> SocketFile:
        """Wait for its socket, which it may create after it has registered, and check the owner."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                while True:
                    file = await asyncio.to_thread(_file_at, self.registration.socket)
                    if self._over is not None:
                        raise self._over
                    if file is not None:
                        break
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise self._unanswered() from None
        if problem := rights.owner_problem(file):
            text = f"its socket {self.registration.socket.name} {problem}"
            self._diagnostics.report("RegistrationRefused", f"{self._plugin} is refused: {text}")
            raise ConnectionEndedError(text, disorderly=True)
        return file

    def _unanswered(self) -> ConnectionEndedError:
        return ConnectionEndedError(
            f"it registered with the socket {self.registration.socket.name}, and does not answer "
            f"there"
        )

    async def _read_options(self) -> None:
        call = self._channel.unary_unary(f"{_METHOD}GetDevicePluginOptions")
        # It may listen only after it has registered.
        self._options_call = call(b"", timeout=CONNECT_SECONDS, wait_for_ready=True)
        try:
            options = parse(pb.DevicePluginOptions, await self._options_call)
            self.pre_start_required = options.pre_start_required
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return  # the options of the registration are valid
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._unanswered() from None
            raise ConnectionEndedError(f"it does not return its options: {_text(error)}") from None
        except GarbageError:
            raise ConnectionEndedError(
                "it answered GetDevicePluginOptions with something that is no message of v1beta1; "
                "this is a fault of the device plugin",
                disorderly=True,
            ) from None
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            raise self._over or ConnectionEndedError("its connection was closed") from None

    async def read_first(self, *, seconds: float) -> bool:
        """Read its first list, and keep it for `next`; return whether it came in time. Raises
        :class:`ConnectionEndedError`."""
        try:
            async with asyncio.timeout(seconds):
                await self._latest.wait()
        except TimeoutError:
            return False
        self._first = await self.next()  # without the timeout, which could lose the list
        return True

    async def next(self) -> Inventory:
        """Wait for its next list of devices; raises :class:`ConnectionEndedError`."""
        first, self._first = self._first, None
        if first is not None:
            return first
        try:
            raw, _ = await self._latest.next()
            listed = await self._parse(raw or b"")
            if self._over is not None:
                raise self._over
            self._room.take(self.registration.resource, len(listed.listed))
        except Exception as error:
            if self._over is None:
                self._over = _ended(error)
                if self._over.disorderly:
                    text = f"{self._plugin} is stopped: {self._over.reason}"
                    self._diagnostics.report("DevicePluginStopped", text)
            raise self._over from None
        self._listed = listed
        for sentence in listed.left_out:
            self._diagnostics.report("DeviceLeftOut", sentence, once=True)
        return listed.inventory

    def hold(self, seconds: float) -> None:
        """Read no further list for at least this long."""
        self._latest.hold(seconds)

    async def _receive(self) -> None:
        """Receive lists as they come; one that nobody takes is never parsed."""
        limiter = RateLimiter(burst=MAX_BURST, per_second=MAX_PER_SECOND)
        try:
            async for message in self._channel.unary_stream(f"{_METHOD}ListAndWatch")(b""):
                if not limiter.take():
                    raise ConnectionEndedError(
                        f"it sent more than {MAX_PER_SECOND:.0f} messages a second; this is a "
                        f"fault of the device plugin",
                        disorderly=True,
                    )
                self._latest.replace(message)
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            self._latest.end(ConnectionEndedError("its connection was closed"))
        except Exception as error:
            self._latest.end(error)
        else:
            self._latest.end(ConnectionEndedError("its stream ended"))

    async def _parse(self, raw: bytes) -> ListedDevices:
        resource, before = self.registration.resource, self._listed

        def read() -> ListedDevices:
            return list_devices(devices_in(raw), resource=resource, before=before)

        if len(raw) <= IN_LOOP_BYTES:
            return read()
        async with self._room.reading:
            return await asyncio.to_thread(read)

    def end(self, error: ConnectionEndedError) -> None:
        """End it: `open` and `next` raise this error. Calls go on until `close`."""
        self._over = self._over or error
        if self._options_call is not None:
            self._options_call.cancel()
        self._latest.end(self._over)
        if self._receiving is not None:
            self._receiving.cancel()

    async def close(self, *, grace_seconds: float | None = None) -> None:
        """End it; calls in flight have the grace, and fail then."""
        self.end(ConnectionEndedError("its connection was closed"))
        await self._channel.close(grace_seconds)

    @property
    def unavailable(self) -> str | None:
        """Why it cannot be called now; None while it can."""
        if self._over is not None:
            return self._over.reason
        return None if self._listed is not None else "it has not listed its devices yet"

    # ------------------------------------------------------------ calls

    def identity_in_plugin(self, device: str) -> str | None:
        """Return the plugin's ID of a device; None if the plugin does not list the device."""
        listed = None if self._listed is None else self._listed.listed.get(device)
        return None if listed is None else listed.identity

    async def allocate(self, ids: Sequence[str]) -> bytes:
        """Allocate devices for a container, and return the AllocateResponse; raises
        :class:`PluginFailedError`."""
        request = pb.AllocateRequest(
            container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)]
        )
        return await self._call("Allocate", request, seconds=ALLOCATE_SECONDS)

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Initialize devices for a container; raises :class:`PluginFailedError`."""
        request = pb.PreStartContainerRequest(devices_ids=ids)
        await self._call("PreStartContainer", request, seconds=PRE_START_SECONDS)

    async def _call(self, what: str, request: Message, *, seconds: float) -> bytes:
        try:
            call = self._channel.unary_unary(f"{_METHOD}{what}")
            return await call(request.SerializeToString(), timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise self._failed(what, error, seconds=seconds) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            if cancelled_by_owner():
                raise
            raise PluginFailedError(f"{self._plugin} ended during {what}") from None

    def _failed(
        self, what: str, error: grpc.aio.AioRpcError, *, seconds: float
    ) -> PluginFailedError:
        match error.code():
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                text = f"{self._plugin} did not answer {what} within {seconds:.0f} s"
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
                text = f"{self._plugin} ended during {what}"
            case grpc.StatusCode.UNIMPLEMENTED:
                text = f"{self._plugin} has no {what}; this is a fault of the device plugin"
            case _:
                text = f"{self._plugin} failed in {what}: {_text(error)}"
        return PluginFailedError(text)


def _file_at(socket: Path) -> SocketFile | None:
    try:
        return socket_file(socket)
    except OSError:
        return None


def _ended(error: Exception) -> ConnectionEndedError:
    """Return why a stream has ended."""
    match error:
        case ConnectionEndedError():
            return error
        case grpc.aio.AioRpcError() if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            # gRPC's own words name the size.
            text = f"its list is larger than {MAX_BYTES >> 20} MiB, or it has no resources left"
            return ConnectionEndedError(text, disorderly=True)
        case grpc.aio.AioRpcError():
            return ConnectionEndedError(f"its stream failed: {_text(error)}")
        case GarbageError():
            return ConnectionEndedError(
                f"it sent {error}; this is a fault of the device plugin", disorderly=True
            )
        case TooManyDevicesError():
            text = f"{error}; this is a fault of the device plugin"
            return ConnectionEndedError(text, disorderly=True)
        case _:
            logger.error("device plugin's list cannot be parsed", exc_info=error)
            return ConnectionEndedError(f"its list cannot be parsed ({type(error).__name__})")


def _text(error: grpc.aio.AioRpcError) -> str:
    """Return the status of a failed call, and the plugin's own words."""
    code = error.code().name.lower().replace("_", " ")
    details = error.details()
    return f"{code} ({printable(details)})" if details else code
