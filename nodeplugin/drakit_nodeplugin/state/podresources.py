"""
The client of the kubelet's podresources API v1, which lists the devices of pods.

A process has one client. The kubelet allows 100 calls per second in bursts of 10 for all clients
together, and rejects the rest. Therefore, the client makes one call of each kind at a time, and
shares the response for a second.

:mod:`drakit_nodeplugin.claims.kubelet_claims` interprets listed and missing claims. The module does
not depend on the checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc
import grpc.aio

from drakit_daemon.logs import ProblemLog

if TYPE_CHECKING:
    from drakit_proto.kubelet.podresources.v1.podresources_pb2 import ListPodResourcesResponse
    from drakit_proto.kubelet.podresources.v1.podresources_pb2_grpc import (
        PodResourcesListerAsyncStub,
    )

logger = logging.getLogger(__name__)

RESPONSE_SECONDS = 5.0
"""Time limit for a call. The kubelet responds from memory, so if it takes longer, it is starting or
hanging."""

FRESH_SECONDS = 1.0
"""How long a response is shared. All drivers check for stale claims at the same time, so one second
merges their calls. It is shorter than the time between any two responses that must agree."""

_MAX_BYTES = 16 * 1024 * 1024
"""Maximum size of a response: the same as in the kubelet's own client. gRPC's default is 4 MiB."""

_NO_POD = "drakit.dev-probe"
"""A name that no pod has. The response only shows whether the kubelet implements the call."""

ResponseT = TypeVar("ResponseT")

_Call = Callable[[], Coroutine[Any, Any, ResponseT]]


class PodResourcesError(Exception):
    """The kubelet did not return a usable response. The message is a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodName:
    """A pod as listed by the kubelet, without its UID."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def own_pod(environment: Mapping[str, str]) -> PodName | None:
    """Return the pod of this process, from the variables that the chart sets with the downward
    API."""
    namespace, name = environment.get("POD_NAMESPACE"), environment.get("POD_NAME")
    return PodName(namespace=namespace, name=name) if namespace and name else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedDevice:
    """A container's device from a claim, as listed by the kubelet."""

    namespace: str
    """The namespace of the claim and of the pod."""

    pod: str
    claim: str
    """The claim name."""

    driver: str
    pool: str
    device: str
    share_id: str | None
    cdi_names: tuple[str, ...]
    """The qualified CDI names, including the names of the driver's devices that precede this one in
    the claim."""


class PodView(Enum):
    """Whether a pod list from the kubelet is complete."""

    COMPLETE = "complete"
    """The list contains the node plugin's own pod, and therefore all pods on the node."""

    PARTIAL = "partial"
    """The node plugin's own pod is missing from the list. The kubelet has not read its pods yet, so
    a missing claim proves nothing, however long that lasts."""

    UNKNOWN = "unknown"
    """There is no response, or the node plugin does not run in a pod. A claim that is listed
    anyway, for example in the kubelet's state file, is in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodList:
    """The devices that containers have from claims, and whether the kubelet's list is complete."""

    devices: tuple[ListedDevice, ...]
    """The devices from claims."""

    resources: frozenset[str]
    """The device manager resources of which these pods have devices."""

    pods: PodView
    """Whether the list is complete. UNKNOWN if this process does not run in a pod."""

    asked_at: float
    """The time of the call (loop clock). Two checks that share a response are treated as one
    observation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceManagerResources:
    """The resources of the kubelet's device manager, from one of its responses."""

    resources: Mapping[str, bool]
    """The resources, with True if the kubelet serves the resource, and False if containers only
    still hold its devices."""

    unknown: str | None = None
    """The reason why the response is incomplete, or None."""


