"""The kubelet's side of a driver's sockets, and an engine whose answers a test holds back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drakit import ClaimReference
from drakit_nodeplugin.claims.answers import Answer, PrepareAnswer, PreparedDevice
from drakit_nodeplugin.kubelet.probe import local_channel
from drakit_proto.kubelet.dra.v1 import dra_pb2 as v1
from drakit_proto.kubelet.dra.v1 import dra_pb2_grpc as v1_grpc
from drakit_proto.kubelet.dra.v1beta1 import dra_pb2 as v1beta1
from drakit_proto.kubelet.dra.v1beta1 import dra_pb2_grpc as v1beta1_grpc
from drakit_proto.kubelet.drahealth.v1alpha1 import health_pb2, health_pb2_grpc
from drakit_proto.kubelet.pluginregistration.v1 import registration_pb2, registration_pb2_grpc
from tests.fakes.health import HealthSubscriber, health_version

VERSIONS = {"v1": (v1, v1_grpc), "v1beta1": (v1beta1, v1beta1_grpc)}


def reference(uid: str, *, namespace: str = "lab", name: str | None = None) -> ClaimReference:
    return ClaimReference(namespace=namespace, name=name or f"claim-{uid}", uid=uid)


class FakeKubelet:
    """
    A client of one driver: `find` waits for its registration socket, as the kubelet's watch does.

    `async with FakeKubelet(root) as kubelet` closes all connections at the end.
    """

    def __init__(self, root: Path) -> None:
        self.registry = root / "plugins_registry"
        self._channels: dict[Path, Any] = {}

    async def __aenter__(self) -> FakeKubelet:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    def sockets(self) -> list[Path]:
        """What a kubelet sees: dot files and anything but sockets is ignored."""
        if not self.registry.exists():
            return []
        found = self.registry.iterdir()
        return sorted(p for p in found if p.is_socket() and not p.name.startswith("."))

    def _channel(self, path: Path) -> Any:
        if path not in self._channels:
            self._channels[path] = local_channel(path)
        return self._channels[path]

    # ------------------------------------------------------------ registration

    async def get_info(self, path: Path) -> registration_pb2.PluginInfo:
        # Like the kubelet: a new connection for each registration.
        async with local_channel(path) as channel:
            return await registration_pb2_grpc.RegistrationStub(channel).GetInfo(
                registration_pb2.InfoRequest(), timeout=1
            )

    async def notify(self, path: Path, *, error: str | None = None) -> None:
        async with local_channel(path) as channel:
            await registration_pb2_grpc.RegistrationStub(channel).NotifyRegistrationStatus(
                registration_pb2.RegistrationStatus(
                    plugin_registered=error is None, error=error or ""
                ),
                timeout=5,
            )

    async def register(self) -> Path:
        """Register the only driver there is; give its DRA socket."""
        (path,) = self.sockets()
        info = await self.get_info(path)
        await self.notify(path)
        return Path(info.endpoint)

    # ------------------------------------------------------------ DRA

    async def prepare(
        self,
        dra: Path,
        *claims: ClaimReference,
        version: str = "v1",
        timeout_seconds: float = 10,
    ) -> Mapping[str, Any]:
        messages, stubs = VERSIONS[version]
        answer = await stubs.DRAPluginStub(self._channel(dra)).NodePrepareResources(
            messages.NodePrepareResourcesRequest(claims=_claims(messages, claims)),
            timeout=timeout_seconds,
        )
        return dict(answer.claims)

    async def unprepare(
        self,
        dra: Path,
        *claims: ClaimReference,
        version: str = "v1",
        timeout_seconds: float = 10,
    ) -> Mapping[str, str]:
        messages, stubs = VERSIONS[version]
        answer = await stubs.DRAPluginStub(self._channel(dra)).NodeUnprepareResources(
            messages.NodeUnprepareResourcesRequest(claims=_claims(messages, claims)),
            timeout=timeout_seconds,
        )
        return {uid: claim.error for uid, claim in answer.claims.items()}

    def watch_health(self, dra: Path) -> Any:
        """Open the v1alpha1 health stream; the call can be read, cancelled and awaited."""
        return health_pb2_grpc.DRAResourceHealthStub(self._channel(dra)).NodeWatchResources(
            health_pb2.NodeWatchResourcesRequest()
        )

    async def follow_health(
        self, registration: Path, *, version: str | None = None
    ) -> HealthSubscriber:
        """Follow the health of the driver that is registered there, as a kubelet of 1.37 does; or
        in a given version, advertised or not, as one of 1.36 does."""
        info = await self.get_info(registration)
        version = version or health_version(info.supported_versions)
        assert version is not None, "the driver advertises no health"
        return HealthSubscriber(self._channel(Path(info.endpoint)), version=version)


def _claims(messages: Any, claims: Sequence[ClaimReference]) -> list[Any]:
    return [messages.Claim(namespace=c.namespace, uid=c.uid, name=c.name) for c in claims]


class HeldClaims:
    """
    A `ClaimService` that answers at once, or for a held claim when the test lets it go.

    What it did is in `done`, in order: ``prepare a``, ``unprepare a``; `begun` is its beginnings.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.batches: list[int] = []
        self.done: list[str] = []
        self.errors: dict[str, str] = {}
        self.forgotten: set[str] = set()
        self.abandoned: list[str] = []
        self.surplus: set[str] = set()
        self.failure: Exception | None = None
        self._held: dict[str, asyncio.Event] = {}
        self._news = asyncio.Event()

    def hold(self, *uids: str) -> None:
        for uid in uids:
            self._held[uid] = asyncio.Event()

    def let_go(self, *uids: str) -> None:
        for uid in uids:
            self._held.pop(uid).set()

    async def until_begun(self, what: str) -> None:
        async with asyncio.timeout(5):
            while what not in self.begun:
                self._news.clear()
                await self._news.wait()

    async def until_done(self, what: str) -> None:
        async with asyncio.timeout(5):
            while what not in self.done:
                self._news.clear()
                await self._news.wait()

    async def prepare(self, claims: Sequence[ClaimReference], answer: Answer) -> None:
        await self._work("prepare", claims)
        for claim in claims:
            if claim.uid in self.errors:
                answer(claim.uid, PrepareAnswer(error=self.errors[claim.uid]))
            elif claim.uid not in self.forgotten:
                answer(claim.uid, PrepareAnswer(devices=(device(claim.uid),)))
        for uid in self.surplus:
            answer(uid, PrepareAnswer(devices=(device(uid),)))

    async def unprepare(self, claims: Sequence[ClaimReference], answer: Answer) -> None:
        await self._work("unprepare", claims)
        for claim in claims:
            answer(claim.uid, PrepareAnswer(error=self.errors.get(claim.uid)))

    def abandon(self, uid: str) -> None:
        self.abandoned.append(uid)

    async def _work(self, operation: str, claims: Sequence[ClaimReference]) -> None:
        self.batches.append(len(claims))
        self.begun += [f"{operation} {claim.uid}" for claim in claims]
        self._news.set()
        for claim in claims:
            if claim.uid in self._held:
                await self._held[claim.uid].wait()
        if self.failure is not None:
            raise self.failure
        self.done += [f"{operation} {claim.uid}" for claim in claims]
        self._news.set()


def device(uid: str) -> PreparedDevice:
    return PreparedDevice(
        requests=("main",),
        pool="node-1",
        device=f"cam-{uid}",
        cdi_ids=(f"camera.example.com/claim={uid}-0",),
        share_id="share-1",
    )
