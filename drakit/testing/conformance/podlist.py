"""
The kubelet's podresources socket: the node plugin's own pod, and containers that use claims.

A node plugin reads the claims in use from it, and relies on lists that contain its own pod. It must
not know rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from drakit.testing.conformance.facts import ClaimUnderTest, PrepareResult
from drakit_proto.kubelet.podresources.v1 import podresources_pb2 as pb
from drakit_proto.kubelet.podresources.v1 import podresources_pb2_grpc as pb_grpc

OWN_POD: Mapping[str, str] = {"POD_NAMESPACE": "drakit-system", "POD_NAME": "drakit-nodeplugin-kit"}
"""The node plugin's own pod, as its environment names it."""


class PodList:
    """Serves the socket: ``async with PodList(path) as pods``."""

    def __init__(self, socket: Path) -> None:
        self._socket: Path = socket
        self._pods: list[pb.PodResources] = []
        self._server = grpc.aio.server()
        self.shows_own_pod: bool = True
        """Whether the node plugin's own pod is listed. A kubelet that has just started has not read
        its pods from the API server, and does not list it."""

    async def __aenter__(self) -> PodList:
        pb_grpc.add_PodResourcesListerServicer_to_server(_Service(self._listed), self._server)
        self._socket.parent.mkdir(parents=True, exist_ok=True)
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    def add(self, claim: ClaimUnderTest, answer: PrepareResult, *, driver: str) -> None:
        """Add a pod whose container uses a claim as it was prepared."""
        resource = pb.DynamicResource(
            claim_name=claim.reference.name, claim_namespace=claim.reference.namespace
        )
        for device in answer.devices:
            resource.claim_resources.add(
                cdi_devices=[pb.CDIDevice(name=name) for name in device.cdi_ids],
                driver_name=driver,
                pool_name=device.pool,
                device_name=device.name,
                share_id=device.share_id,
            )
        container = pb.ContainerResources(name="main", dynamic_resources=[resource])
        self._pods.append(
            pb.PodResources(
                name=f"pod-{claim.uid}",
                namespace=claim.reference.namespace,
                containers=[container],
            )
        )

    def clear(self) -> None:
        """Remove all pods but the node plugin's own."""
        self._pods.clear()

    def _listed(self) -> list[pb.PodResources]:
        own = pb.PodResources(name=OWN_POD["POD_NAME"], namespace=OWN_POD["POD_NAMESPACE"])
        return [own, *self._pods] if self.shows_own_pod else [*self._pods]


class _Service(pb_grpc.PodResourcesListerServicer):
    def __init__(self, listed: Callable[[], list[pb.PodResources]]) -> None:
        self._listed = listed

    async def List(self, request: pb.ListPodResourcesRequest, context: Any) -> Any:
        """Give all pods."""
        return pb.ListPodResourcesResponse(pod_resources=self._listed())

    async def Get(self, request: pb.GetPodResourcesRequest, context: Any) -> Any:
        """Answer that there is no such pod, as the kubelet does."""
        await context.abort(
            grpc.StatusCode.UNKNOWN,
            f"pod {request.pod_name} in namespace {request.pod_namespace} not found",
        )

    async def GetAllocatableResources(
        self, request: pb.AllocatableResourcesRequest, context: Any
    ) -> Any:
        """Return no device: the kubelet's own device manager serves none."""
        return pb.AllocatableResourcesResponse()
