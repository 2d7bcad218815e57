"""
The connection to the device plugin of one resource. It is established after the plugin registers,
replaced when the plugin registers again, and marked stopped when the plugin disappears.

As in the kubelet, a plugin whose stream has ended is unavailable until it registers again, and its
socket does not matter while the stream is open. Unlike the node plugin, the kubelet connects during
a registration, and rejects the registration if that fails. The node plugin responds to the
registration before it connects, and retries if the plugin is unreachable.

A :class:`PluginClient` makes the RPCs for one registration: GetDevicePluginOptions, ListAndWatch
and the allocation calls. A message that violates the contract becomes an error, and a large list is
parsed in a thread. A plugin that registers while it is connected gets a second client. Once the
second client has received a device list, it replaces the first one. The same
:class:`PluginConnection` continues, and no stop is reported.

Does not depend on claims that span resources, or on other resources.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial

import grpc
from google.protobuf.message import Message

from drakit.device import AllocatedDevice, Edits, Inventory
from drakit_daemon.tasks import cancelled_by_owner
from drakit_driver.runtime import endpoint as lifecycle
from drakit_driver.runtime.contract import ConnectionEndedError, EndpointListener, Update
from drakit_driver.runtime.endpoint import Lifecycle
from drakit_driver.runtime.failures import DeviceFailedError
from drakit_driver.runtime.latest_value import LatestValue, pause_after
from drakit_nodeplugin.endpoints.allowlist import Rights
from drakit_nodeplugin.endpoints.deviceplugin.messages import (
    DeviceRoom,
    ListedDevices,
    TooManyDevicesError,
    devices_in,
    edits_in,
    list_devices,
)
from drakit_nodeplugin.endpoints.deviceplugin.plugin_registration import Registration
from drakit_nodeplugin.endpoints.host_paths import DirectoryError, HostDeviceNodes, open_socket
from drakit_nodeplugin.endpoints.sources import Diagnostics
from drakit_nodeplugin.endpoints.wire import (
    CallFailedError,
    Client,
    GarbageError,
    parse,
    to_its_end,
)
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- client

CONNECT_SECONDS = 10.0
"""How long to wait, like the kubelet, until a plugin that has registered listens and returns its
options."""

CLOSED = "its connection was closed"

POLL_SECONDS = 0.1
"""How often to check for the socket of a plugin that has registered."""

ALLOCATE_SECONDS = 240.0
"""Time limit for Allocate. The kubelet does not set a limit. The call for a claim has a limit of
300 s."""

PRE_START_SECONDS = 30.0
"""The kubelet's limit for PreStartContainer."""

IN_LOOP_BYTES = 16 * 1024
"""Maximum size of a message to parse in the daemon's loop: about 250 devices, which take about 2.5
ms. Larger messages are parsed in a thread."""

RESPONSE_IN_LOOP_BYTES = 2 * 1024
"""Maximum size of an Allocate response to convert in the daemon's loop. Converting it takes less
than a tenth of a millisecond, and twice as long in a thread."""

_SERVICE = "v1beta1.DevicePlugin"


