"""
The kubelet side of the driver sockets: registration, prepare, unprepare and health.

    async with FakeKubelet(root) as kubelet:
        dra = await kubelet.register()
        answers = await kubelet.prepare(dra, claim)

For each health stream, the module records the health that the pod status would show, and how long
it stays valid.

Does not depend on the programs that serve the sockets: it behaves like a kubelet, and does not
check their responses.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from drakit.device import ClaimReference
from drakit_daemon.tasks import cancelled_by_owner
from drakit_proto.kubelet.dra.v1 import dra_pb2 as v1
from drakit_proto.kubelet.dra.v1 import dra_pb2_grpc as v1_grpc
from drakit_proto.kubelet.dra.v1beta1 import dra_pb2 as v1beta1
from drakit_proto.kubelet.dra.v1beta1 import dra_pb2_grpc as v1beta1_grpc
from drakit_proto.kubelet.drahealth.v1 import health_pb2 as health_v1
from drakit_proto.kubelet.drahealth.v1 import health_pb2_grpc as health_v1_grpc
from drakit_proto.kubelet.drahealth.v1alpha1 import health_pb2 as health_v1alpha1
from drakit_proto.kubelet.drahealth.v1alpha1 import health_pb2_grpc as health_v1alpha1_grpc
from drakit_proto.kubelet.pluginregistration.v1 import registration_pb2, registration_pb2_grpc

# ---------------------------------------------------------------- health

_HEALTH_VERSIONS: Mapping[str, tuple[Any, Any]] = {
    "v1": (health_v1, health_v1_grpc),
    "v1alpha1": (health_v1alpha1, health_v1alpha1_grpc),
}
DEFAULT_TIMEOUT_SECONDS = 30
"""How long a report without a timeout of its own is valid for the kubelet."""


def health_version(supported: Iterable[str]) -> str | None:
    """Choose a health API version as the kubelet does: by the kubelet's preference, regardless of
    the order that the driver advertises."""
    advertised = set(supported)
    for version in _HEALTH_VERSIONS:
        if f"{version}.DRAResourceHealth" in advertised:
            return version
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The kubelet's health record for one device."""

    status: str
    message: str
    until: float
    """The time until which the report is valid (loop clock)."""


class HealthSubscriber:
    """
    Reads one health stream. A report is valid for the period that it contains, counted from its
    receipt.

    Use it with `async with`. When the stream ends, all reports are dropped.
    """

    def __init__(self, channel: Any, *, version: str) -> None:
        self.version = version
        self.messages: list[dict[tuple[str, str], tuple[str, str]]] = []
        """The received messages. Each is a mapping from pool and device to status and message."""

        self.ended: bool = False
        self._messages, stubs = _HEALTH_VERSIONS[version]
        self.call: Any = stubs.DRAResourceHealthStub(channel).NodeWatchResources(
            self._messages.NodeWatchResourcesRequest()
        )
        self._known: dict[tuple[str, str], Report] = {}
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def __aenter__(self) -> HealthSubscriber:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.call.cancel()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    def status(self, device: str, *, pool: str = "node-1") -> str:
        """Return the health of a device as it would appear in the pod status."""
        report = self._known.get((pool, device))
        if report is None or asyncio.get_running_loop().time() > report.until:
            return "Unknown"
        return report.status

    def message(self, device: str, *, pool: str = "node-1") -> str:
        """Return the health message of a device as it would appear in the pod status."""
        report = self._known.get((pool, device))
        return "" if report is None else report.message

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for messages, or for the end of the stream, until a condition is met."""
        async with asyncio.timeout(5):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def _read(self) -> None:
        try:
            async for response in self.call:
                self._receive(response)
                self._news.set()
        finally:
            self._known.clear()
            self.ended = True
            self._news.set()

    def _receive(self, response: Any) -> None:
        now = asyncio.get_running_loop().time()
        message: dict[tuple[str, str], tuple[str, str]] = {}
        for health in response.devices:
            key = health.device.pool_name, health.device.device_name
            status = self._messages.HealthStatus.Name(health.health).capitalize()
            seconds = health.health_check_timeout_seconds
            self._known[key] = Report(
                status=status,
                message=health.message,
                until=now + (seconds if seconds > 0 else DEFAULT_TIMEOUT_SECONDS),
            )
            message[key] = status, health.message
        self.messages.append(message)


# ---------------------------------------------------------------- the kubelet

_VERSIONS: Mapping[str, tuple[Any, Any]] = {"v1": (v1, v1_grpc), "v1beta1": (v1beta1, v1beta1_grpc)}

GET_INFO_SECONDS = 1.0
"""A kubelet's deadline for GetInfo."""

NOTIFY_SECONDS = 5.0
"""A kubelet's deadline for the call that notifies a driver of its registration."""

POLL_SECONDS = 0.1
"""How often to check whether a registration socket still exists. A kubelet closes its connection
within a second after the socket is removed."""


