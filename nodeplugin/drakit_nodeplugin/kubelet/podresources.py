"""
The kubelet's podresources API, version v1: which devices the containers of this node have, and of
which resources its own device manager has some or has given some out.

The kubelet serves it on a socket of its own, from its start on. What follows from a claim that is
listed, or not, is decided in :mod:`drakit_nodeplugin.claims`.

It must not know the checkpoint, or whose claims they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from drakit_nodeplugin.claims.kubeletview import ListedDevice

if TYPE_CHECKING:
    from drakit_proto.kubelet.podresources.v1.podresources_pb2 import ListPodResourcesResponse
    from drakit_proto.kubelet.podresources.v1.podresources_pb2_grpc import (
        PodResourcesListerAsyncStub,
    )

__all__ = ("PodResources", "PodResourcesError")

ANSWER_SECONDS = 5.0
"""The kubelet answers from memory; what takes longer is a kubelet that starts or hangs."""

_MAX_BYTES = 16 * 1024 * 1024
"""What the kubelet's own client takes for an answer; gRPC's default is 4 MiB."""

_NO_POD = "drakit.dev-probe"
"""A name that no pod has: it is asked for only to see whether the question is understood."""


class PodResourcesError(Exception):
    """The kubelet did not say which devices are used. The text is a sentence."""


class PodResources:
    """A client of one kubelet. It connects anew for each question: they are a minute apart."""

    def __init__(self, socket: Path, *, timeout_seconds: float = ANSWER_SECONDS) -> None:
        self._socket = socket
        self._timeout_seconds = timeout_seconds
        self._knows_claims = False

    async def list(self, *, driver: str | None = None) -> Sequence[ListedDevice]:
        """
        List the devices that containers have by claims, of all drivers or of one.

        Raises :class:`PodResourcesError`, also where the kubelet is too old to know of claims:
        then an empty list would say that none is used.
        """
        # Not at the module's top: a node without claims never asks, and has it not in memory.
        from drakit_proto.kubelet.podresources.v1 import podresources_pb2, podresources_pb2_grpc

        async with self._channel() as channel:
            stub = podresources_pb2_grpc.PodResourcesListerStub(channel)
            try:
                answer = await stub.List(
                    podresources_pb2.ListPodResourcesRequest(), timeout=self._timeout_seconds
                )
            except grpc.aio.AioRpcError as error:
                raise self._failed(error) from None
            listed = [d for d in _devices(answer) if driver is None or d.driver == driver]
            if not self._knows_claims:
                self._knows_claims = _names_claims(answer) or await self._understands_get(stub)
        if not self._knows_claims:
            raise PodResourcesError(
                f"the kubelet at {self._socket} does not tell the claims of its containers; this "
                f"needs Kubernetes 1.34, or the feature gates KubeletPodResourcesDynamicResources "
                f"and KubeletPodResourcesGet"
            )
        return listed

    async def device_manager_resources(self) -> Mapping[str, bool]:
        """
        Give the names of the resources of the kubelet's own device manager: those of which it has
        devices (True), and those of which it has none any more, but running containers still have
        some from it (False). Raises :class:`PodResourcesError`.
        """
        from drakit_proto.kubelet.podresources.v1 import podresources_pb2, podresources_pb2_grpc

        async with self._channel() as channel:
            stub = podresources_pb2_grpc.PodResourcesListerStub(channel)
            try:
                served = await stub.GetAllocatableResources(
                    podresources_pb2.AllocatableResourcesRequest(), timeout=self._timeout_seconds
                )
                used = await stub.List(
                    podresources_pb2.ListPodResourcesRequest(), timeout=self._timeout_seconds
                )
            except grpc.aio.AioRpcError as error:
                raise self._failed(error) from None
        # What a claim has given to a container is in its dynamic_resources, and not here.
        held = (
            devices
            for pod in used.pod_resources
            for container in pod.containers
            for devices in container.devices
        )
        named = {devices.resource_name: False for devices in held if devices.device_ids}
        named |= {devices.resource_name: True for devices in served.devices if devices.device_ids}
        return named

    def _channel(self) -> grpc.aio.Channel:
        options = [
            ("grpc.default_authority", "localhost"),
            ("grpc.max_receive_message_length", _MAX_BYTES),
        ]
        return grpc.aio.insecure_channel(f"unix:{self._socket}", options=options)

    async def _understands_get(self, stub: PodResourcesListerAsyncStub) -> bool:
        """
        Tell whether an answer without any claim comes from a kubelet that would name them.

        It does not say so itself. But the question for a single pod came with the same release,
        and a kubelet that has it off answers that, instead of "not found".
        """
        from drakit_proto.kubelet.podresources.v1 import podresources_pb2

        request = podresources_pb2.GetPodResourcesRequest(pod_name=_NO_POD, pod_namespace=_NO_POD)
        try:
            await stub.Get(request, timeout=self._timeout_seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise self._failed(error) from None
            return "not found" in (error.details() or "")
        return True

    def _failed(self, error: grpc.aio.AioRpcError) -> PodResourcesError:
        code = error.code().name.lower().replace("_", " ")
        return PodResourcesError(
            f"the kubelet's podresources at {self._socket} cannot be read: {code} "
            f"({error.details()})"
        )


def _devices(answer: ListPodResourcesResponse) -> Iterator[ListedDevice]:
    for pod in answer.pod_resources:
        for container in pod.containers:
            for claim in container.dynamic_resources:
                for resource in claim.claim_resources:
                    yield ListedDevice(
                        namespace=sys.intern(claim.claim_namespace),
                        claim=claim.claim_name,
                        driver=sys.intern(resource.driver_name),
                        pool=sys.intern(resource.pool_name),
                        device=resource.device_name,
                        share_id=resource.share_id if resource.HasField("share_id") else None,
                        cdi_names=tuple(cdi.name for cdi in resource.cdi_devices),
                    )


def _names_claims(answer: ListPodResourcesResponse) -> bool:
    return any(
        container.dynamic_resources for pod in answer.pod_resources for container in pod.containers
    )