class PluginClient:
    """A client of one device plugin. Call `open`, then `next` repeatedly, then `close`."""

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
        """The list that was last received."""
        self._receiving: asyncio.Task[None] | None = None
        self._listed: ListedDevices | None = None
        self._first: Inventory | None = None

    # ------------------------------------------------------------ life cycle

    async def open(self) -> None:
        """Connect. Raises :class:`ConnectionEndedError`. The caller must always close the
        client."""
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
        """Connect to the plugin's socket. A plugin may create its socket only after it has
        registered."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                while True:
                    if (client := await self._try_to_connect()) is not None:
                        return client
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise ConnectionEndedError(
                f"it registered with the socket {self.registration.socket.name}, but does not "
                f"respond on it"
            ) from None

    async def _try_to_connect(self) -> Client | None:
        """Connect to the current socket, or return None if it does not respond. The plugin may
        still replace it with a new socket at the same path."""
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
        """Query the plugin's options. Raises :class:`CallFailedError` and
        :class:`ConnectionEndedError`."""
        try:
            answer = await client.call(
                "GetDevicePluginOptions", b"", timeout_seconds=CONNECT_SECONDS
            )
            options = parse(pb.DevicePluginOptions, answer)
        except CallFailedError as error:
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                # The plugin does not implement the call, so the options in the registration apply.
                return
            raise
        except GarbageError:
            raise ConnectionEndedError(
                "it responded to GetDevicePluginOptions with something that is not a v1beta1 "
                "message; this is a bug in the device plugin",
                disorderly=True,
            ) from None
        self._pre_start_required = options.pre_start_required

    async def read_first(self, *, seconds: float) -> bool:
        """Read the first list, and keep it for `next`. Return whether the list arrived before the
        timeout. Raises :class:`ConnectionEndedError`."""
        try:
            async with asyncio.timeout(seconds):
                await self._latest.wait()
        except TimeoutError:
            return False
        # Don't use a timeout here, because a cancellation could lose the list.
        self._first = await self.next()
        return True

    async def next(self) -> Inventory:
        """Wait for the next device list. Raises :class:`ConnectionEndedError`."""
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
        for sentence in listed.rejected:
            self._diagnostics.report("DeviceRejected", sentence, once=True)
        return listed.inventory

    def hold(self, seconds: float) -> None:
        """Don't read the next list for at least this long."""
        self._latest.hold(seconds)

    async def _receive(self) -> None:
        """Receive device lists as they arrive. A list that is replaced before it is read is never
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
        """End the client because its stream failed with this error. Return the first error that
        ended the client."""
        if (over := self._latest.over) is not None:
            return over
        over = _ended(error)
        self._latest.end(over)
        if over.disorderly:
            text = f"{self._plugin} is unavailable: {over.reason}"
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
        """End the client: `open` and `next` raise this error. Calls continue until `close`."""
        self._latest.end(error)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._receiving is not None:
            self._receiving.cancel()

    async def close(self, *, grace_seconds: float | None = None) -> None:
        """End the client. Calls in flight fail after the grace period."""
        self.end(ConnectionEndedError(CLOSED))
        if self._client is not None:
            await self._client.close(grace_seconds=grace_seconds)

    @property
    def unavailable(self) -> str | None:
        """The reason why the plugin cannot be called now, or None."""
        if (over := self._latest.over) is not None:
            return over.reason
        return None if self._listed is not None else "it has not listed its devices yet"

    # ------------------------------------------------------------ calls

    async def allocate(self, devices: Sequence[AllocatedDevice]) -> Edits:
        """
        Allocate the devices of one request, and return the edits for its containers.

        The protocol has containers but no claims. Therefore, a request results in one call with all
        of its devices, as for one container in the kubelet. Raises :class:`.DeviceFailedError`.
        """
        ids = [self._identity(device, index) for index, device in enumerate(devices)]
        request = pb.AllocateRequest(
            container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)]
        )
        answer = await self._call("Allocate", request, seconds=ALLOCATE_SECONDS)
        if self._pre_start_required:
            # The kubelet makes this call each time before it starts a container. Call only once,
            # because the kubelet does not notify DRA drivers when it starts a container.
            pre_start = pb.PreStartContainerRequest(devices_ids=ids)
            await self._call("PreStartContainer", pre_start, seconds=PRE_START_SECONDS)
        edits, annotations_lost = await self._edits_in(answer)
        if annotations_lost:
            note = (
                f"{self._plugin} responds to Allocate with annotations that do not name CDI "
                "devices; a claim cannot pass them to a container, so they are ignored, and the "
                "devices still work"
            )
            self._diagnostics.report("AnnotationsUnsupported", note, once=True)
        return edits

    async def _edits_in(self, answer: bytes) -> tuple[Edits, bool]:
        """Convert a response, in a thread if it is large or names directories."""
        read = partial(edits_in, answer, plugin=self._plugin, rights=self._rights)
        if len(answer) <= RESPONSE_IN_LOOP_BYTES:
            with suppress(DirectoryError):
                return read(devices=replace(self._devices, walk=False))
        return await asyncio.to_thread(read, devices=self._devices)

    def _identity(self, device: AllocatedDevice, index: int) -> str:
        """Return the plugin's ID of a device."""
        listed = None if self._listed is None else self._listed.listed.get(device.name)
        if device.admin_access:
            # Refuse a device that is in use: the kubelet never allocates such a device, and plugins
            # may rely on that.
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
            return await to_its_end(self._client.call(method, raw, timeout_seconds=seconds))
        except CallFailedError as error:
            text = f"ended during {method}" if error.may_be_lost else str(error)
            raise DeviceFailedError(f"{self._plugin} {text}", index=0) from None


