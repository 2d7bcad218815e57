"""
The RPCs of one registered device plugin: its options, its stream of lists, its calls.

A message outside the contract becomes a sentence, and a large list is parsed in a thread. What
happens when the stream ends, or the plugin registers again, is :mod:`.plugin_connection`'s
business.

It must not know claims, other resources, or the listener.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import Message

from drakit.device import AllocatedDevice, Edits, Inventory
from drakit_daemon.tasks import cancelled_by_owner
from drakit_nodeplugin.endpoints.contract import ConnectionEndedError
from drakit_nodeplugin.endpoints.deviceplugin.allocate import edits_in
from drakit_nodeplugin.endpoints.deviceplugin.device_list import (
    DeviceRoom,
    ListedDevices,
    TooManyDevicesError,
    devices_in,
    list_devices,
)
from drakit_nodeplugin.endpoints.deviceplugin.plugin_registration import Registration
from drakit_nodeplugin.endpoints.failures import DeviceFailedError
from drakit_nodeplugin.endpoints.host_paths import (
    DirectoryError,
    HostDeviceNodes,
    open_socket,
)
from drakit_nodeplugin.endpoints.latest_value import LatestValue
from drakit_nodeplugin.endpoints.wire import CallFailedError, Client, GarbageError, parse
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from drakit_nodeplugin.endpoints.allowlist import Rights
    from drakit_nodeplugin.endpoints.failures import Diagnostics

__all__ = ("CONNECT_SECONDS", "PluginClient")

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""The kubelet's limit for a plugin that has registered to listen and to return its options."""

CLOSED = "its connection was closed"

POLL_SECONDS = 0.1
"""Pause between two checks for the socket of a plugin that has registered."""

ALLOCATE_SECONDS = 240.0
"""Time limit of Allocate. The kubelet has none; a claim's call has one of 300 s."""

PRE_START_SECONDS = 30.0
"""The kubelet's limit of PreStartContainer."""

IN_LOOP_BYTES = 16 * 1024
"""Maximum bytes of a message that is parsed in the daemon's loop: some 250 devices, and some 2.5
ms. A thread parses larger ones."""

ANSWER_IN_LOOP_BYTES = 2 * 1024
"""Maximum bytes of an answer to Allocate that is converted in the daemon's loop. That takes less
than a tenth of a millisecond; a thread takes twice as long."""

_SERVICE = "v1beta1.DevicePlugin"


