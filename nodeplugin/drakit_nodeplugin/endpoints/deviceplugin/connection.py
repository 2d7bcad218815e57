"""
One life of a registered device plugin: a channel to its socket, its list of devices, and its calls.

All that it sends is read as bytes, and parsed by us: what is no message of the contract is a
sentence then, and a large list is made plain in a thread. That there is another life after it, or
one that takes its place, is :mod:`.endpoint`'s.

It must not know claims, other resources, or who listens.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from drakit.device import Inventory
from drakit.tasks import cancelled_by_owner
from drakit_nodeplugin.endpoints.deviceplugin.inventory import Listed, listed
from drakit_nodeplugin.endpoints.deviceplugin.messages import (
    MAX_ANSWER_BYTES,
    BadMessageError,
    allocate_answer,
    devices_in,
)
from drakit_nodeplugin.endpoints.deviceplugin.room import Room, TooManyDevicesError
from drakit_nodeplugin.endpoints.endpoint import ConnectionEndedError
from drakit_nodeplugin.endpoints.host_paths import SocketFile, socket_file
from drakit_nodeplugin.endpoints.rawstream import FloodError, LatestMessages
from drakit_nodeplugin.endpoints.wire import GarbageError
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from drakit_nodeplugin.endpoints.allowlist import Rights
    from drakit_nodeplugin.endpoints.deviceplugin.remarks import Diagnostics

__all__ = (
    "CONNECT_SECONDS",
    "LIST_SECONDS",
    "PluginConnection",
    "PluginFailedError",
    "Registration",
)

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""How long a plugin that has registered may take to listen and to say its options; it is what the
kubelet waits."""

LOOK_SECONDS = 0.1
"""Pause between two checks for the socket of a plugin that has registered."""

LIST_SECONDS = 2.0
"""How long a new connection is waited for to list its devices, before that is told."""

ALLOCATE_SECONDS = 240.0
"""After which Allocate is given up. The kubelet has no limit; a claim's call has one of 300 s."""

PRE_START_SECONDS = 30.0
"""The kubelet's limit of PreStartContainer."""

MAX_BYTES = 4 * 1024 * 1024
"""Of a message: 256 for each device of as many as there may be. The kubelet takes four times as
much, but has more memory."""

IN_LOOP_BYTES = 16 * 1024
"""Of a message that is read in the daemon's loop: some 250 devices, and as many microseconds ten
times over. Larger ones are read in a thread."""

MAX_TEXT = 500
"""Characters of a plugin's own error."""