def _ended(error: Exception) -> ConnectionEndedError:
    """Return the reason why a stream has ended."""
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
            return ConnectionEndedError(
                "an internal error prevented the node plugin from parsing its list; see the log of "
                "the node plugin on this node"
            )


# ---------------------------------------------------------------- connection

LIST_SECONDS = 2.0
"""Maximum time to wait for a new connection to list its devices before it is reported as
unavailable."""

REPLACE_SECONDS = 1.0
"""Minimum time between two attempts to connect, even if a plugin registers more often."""

REPLACED_SECONDS = 5.0
"""Grace period for calls in flight of a client that is replaced."""


class PluginConnection:
    """A connection to a device plugin. It begins with the first client, and ends when a client ends
    without a replacement."""

    def __init__(self, plugin: DevicePlugin, client: PluginClient) -> None:
        self._plugin = plugin
        self._replacing = asyncio.create_task(self._replace())
        self.client = client
        """The client to call."""

    @property
    def unavailable(self) -> str | None:
        """The reason why calls are currently impossible, or None."""
        return self.client.unavailable

    async def inventories(self) -> AsyncIterator[Update]:
        """Implement :meth:`.Connection.inventories`."""
        loop = asyncio.get_running_loop()
        while True:
            client = self.client
            try:
                inventory = await client.next()
            except ConnectionEndedError:
                if client is self.client:
                    raise
                continue
            if client is self.client:
                began_at = loop.time()
                yield inventory
                # The receiver has processed the last list by the time it requests the next one, so
                # this measures its processing time.
                client.hold(pause_after(loop.time() - began_at))

    async def close(self) -> None:
        """End the connection."""
        self._replacing.cancel()
        await asyncio.wait({self._replacing})
        await self.client.close()

    async def _replace(self) -> None:
        """Replace the client whenever the plugin registers again."""
        while True:
            registration = await self._plugin.next_registration(untried=True)
            try:
                client = await self._plugin.open(
                    registration, list_seconds=CONNECT_SECONDS, must_list=True
                )
            except ConnectionEndedError as error:
                # The life cycle tries the registration again once the current client has ended.
                facts = {"endpoint": registration.resource, "error": error.reason}
                logger.warning("device plugin registered again and is unreachable", extra=facts)
            else:
                replaced, self.client = self.client, client
                self._plugin.retire(replaced)
            await asyncio.sleep(REPLACE_SECONDS)