class PluginClient:
    """A client of one device plugin: `open`, then `next` repeatedly, then `close`."""

    def __init__(
        self,
        registration: Registration,
        *,
        diagnostics: Diagnostics,
        room: DeviceRoom,
        devices: HostDeviceNodes,
        rights: Rights,
    ) -> None:
        self.registration = registration
        self._pre_start_required = registration.pre_start_required
        self._rights = rights
        self._plugin = f"the device plugin of {registration.resource}"
        self._diagnostics = diagnostics
        self._room = room
        self._devices = devices
        self._client: Client | None = None
        self._connecting: asyncio.Task[Client] | None = None
        self._latest = LatestValue[bytes]()
        """The last list that was received."""
        self._receiving: asyncio.Task[None] | None = None
        self._listed: ListedDevices | None = None
        self._first: Inventory | None = None

    # ------------------------------------------------------------ life cycle

    async def open(self) -> None:
        """Connect; raises :class:`ConnectionEndedError`. The caller closes it in any case."""
        self._connecting = asyncio.create_task(self._connect())
        try:
            self._client = await self._connecting
        except asyncio.CancelledError:
            if cancelled_by_owner():
                raise
            raise self._latest.over or ConnectionEndedError(CLOSED) from None
        if self._latest.over is not None:
            raise self._latest.over
        self._receiving = asyncio.create_task(self._receive())

    async def _connect(self) -> Client:
        """Connect to its socket, which it may create after it has registered."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                while True:
                    if (client := await self._try_to_connect()) is not None:
                        return client
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise ConnectionEndedError(
                f"it registered with the socket {self.registration.socket.name}, but does not "
                f"answer on it"
            ) from None

    async def _try_to_connect(self) -> Client | None:
        """Connect to the socket that is there now; None if it does not answer. The next one has
        the same path."""
        try:
            socket = await asyncio.to_thread(open_socket, self.registration.socket)
        except OSError:
            return None
        if problem := self._rights.owner_problem(socket.file):
            socket.close()
            text = f"its socket {self.registration.socket.name} {problem}"
            self._diagnostics.report("RegistrationRefused", f"{self._plugin} is refused: {text}")
            raise ConnectionEndedError(text, disorderly=True)
        client = Client(socket, _SERVICE)
        is_connected = False
        try:
            await self._read_options(client)
            is_connected = True
        except CallFailedError as error:
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from None
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                raise ConnectionEndedError(f"it {error}") from None
        finally:
            if not is_connected:
                await client.close()
        return client if is_connected else None

    async def _read_options(self, client: Client) -> None:
        """Read its options; raises :class:`CallFailedError` and :class:`ConnectionEndedError`."""
        try:
            answer = await client.call(
                "GetDevicePluginOptions", b"", timeout_seconds=CONNECT_SECONDS
            )
            options = parse(pb.DevicePluginOptions, answer)
        except CallFailedError as error:
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                return  # the options of the registration are valid
            raise
        except GarbageError:
            raise ConnectionEndedError(
                "it answered GetDevicePluginOptions with something that is not a v1beta1 message; "
                "this is a bug in the device plugin",
                disorderly=True,
            ) from None
        self._pre_start_required = options.pre_start_required

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
        raw, _ = await self._latest.next()
        try:
            listed = await self._parse(raw or b"")
            if (over := self._latest.over) is None:
                self._room.take(self.registration.resource, len(listed.listed))
        except Exception as error:
            raise self._fail(error) from None
        if over is not None:
            raise over
        self._listed = listed
        for sentence in listed.left_out:
            self._diagnostics.report("DeviceLeftOut", sentence, once=True)
        return listed.inventory

    def hold(self, seconds: float) -> None:
        """Read no further list for at least this long."""
        self._latest.hold(seconds)

    async def _receive(self) -> None:
        """Receive lists as they arrive; a list that is replaced before it is read is never
        parsed."""
        assert self._client is not None
        try:
            async with aclosing(self._client.stream("ListAndWatch")) as messages:
                async for message in messages:
                    self._latest.replace(message)
        except Exception as error:
            self._fail(error)
        else:
            self._latest.end(ConnectionEndedError("its stream ended"))

    def _fail(self, error: Exception) -> ConnectionEndedError:
        """End it with an error of its stream, and return how it ended first."""
        if (over := self._latest.over) is not None:
            return over
        over = _ended(error)
        self._latest.end(over)
        if over.disorderly:
            text = f"{self._plugin} is stopped: {over.reason}"
            self._diagnostics.report("DevicePluginStopped", text)
        return over

    async def _parse(self, raw: bytes) -> ListedDevices:
        resource, before = self.registration.resource, self._listed

        def read() -> ListedDevices:
            return list_devices(devices_in(raw), resource=resource, before=before)

        if len(raw) <= IN_LOOP_BYTES:
            return read()
        async with self._room.reading:
            return await asyncio.to_thread(read)

    def end(self, error: ConnectionEndedError) -> None:
        """End it: `open` and `next` raise this error. Calls continue until `close`."""
        self._latest.end(error)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._receiving is not None:
            self._receiving.cancel()

    async def close(self, *, grace_seconds: float | None = None) -> None:
        """End it; calls in flight have the grace, and fail then."""
        self.end(ConnectionEndedError(CLOSED))
        if self._client is not None:
            await self._client.close(grace_seconds=grace_seconds)

    @property
    def unavailable(self) -> str | None:
        """The reason why it cannot be called now; None while it can."""
        if (over := self._latest.over) is not None:
            return over.reason
        return None if self._listed is not None else "it has not listed its devices yet"

    # ------------------------------------------------------------ calls

    async def allocate(self, devices: Sequence[AllocatedDevice]) -> Edits:
        """
        Allocate the devices of one request, and return the edits of its containers.

        A device plugin knows containers and no claims: a request is one call with all of its
        devices, as a container is for the kubelet. Raises :class:`.DeviceFailedError`.
        """
        ids = [self._identity(device, index) for index, device in enumerate(devices)]
        request = pb.AllocateRequest(
            container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)]
        )
        answer = await self._call("Allocate", request, seconds=ALLOCATE_SECONDS)
        if self._pre_start_required:
            # The kubelet makes this call before each start of a container. A DRA driver does not
            # learn of these starts, so the call is made once.
            pre_start = pb.PreStartContainerRequest(devices_ids=ids)
            await self._call("PreStartContainer", pre_start, seconds=PRE_START_SECONDS)
        edits, annotations_lost = await self._edits_in(answer)
        if annotations_lost:
            note = (
                f"{self._plugin} answers Allocate with annotations that name no CDI devices; a "
                "claim cannot pass them to a container, so they are ignored, and the devices still "
                "work"
            )
            self._diagnostics.report("AnnotationsUnsupported", note, once=True)
        return edits

    async def _edits_in(self, answer: bytes) -> tuple[Edits, bool]:
        """Convert an answer, in a thread only if it is large or names directories."""
        read = partial(edits_in, answer, plugin=self._plugin, rights=self._rights)
        if len(answer) <= ANSWER_IN_LOOP_BYTES:
            with suppress(DirectoryError):
                return read(devices=replace(self._devices, walk=False))
        return await asyncio.to_thread(read, devices=self._devices)

    def _identity(self, device: AllocatedDevice, index: int) -> str:
        """Return the plugin's ID of a device."""
        listed = None if self._listed is None else self._listed.listed.get(device.name)
        if device.admin_access:
            # The kubelet never allocates a device that is in use, and plugins may rely on it.
            text = (
                "device plugins do not support adminAccess: Allocate expects a free device, but "
                "this device may be in use"
            )
        elif listed is None:
            text = f"{self._plugin} no longer lists it; delete the pod to get another device"
        else:
            return listed.identity
        raise DeviceFailedError(text, index=index)

    async def _call(self, method: str, request: Message, *, seconds: float) -> bytes:
        raw = request.SerializeToString()
        assert self._client is not None
        try:
            return await self._client.call(method, raw, timeout_seconds=seconds)
        except CallFailedError as error:
            text = f"ended during {method}" if error.may_be_lost else str(error)
            raise DeviceFailedError(f"{self._plugin} {text}", index=0) from None


def _ended(error: Exception) -> ConnectionEndedError:
    """Return why a stream has ended."""
    match error:
        case CallFailedError() if error.code is grpc.StatusCode.CANCELLED:
            return ConnectionEndedError(CLOSED)
        case CallFailedError():
            too_large = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            return ConnectionEndedError(f"it {error}", disorderly=too_large)
        case GarbageError() | TooManyDevicesError():
            what = f"it sent {error}" if isinstance(error, GarbageError) else str(error)
            text = f"{what}; this is a bug in the device plugin"
            return ConnectionEndedError(text, disorderly=True)
        case _:
            logger.error("device plugin's list cannot be parsed", exc_info=error)
            return ConnectionEndedError(f"its list cannot be parsed ({type(error).__name__})")
