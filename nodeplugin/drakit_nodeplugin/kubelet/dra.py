"""
The DRA service, v1 and v1beta1: from the kubelet's messages to our words, and back.

Both versions are the same but for shares, which v1beta1 does not know. What a call leads to is
:mod:`.calls`'s business.

It must not know how claims are prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import grpc
import grpc.aio

from drakit.device import ClaimReference
from drakit_nodeplugin.claims.answers import PreparedDevice
from drakit_nodeplugin.kubelet.calls import ClaimCalls
from drakit_proto.kubelet.dra.v1 import dra_pb2 as v1
from drakit_proto.kubelet.dra.v1 import dra_pb2_grpc as v1_grpc
from drakit_proto.kubelet.dra.v1beta1 import dra_pb2 as v1beta1
from drakit_proto.kubelet.dra.v1beta1 import dra_pb2_grpc as v1beta1_grpc

__all__ = ("SUPPORTED_VERSIONS", "add_dra_services")

SUPPORTED_VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
"""As told to the kubelet, which takes the first that it knows."""

MAX_CLAIMS = 1024
"""Of one call: some ten times what the largest pods have. A message of 4 MiB, which gRPC would
take, has room for several hundred thousand, and answering those would keep the loop for seconds."""

_Context = grpc.aio.ServicerContext[Any, Any]


class _Claim(Protocol):
    """What the claim messages of both versions have."""

    namespace: str
    uid: str
    name: str


async def _references(claims: Sequence[_Claim], context: _Context) -> list[ClaimReference]:
    if len(claims) > MAX_CLAIMS:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{len(claims)} claims in one call, at most {MAX_CLAIMS} are taken: a call has the "
            f"claims of one pod",
        )
    return [
        ClaimReference(namespace=claim.namespace, name=claim.name, uid=claim.uid)
        for claim in claims
    ]


def _device_v1(device: PreparedDevice) -> v1.Device:
    return v1.Device(
        request_names=device.requests,
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=device.cdi_ids,
        share_id=device.share_id,
    )


def _device_v1beta1(device: PreparedDevice) -> v1beta1.Device:
    return v1beta1.Device(
        request_names=device.requests,
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=device.cdi_ids,
    )


class _DraV1(v1_grpc.DRAPluginServicer):
    def __init__(self, calls: ClaimCalls) -> None:
        self._calls = calls

    async def NodePrepareResources(
        self, request: v1.NodePrepareResourcesRequest, context: _Context
    ) -> v1.NodePrepareResourcesResponse:
        answers = await self._calls.answer(
            "prepare", await _references(request.claims, context), method="v1.NodePrepareResources"
        )
        return v1.NodePrepareResourcesResponse(
            claims={
                uid: v1.NodePrepareResourceResponse(error=answer.error)
                if answer.error is not None
                else v1.NodePrepareResourceResponse(devices=map(_device_v1, answer.devices))
                for uid, answer in answers.items()
            }
        )

    async def NodeUnprepareResources(
        self, request: v1.NodeUnprepareResourcesRequest, context: _Context
    ) -> v1.NodeUnprepareResourcesResponse:
        answers = await self._calls.answer(
            "unprepare",
            await _references(request.claims, context),
            method="v1.NodeUnprepareResources",
        )
        return v1.NodeUnprepareResourcesResponse(
            claims={
                uid: v1.NodeUnprepareResourceResponse(error=answer.error or "")
                for uid, answer in answers.items()
            }
        )


class _DraV1beta1(v1beta1_grpc.DRAPluginServicer):
    def __init__(self, calls: ClaimCalls) -> None:
        self._calls = calls

    async def NodePrepareResources(
        self, request: v1beta1.NodePrepareResourcesRequest, context: _Context
    ) -> v1beta1.NodePrepareResourcesResponse:
        answers = await self._calls.answer(
            "prepare",
            await _references(request.claims, context),
            method="v1beta1.NodePrepareResources",
        )
        return v1beta1.NodePrepareResourcesResponse(
            claims={
                uid: v1beta1.NodePrepareResourceResponse(error=answer.error)
                if answer.error is not None
                else v1beta1.NodePrepareResourceResponse(
                    devices=map(_device_v1beta1, answer.devices)
                )
                for uid, answer in answers.items()
            }
        )

    async def NodeUnprepareResources(
        self, request: v1beta1.NodeUnprepareResourcesRequest, context: _Context
    ) -> v1beta1.NodeUnprepareResourcesResponse:
        answers = await self._calls.answer(
            "unprepare",
            await _references(request.claims, context),
            method="v1beta1.NodeUnprepareResources",
        )
        return v1beta1.NodeUnprepareResourcesResponse(
            claims={
                uid: v1beta1.NodeUnprepareResourceResponse(error=answer.error or "")
                for uid, answer in answers.items()
            }
        )


def add_dra_services(server: grpc.aio.Server, calls: ClaimCalls) -> None:
    """Serve both versions; a claim's work in flight is the same for both."""
    v1_grpc.add_DRAPluginServicer_to_server(_DraV1(calls), server)
    v1beta1_grpc.add_DRAPluginServicer_to_server(_DraV1beta1(calls), server)