class DevicePlugin:
    """The device plugin of one resource, whether or not it is connected."""

    def __init__(
        self,
        resource: str,
        *,
        listener: EndpointListener,
        room: DeviceRoom,
        new_client: Callable[[Registration], PluginClient],
    ) -> None:
        self.resource = resource
        self._room = room
        self._new_client = new_client
        self._changed = asyncio.Event()
        """Set when there may be a new registration to connect to."""
        self._registration: Registration | None = None
        """The last registration. None before the first one."""
        self._barred: str | None = None
        self._opening: PluginClient | None = None
        """A client that is being connected. There are never two such clients."""
        self._connection: PluginConnection | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._lifecycle = Lifecycle(resource, self._connect, listener=listener, pause=self._pause)

    # ------------------------------------------------------------ registrations

    def register(self, registration: Registration) -> None:
        """Use a new registration, which replaces the previous one."""
        self._registration = registration
        opening = self._opening
        if opening is not None and opening.registration.socket != registration.socket:
            opening.end(ConnectionEndedError("it registered again"))
        self._changed.set()

    def bar(self, reason: str) -> None:
        """Prevent the use of the plugin, for this reason, until `unbar` is called. Its registration
        is kept."""
        self._barred = reason
        self._end(reason)

    def unbar(self) -> None:
        """Allow the use of the plugin again, with its last registration."""
        if self._barred is None:
            return
        self._barred = None
        if self._registration is not None:
            self._registration.tried = self._registration.used = False
        self._changed.set()

    def _end(self, reason: str) -> None:
        error = ConnectionEndedError(reason)
        if self._connection is not None:
            self._connection.client.end(error)
        if self._opening is not None:
            self._opening.end(error)

    def _wanted(self, *, untried: bool = False) -> Registration | None:
        """Return the registration to connect to, or None if there is none. If `untried`, ignore a
        registration that has been tried."""
        wanted = self._registration
        if wanted is None or wanted.used or self._barred is not None:
            return None
        return None if untried and wanted.tried else wanted

    async def next_registration(self, *, untried: bool = False) -> Registration:
        """Wait for a registration to connect to. If `untried`, wait for a registration that has not
        been tried yet."""
        # A single event is sufficient, because there is only one waiter at a time: the life cycle
        # while there is no connection, and otherwise the connection.
        while (wanted := self._wanted(untried=untried)) is None:
            self._changed.clear()
            await self._changed.wait()
        return wanted

    # ------------------------------------------------------------ state

    @property
    def barred(self) -> str | None:
        """The reason why the plugin must not be used, or None."""
        return self._barred

    @property
    def unavailable(self) -> str | None:
        """The reason why the plugin cannot be called now, or None."""
        if self._barred is not None:
            return self._barred
        reason = self._lifecycle.stop_reason
        if reason is not None and self._connection is None and self._wanted() is None:
            return f"{reason}, and it has not registered since"
        return reason

    async def allocate(self, devices: Sequence[AllocatedDevice]) -> Edits:
        """Allocate the devices of one request, unless the plugin is unavailable. Raises
        :class:`.DeviceFailedError`."""
        assert self._connection is not None
        return await self._connection.client.allocate(devices)

    # ------------------------------------------------------------ life cycle

    async def run(self) -> None:
        """Keep the plugin connected until canceled."""
        await self._lifecycle.start()
        await self._lifecycle.run()

    async def close(self) -> None:
        """Close the connection. Called after :meth:`run` has ended."""
        await self._lifecycle.close()
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        """Wait before the next connection. The shortest delay is skipped, because the plugin must
        register first anyway. A new registration shortens any other delay."""
        if seconds <= lifecycle.RECONNECT_SECONDS[0]:
            return
        shortest = min(seconds, REPLACE_SECONDS)
        await asyncio.sleep(shortest)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds - shortest):
                await self.next_registration(untried=True)

    async def _connect(self) -> PluginConnection:
        """Wait for a registration, and connect."""
        self._connection = None
        self._room.release(self.resource)
        while True:
            registration = await self.next_registration()
            try:
                client = await self.open(registration, list_seconds=LIST_SECONDS)
            except ConnectionEndedError:
                if self._wanted(untried=True) is None:
                    raise
                # The plugin has registered again in the meantime.
                await asyncio.sleep(REPLACE_SECONDS)
            else:
                self._connection = PluginConnection(self, client)
                return self._connection

    async def open(
        self, registration: Registration, *, list_seconds: float, must_list: bool = False
    ) -> PluginClient:
        """Connect, and wait up to `list_seconds` for the device list. Raises
        :class:`ConnectionEndedError`. If `must_list` is set, a missing list is also an error."""
        registration.tried = True
        self._opening = client = self._new_client(registration)
        is_open = False
        try:
            await client.open()
            if not await client.read_first(seconds=list_seconds) and must_list:
                raise ConnectionEndedError("it does not list its devices")
            is_open = registration.used = True
        except ConnectionEndedError:
            raise
        except Exception as error:  # an unexpected error of gRPC
            logger.exception("device plugin cannot be reached", extra={"endpoint": self.resource})
            reason = "it cannot be reached; see the log of the node plugin on this node"
            raise ConnectionEndedError(reason) from error
        finally:
            self._opening = None
            if not is_open:
                await client.close()
        return client

    def retire(self, client: PluginClient) -> None:
        """Close a client that was replaced. Its calls in flight have a grace period."""
        client.end(ConnectionEndedError("it registered again"))
        task = asyncio.create_task(client.close(grace_seconds=REPLACED_SECONDS))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
