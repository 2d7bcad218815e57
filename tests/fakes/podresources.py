"""The kubelet's podresources socket, served as Kubernetes 1.36 does it; older ones by options."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from drakit_nodeplugin.state.podresources import PodName
from drakit_proto.kubelet.podresources.v1 import podresources_pb2 as pb
from drakit_proto.kubelet.podresources.v1 import podresources_pb2_grpc as pb_grpc

OWN_POD = PodName(namespace="drakit-system", name="drakit-nodeplugin-x7k2p")
"""The pod of the node plugin, which the kubelet lists as any other."""

OWN_POD_ENVIRONMENT = {"POD_NAMESPACE": OWN_POD.namespace, "POD_NAME": OWN_POD.name}


class FakePodResources(pb_grpc.PodResourcesListerServicer):
    """
    Pods with claims, on a unix socket: `async with FakePodResources(path) as kubelet`.

    Like the real one, it adds the CDI names of earlier devices to those of a device, and serves its
    socket before it has read its pods.
    """

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.pods: list[pb.PodResources] = []
        self.allocatable: dict[str, tuple[str, ...]] = {}
        """Device IDs by resource, as the kubelet's device manager reports them."""
        self.calls: list[str] = []
        """The methods that were called, refused calls included."""
        self.synced = True
        """Whether it has read its pods. If not, it lists none."""
        self.limit: int | None = None
        """The number of calls in a burst, like the kubelet's rate limit. None for no limit."""
        self._tokens, self._refilled = 0.0, 0.0
        self.knows_claims = True
        """Before 1.34 it does not, unless the feature gates are set."""

    async def __aenter__(self) -> FakePodResources:
        self._server = grpc.aio.server()
        pb_grpc.add_PodResourcesListerServicer_to_server(self, self._server)
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    def add(
        self,
        claim: str,
        *devices: str,
        uid: str,
        driver: str = "camera.example.com",
        pool: str = "node-1",
        shares: dict[str, str] | None = None,
        cdi: bool = True,
    ) -> None:
        """Add a pod with one container that uses a claim of namespace `lab`."""
        resource = pb.DynamicResource(claim_name=claim, claim_namespace="lab")
        names: list[pb.CDIDevice] = []
        for index, device in enumerate(devices):
            if cdi:
                names.append(pb.CDIDevice(name=f"{driver}/claim={uid}-{index}"))
            resource.claim_resources.add(
                cdi_devices=names,
                driver_name=driver,
                pool_name=pool,
                device_name=device,
                share_id=(shares or {}).get(device),
            )
        container = pb.ContainerResources(name="main", dynamic_resources=[resource])
        self.pods.append(
            pb.PodResources(name=f"pod-{claim}", namespace="lab", containers=[container])
        )

    def hold(self, resource: str, *ids: str) -> None:
        """Add a pod with one container that has devices from the kubelet's device manager."""
        devices = [pb.ContainerDevices(resource_name=resource, device_ids=ids)]
        container = pb.ContainerResources(name="main", devices=devices)
        self.pods.append(pb.PodResources(name="holder", namespace="lab", containers=[container]))

    async def _count(self, method: str, context: Any) -> None:
        self.calls.append(method)
        if self.limit is None:
            return
        now = time.monotonic()
        self._tokens = min(self.limit, self._tokens + (now - self._refilled) * 100)
        self._refilled = now
        if self._tokens < 1:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._tokens -= 1

    async def List(self, request: pb.ListPodResourcesRequest, context: Any) -> Any:
        await self._count("List", context)
        own = pb.PodResources(name=OWN_POD.name, namespace=OWN_POD.namespace)
        pods = [own, *self.pods] if self.synced else []
        answer = pb.ListPodResourcesResponse(pod_resources=pods)
        if not self.knows_claims:
            for pod in answer.pod_resources:
                for container in pod.containers:
                    del container.dynamic_resources[:]
        return answer

    async def Get(self, request: pb.GetPodResourcesRequest, context: Any) -> Any:
        await self._count("Get", context)
        # Go's plain errors arrive as "unknown".
        if not self.knows_claims:
            message = "PodResources API Get method disabled"
        else:
            message = f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
        await context.abort(grpc.StatusCode.UNKNOWN, message)

    async def GetAllocatableResources(self, request: Any, context: Any) -> Any:
        await self._count("GetAllocatableResources", context)
        return pb.AllocatableResourcesResponse(
            devices=[
                pb.ContainerDevices(resource_name=name, device_ids=identities)
                for name, identities in self.allocatable.items()
            ]
        )