class FakeKubelet:
    """
    A kubelet that calls the driver sockets below a root directory::

        async with FakeKubelet(root) as kubelet:
            dra = await kubelet.register()
            answers = await kubelet.prepare(dra, claim)

    Each call raises ``grpc.aio.AioRpcError`` if the driver returns an error or exceeds the timeout.
    When the registration socket of a registered driver is removed, the kubelet closes its
    connection to that driver, and calls in flight end with the code ``CANCELLED``.
    """

    def __init__(self, root: Path) -> None:
        self.registry: Path = root / "plugins_registry"
        self._channels: dict[Path, grpc.aio.Channel] = {}
        self._endpoints: dict[Path, Path] = {}
        """The DRA socket that each driver returned in GetInfo, keyed by registration socket."""
        self._followers: dict[Path, asyncio.Task[None]] = {}
        """A task for each registered driver, keyed by registration socket."""

    async def __aenter__(self) -> FakeKubelet:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections, like a kubelet that stops. Later calls connect again."""
        followers, self._followers = self._followers, {}
        for follower in followers.values():
            follower.cancel()
        await asyncio.gather(*followers.values(), return_exceptions=True)
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def sockets(self) -> list[Path]:
        """Return the registration sockets. Names that begin with a dot are ignored, as in the
        kubelet."""
        if not self.registry.exists():
            return []
        found = self.registry.iterdir()
        return sorted(p for p in found if p.is_socket() and not p.name.startswith("."))

    def _channel(self, path: Path) -> grpc.aio.Channel:
        if path not in self._channels:
            self._channels[path] = _connect(path)
        return self._channels[path]

    # ------------------------------------------------------------ registration

    async def get_info(self, path: Path) -> registration_pb2.PluginInfo:
        """Call GetInfo at a registration socket."""
        async with _connect(path) as channel:
            info = await registration_pb2_grpc.RegistrationStub(channel).GetInfo(
                registration_pb2.InfoRequest(), timeout=GET_INFO_SECONDS
            )
        self._endpoints[path] = Path(info.endpoint)
        return info

    async def notify(self, path: Path, *, error: str | None = None) -> None:
        """Notify a driver that it is registered, or that its registration failed."""
        async with _connect(path) as channel:
            await registration_pb2_grpc.RegistrationStub(channel).NotifyRegistrationStatus(
                registration_pb2.RegistrationStatus(
                    plugin_registered=error is None, error=error or ""
                ),
                timeout=NOTIFY_SECONDS,
            )
        if (follower := self._followers.pop(path, None)) is not None:
            follower.cancel()
        if error is None and path in self._endpoints:
            follow = self._follow(path, self._endpoints[path])
            self._followers[path] = asyncio.create_task(follow, name=f"follow {path.name}")

    async def _follow(self, registration: Path, dra: Path) -> None:
        """Close the connection to a driver when its registration socket is removed."""
        identity = _identity(registration)
        while identity is not None and _identity(registration) == identity:
            await asyncio.sleep(POLL_SECONDS)
        if (channel := self._channels.pop(dra, None)) is not None:
            await channel.close()

    async def register(self) -> Path:
        """Register the driver whose registration socket is in the root directory. Return the
        path of its DRA socket. Raises ValueError unless there is exactly one driver."""
        (path,) = self.sockets()
        info = await self.get_info(path)
        await self.notify(path)
        return Path(info.endpoint)

    # ------------------------------------------------------------ DRA

    async def prepare(
        self, dra: Path, *claims: ClaimReference, version: str = "v1", timeout_seconds: float = 10
    ) -> Mapping[str, Any]:
        """Call NodePrepareResources. Return the results, keyed by claim UID, as protobuf
        messages."""
        return await self._call("NodePrepareResources", dra, claims, version, timeout_seconds)

    async def unprepare(
        self, dra: Path, *claims: ClaimReference, version: str = "v1", timeout_seconds: float = 10
    ) -> Mapping[str, str]:
        """Call NodeUnprepareResources. Return the errors, keyed by claim UID. An empty string means
        success."""
        answers = await self._call("NodeUnprepareResources", dra, claims, version, timeout_seconds)
        return {uid: claim.error for uid, claim in answers.items()}

    async def _call(
        self, method: str, dra: Path, claims: Sequence[ClaimReference], version: str, timeout: float
    ) -> dict[str, Any]:
        messages, stubs = _VERSIONS[version]
        given = [messages.Claim(namespace=c.namespace, uid=c.uid, name=c.name) for c in claims]
        request = getattr(messages, f"{method}Request")(claims=given)
        call = getattr(stubs.DRAPluginStub(self._channel(dra)), method)(request, timeout=timeout)
        return dict((await _answer(call)).claims)

    # ------------------------------------------------------------ health

    def watch_health(self, dra: Path) -> Any:
        """Open the health stream of version v1alpha1. Return the gRPC call."""
        return health_v1alpha1_grpc.DRAResourceHealthStub(self._channel(dra)).NodeWatchResources(
            health_v1alpha1.NodeWatchResourcesRequest()
        )

    async def follow_health(
        self, registration: Path, *, version: str | None = None
    ) -> HealthSubscriber:
        """Subscribe to the health of a driver, given its registration socket. By default, use the
        health API version that the driver advertises."""
        info = await self.get_info(registration)
        version = version or health_version(info.supported_versions)
        assert version is not None, "the driver advertises no health"
        return HealthSubscriber(self._channel(Path(info.endpoint)), version=version)


def _connect(path: Path) -> grpc.aio.Channel:
    """Connect as the kubelet does, with "localhost" as the authority."""
    return grpc.aio.insecure_channel(
        f"unix:{path}", options=[("grpc.default_authority", "localhost")]
    )


async def _answer(call: Any) -> Any:
    """Return the response to a call. Report a closed connection as an error of the call, not as a
    cancellation of the caller."""
    try:
        return await call
    except asyncio.CancelledError:
        if cancelled_by_owner():
            raise
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.CANCELLED,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(),
            details="the connection is closing",
        ) from None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