class PodResources:
    """
    The client of one kubelet, for one event loop.

    It connects for each call, because calls are seconds apart, and a kubelet that restarts creates
    a new socket.
    """

    def __init__(
        self,
        socket: Path,
        *,
        own_pod: PodName | None,
        timeout_seconds: float = RESPONSE_SECONDS,
        fresh_seconds: float = FRESH_SECONDS,
    ) -> None:
        """Create a client. `own_pod` is the pod of this process. A list that contains this pod is
        complete. If `own_pod` is None, because the process does not run in a pod, no list is
        complete."""
        self._socket = socket
        self._own_pod = own_pod
        self._timeout_seconds = timeout_seconds
        self._knows_claims = False
        self._logs = {
            source: ProblemLog(
                logger,
                "the kubelet's podresources cannot be used",
                recovered="the kubelet's podresources can be used again",
                facts={"source": source},
            )
            for source in ("claims", "pods", "resources")
        }
        self._pods = _Shared(self._list, fresh_seconds=fresh_seconds)
        self._served = _Shared(self._allocatable, fresh_seconds=fresh_seconds)
        self._has_get = _Shared(self._get, fresh_seconds=fresh_seconds)

    async def claims(self) -> PodList:
        """
        Return the devices that containers have from claims, for all drivers.

        Raises :class:`PodResourcesError`, including when the kubelet is too old to list claims: an
        empty list would then mean that no claim is in use.
        """
        listed = await self._pods.get()
        if not self._knows_claims:
            self._knows_claims = bool(listed.devices) or await self._has_get.get()
        problem = None
        if not self._knows_claims:
            problem = (
                f"the kubelet at {self._socket} does not list the claims of its containers; this "
                f"needs Kubernetes 1.34, or the feature gates KubeletPodResourcesDynamicResources "
                f"and KubeletPodResourcesGet"
            )
        self._logs["claims"].report(problem)
        if problem is not None:
            raise PodResourcesError(problem)
        return listed

    async def device_manager(self) -> DeviceManagerResources:
        """Return the resources of the kubelet's device manager. Raises PodResourcesError."""
        served = await self._served.get()
        listed = await self._pods.get()
        return DeviceManagerResources(
            # These resources do not include devices from claims.
            resources=dict.fromkeys(listed.resources, False) | dict.fromkeys(served, True),
            unknown=self.incomplete(listed),
        )

    def incomplete(self, listed: PodList) -> str | None:
        """Return the reason why pods may be missing from a list, or None."""
        if listed.pods is PodView.UNKNOWN:
            return (
                "the node plugin does not know which pod it runs in; set POD_NAMESPACE and "
                "POD_NAME by the downward API"
            )
        if listed.pods is PodView.PARTIAL:
            return (
                f"the kubelet does not list the node plugin's own pod {self._own_pod}, so it has "
                f"not read its pods from the API server yet"
            )
        return None

    # ------------------------------------------------------------ calls

    async def _list(self) -> PodList:
        from drakit_proto.kubelet.podresources.v1 import podresources_pb2 as pb

        asked_at = asyncio.get_running_loop().time()
        async with self._stub("pods") as stub:
            answer = await stub.List(pb.ListPodResourcesRequest(), timeout=self._timeout_seconds)
        listed = PodList(
            devices=tuple(_devices(answer)),
            resources=_resources(answer),
            pods=self._view(answer),
            asked_at=asked_at,
        )
        self._logs["pods"].report(self.incomplete(listed))
        return listed

    async def _allocatable(self) -> frozenset[str]:
        from drakit_proto.kubelet.podresources.v1 import podresources_pb2 as pb

        async with self._stub("resources") as stub:
            answer = await stub.GetAllocatableResources(
                pb.AllocatableResourcesRequest(), timeout=self._timeout_seconds
            )
        self._logs["resources"].report(None)
        return frozenset(d.resource_name for d in answer.devices if d.device_ids)

    async def _get(self) -> bool:
        """
        Check whether a list without any claim comes from a kubelet that lists claims.

        The list itself does not show this, but the call for a single pod was added in the same
        release. A kubelet without that call responds that it is disabled or unknown, instead of
        "not found". Other errors, such as from the rate limit, prove nothing about the kubelet's
        version.
        """
        from drakit_proto.kubelet.podresources.v1 import podresources_pb2 as pb

        request = pb.GetPodResourcesRequest(pod_name=_NO_POD, pod_namespace=_NO_POD)
        async with self._stub("pods") as stub:
            try:
                await stub.Get(request, timeout=self._timeout_seconds)
            except grpc.aio.AioRpcError as error:
                if "not found" in (error.details() or ""):
                    return True
                # Errors without a specific code arrive as UNKNOWN.
                if error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED):
                    return False
                raise
        return True

    def _view(self, answer: ListPodResourcesResponse) -> PodView:
        own = self._own_pod
        if own is None:
            return PodView.UNKNOWN
        listed = any(
            p.name == own.name and p.namespace == own.namespace for p in answer.pod_resources
        )
        return PodView.COMPLETE if listed else PodView.PARTIAL

    @contextlib.asynccontextmanager
    async def _stub(self, source: str) -> AsyncGenerator[PodResourcesListerAsyncStub]:
        """Connect for one call. If the call fails, log the error and raise PodResourcesError."""
        # Import lazily to save memory: a node without claims never calls this method.
        from drakit_proto.kubelet.podresources.v1 import podresources_pb2_grpc

        options = [
            ("grpc.default_authority", "localhost"),
            ("grpc.max_receive_message_length", _MAX_BYTES),
            # Otherwise, a channel can reuse the connection of an earlier channel, which may be
            # waiting for its next attempt although the kubelet is listening again.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        target = f"unix:{self._socket}"
        try:
            async with grpc.aio.insecure_channel(target, options=options) as channel:
                yield podresources_pb2_grpc.PodResourcesListerStub(channel)
        except grpc.aio.AioRpcError as error:
            code = error.code().name.lower().replace("_", " ")
            text = (
                f"the kubelet's podresources at {self._socket} cannot be read: {code} "
                f"({error.details()})"
            )
            self._logs[source].report(text)
            raise PodResourcesError(text) from None


class _Shared(Generic[ResponseT]):
    """Makes one call at a time, and briefly shares its result or failure."""

    def __init__(self, call: _Call[ResponseT], *, fresh_seconds: float) -> None:
        self._call = call
        self._fresh_seconds = fresh_seconds
        self._running: asyncio.Task[ResponseT] | None = None

    async def get(self) -> ResponseT:
        """Wait for the result. Cancellation ends the wait, but not the call."""
        if self._running is None:
            self._running = asyncio.create_task(self._call())
            self._running.add_done_callback(self._answered)
        return await asyncio.shield(self._running)

    def _answered(self, task: asyncio.Task[ResponseT]) -> None:
        if not task.cancelled():
            task.exception()  # retrieve the exception here, because all waiters may be canceled
        # Don't keep a list of thousands of devices in memory until the next check.
        task.get_loop().call_later(self._fresh_seconds, self._forget)

    def _forget(self) -> None:
        self._running = None


def _devices(answer: ListPodResourcesResponse) -> Iterator[ListedDevice]:
    for pod in answer.pod_resources:
        for container in pod.containers:
            for claim in container.dynamic_resources:
                for resource in claim.claim_resources:
                    yield ListedDevice(
                        namespace=sys.intern(claim.claim_namespace),
                        pod=sys.intern(pod.name),
                        claim=claim.claim_name,
                        driver=sys.intern(resource.driver_name),
                        pool=sys.intern(resource.pool_name),
                        device=resource.device_name,
                        share_id=resource.share_id if resource.HasField("share_id") else None,
                        cdi_names=tuple(cdi.name for cdi in resource.cdi_devices),
                    )


def _resources(answer: ListPodResourcesResponse) -> frozenset[str]:
    return frozenset(
        devices.resource_name
        for pod in answer.pod_resources
        for container in pod.containers
        for devices in container.devices
        if devices.device_ids
    )