_METHOD = "/v1beta1.DevicePlugin/"
_OPTIONS = [
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Channels to one path would share their connection: a plugin's next process, which listens at
    # the same path, would be taken for the one that ends.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]

MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """What a device plugin has said in registering."""

    resource: str
    socket: Path
    pre_start_required: bool = False


class PluginFailedError(Exception):
    """A call of a device plugin failed. The text is a sentence that names the plugin."""


class PluginConnection:
    """A connection to one device plugin: `open`, then `next` again and again, then `close`."""

    def __init__(
        self,
        registration: Registration,
        *,
        remarks: Diagnostics,
        room: Room,
        rights: Rights | None = None,
    ) -> None:
        self.registration = registration
        self._rights = rights
        self.pre_start_required = registration.pre_start_required

        self._plugin = f"the device plugin of {registration.resource}"
        self._remarks = remarks
        self._room = room
        # Whatever it gives is bytes, since no serializers are given.
        self._channel: Any = grpc.aio.insecure_channel(
            f"unix:{quote(str(registration.socket))}", options=_OPTIONS
        )
        self._asking_options: Any = None
        self._messages: LatestMessages | None = None
        self._listed: Listed | None = None
        self._held: Inventory | None = None
        self._over: ConnectionEndedError | None = None

    # ------------------------------------------------------------ its life

    async def open(self) -> None:
        """Connect; raises :class:`ConnectionEndedError`, after which `close` is due as well."""
        if self._rights is None:
            await self._ask_options()
        else:
            file = await self._owned_socket(self._rights)
            await self._ask_options()
            if await asyncio.to_thread(_file_at, self.registration.socket) != file:
                text = "its socket was replaced while the node plugin connected to it"
                raise ConnectionEndedError(text, disorderly=True)
        if self._over is not None:
            raise self._over
        call = self._channel.unary_stream(f"{_METHOD}ListAndWatch")
        self._messages = LatestMessages(aiter(call(b"")))

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
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise self._unanswered() from None
        if problem := rights.owner_problem(file):
            text = f"its socket {self.registration.socket.name} {problem}"
            self._remarks.say("RegistrationRefused", f"{self._plugin} is refused: {text}")
            raise ConnectionEndedError(text, disorderly=True)
        return file

    def _unanswered(self) -> ConnectionEndedError:
        return ConnectionEndedError(
            f"it registered with the socket {self.registration.socket.name}, and does not answer "
            f"there"
        )

    async def _ask_options(self) -> None:
        call = self._channel.unary_unary(f"{_METHOD}GetDevicePluginOptions")
        # It may begin to listen only after it has registered.
        self._asking_options = call(b"", timeout=CONNECT_SECONDS, wait_for_ready=True)
        try:
            raw = await self._asking_options
            self.pre_start_required = _parsed(pb.DevicePluginOptions(), raw).pre_start_required
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return  # what it said in registering holds
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._unanswered() from None
            raise ConnectionEndedError(f"its options cannot be had: {_text(error)}") from None
        except DecodeError:
            raise _garbage("GetDevicePluginOptions") from None
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            raise self._over or ConnectionEndedError("its connection was closed") from None

    async def hold_first(self, *, seconds: float) -> bool:
        """Take its first list, and keep it for `next`; tells whether it came in time. Raises
        :class:`ConnectionEndedError`."""
        assert self._messages is not None
        try:
            async with asyncio.timeout(seconds):
                await self._messages.wait()
        except TimeoutError:
            return False
        self._held = await self.next()  # not within the time: what is taken must not get lost
        return True

    @property
    def away(self) -> str | None:
        """Why it cannot be called now; None while it can."""
        if self._over is not None:
            return self._over.reason
        return None if self._listed is not None else "it has not listed its devices yet"

    async def next(self) -> Inventory:
        """Wait for its next list of devices; raises :class:`ConnectionEndedError`."""
        held, self._held = self._held, None
        if held is not None:
            return held
        assert self._messages is not None
        try:
            raw = await self._messages.next()
            found = await self._read(raw)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if self._over is None:
                self._over = _ended(error)
                self._tell_fault(self._over)
            raise self._over from None
        if self._over is not None:
            raise self._over
        try:
            self._room.take(self.registration.resource, len(found.ids))
        except TooManyDevicesError as error:
            self._over = _ended(error)
            self._tell_fault(self._over)
            raise self._over from None
        self._listed = found
        for sentence in found.left_out:
            self._remarks.say("DeviceLeftOut", sentence, once=True)
        return found.inventory

    def _tell_fault(self, ended: ConnectionEndedError) -> None:
        if ended.disorderly:
            self._remarks.say("DevicePluginStopped", f"{self._plugin} is stopped: {ended.reason}")

    async def _read(self, raw: bytes) -> Listed:
        resource, before = self.registration.resource, self._listed

        def read() -> Listed:
            return listed(devices_in(raw), resource=resource, before=before)

        if len(raw) <= IN_LOOP_BYTES:
            return read()
        async with self._room.reading:
            return await asyncio.to_thread(read)

    def end(self, error: ConnectionEndedError) -> None:
        """It is over: who waits for its next list, or opens it, gets this error. It is not closed
        by this."""
        self._over = self._over or error
        if self._asking_options is not None:
            self._asking_options.cancel()
        if self._messages is not None:
            self._messages.end(self._over)

    async def close(self, *, grace_seconds: float | None = None) -> None:
        """End it; calls that are under way get the grace, and fail then."""
        self.end(ConnectionEndedError("its connection was closed"))
        await self._channel.close(grace_seconds)

    # ------------------------------------------------------------ calls

    def identity_in_plugin(self, device: str) -> str | None:
        """Give the plugin's ID of a device by its name; None if it does not list it."""
        return None if self._listed is None else self._listed.ids.get(device)

    async def allocate(self, ids: Sequence[str]) -> pb.ContainerAllocateResponse:
        """Allocate devices for a container; raises :class:`PluginFailedError`."""
        request = pb.AllocateRequest(
            container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)]
        )
        raw = await self._call("Allocate", request, seconds=ALLOCATE_SECONDS)
        if len(raw) > MAX_ANSWER_BYTES:
            raise self._answered("Allocate", f"more than {MAX_ANSWER_BYTES // 1024} KiB")
        try:
            if len(raw) <= IN_LOOP_BYTES:
                return allocate_answer(raw)
            async with self._room.reading:
                return await asyncio.to_thread(allocate_answer, raw)
        except BadMessageError as error:
            raise self._answered("Allocate", str(error)) from None

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Have devices made ready for a container; raises :class:`PluginFailedError`."""
        request = pb.PreStartContainerRequest(devices_ids=ids)
        await self._call("PreStartContainer", request, seconds=PRE_START_SECONDS)

    async def _call(self, what: str, request: Message, *, seconds: float) -> bytes:
        if (away := self.away) is not None:
            raise PluginFailedError(f"{self._plugin} is away: {away}")
        try:
            call = self._channel.unary_unary(f"{_METHOD}{what}")
            return await call(request.SerializeToString(), timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise self._failed(what, error, seconds=seconds) from None
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            raise PluginFailedError(f"{self._plugin} went away during {what}") from None

    def _failed(
        self, what: str, error: grpc.aio.AioRpcError, *, seconds: float
    ) -> PluginFailedError:
        match error.code():
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                text = f"{self._plugin} gave no answer to {what} within {seconds:.0f} s"
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
                text = f"{self._plugin} went away during {what}"
            case grpc.StatusCode.UNIMPLEMENTED:
                text = f"{self._plugin} has no {what}; this is a fault of the device plugin"
            case _:
                text = f"{self._plugin} failed in {what}: {_text(error)}"
        return PluginFailedError(text)

    def _answered(self, what: str, answer: str) -> PluginFailedError:
        return PluginFailedError(
            f"{self._plugin} answered {what} with {answer}; this is a fault of the device plugin"
        )


def _file_at(socket: Path) -> SocketFile | None:
    try:
        return socket_file(socket)
    except OSError:
        return None


def _parsed(message: MessageT, raw: bytes) -> MessageT:
    message.ParseFromString(raw)
    return message


def _garbage(what: str) -> ConnectionEndedError:
    return ConnectionEndedError(
        f"it answered {what} with something that is no message of v1beta1; this is a fault of the "
        f"device plugin",
        disorderly=True,
    )


def _ended(error: Exception) -> ConnectionEndedError:
    """Say why a stream is over."""
    match error:
        case ConnectionEndedError():
            return error
        case StopAsyncIteration():
            return ConnectionEndedError("its stream ended")
        case grpc.aio.AioRpcError() if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            # Not its own words: gRPC's name the size.
            text = f"its list is larger than {MAX_BYTES >> 20} MiB, or it has no resources left"
            return ConnectionEndedError(text, disorderly=True)
        case grpc.aio.AioRpcError():
            return ConnectionEndedError(f"its stream failed: {_text(error)}")
        case GarbageError():
            return ConnectionEndedError(
                f"it sent {error}; this is a fault of the device plugin", disorderly=True
            )
        case FloodError() | TooManyDevicesError():
            text = f"{error}; this is a fault of the device plugin"
            return ConnectionEndedError(text, disorderly=True)
        case ConnectionError():
            return ConnectionEndedError(str(error))
        case _:
            logger.error("device plugin's list cannot be read", exc_info=error)
            return ConnectionEndedError(f"what it sent cannot be read ({type(error).__name__})")


def _text(error: grpc.aio.AioRpcError) -> str:
    """Say what a call failed with: the status, and the plugin's own words."""
    code = error.code().name.lower().replace("_", " ")
    details = " ".join((error.details() or "").split())[:MAX_TEXT]
    return f"{code} ({details})" if details else code
