"""
The load generator: calls a plugin at its sockets as the kubelet does.

One thread and a blocking client affect the measured times the least. A claim with an error ends the
measurement, because its time is meaningless.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from drakit.device import ClaimReference
from drakit_proto.kubelet.dra.v1 import dra_pb2, dra_pb2_grpc
from drakit_proto.kubelet.pluginregistration.v1 import registration_pb2, registration_pb2_grpc

CALL_SECONDS = 45.0
"""The kubelet's timeout for the claims of a pod."""

REGISTRATION_SECONDS = 5.0


def register(socket: Path) -> tuple[str, Path]:
    """Register the driver at a registration socket. Return its name, and its DRA socket."""
    with _channel(socket) as channel:
        stub = registration_pb2_grpc.RegistrationStub(channel)
        limits: dict[str, Any] = {"timeout": REGISTRATION_SECONDS, "wait_for_ready": True}
        info = stub.GetInfo(registration_pb2.InfoRequest(), **limits)
        accepted = registration_pb2.RegistrationStatus(plugin_registered=True)
        stub.NotifyRegistrationStatus(accepted, **limits)
    return info.name, Path(info.endpoint)


class Kubelet:
    """Prepares and unprepares claims at one socket. All times are in seconds."""

    def __init__(self, socket: Path) -> None:
        self._channel = _channel(socket)
        self._stub = dra_pb2_grpc.DRAPluginStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def prepare(self, claims: Sequence[ClaimReference]) -> float:
        """Prepare the claims of one pod. Return the duration of the call."""
        request = _prepare_request(claims)
        began = time.perf_counter()
        response = self._stub.NodePrepareResources(request, timeout=CALL_SECONDS)
        seconds = time.perf_counter() - began
        _check_prepared(claims, response)
        return seconds

    def prepare_pods(self, pods: Sequence[Sequence[ClaimReference]]) -> float:
        """Prepare several pods concurrently. Return the time until the last call completed."""
        requests = [_prepare_request(claims) for claims in pods]
        prepare = self._stub.NodePrepareResources
        began = time.perf_counter()
        calls = [prepare.future(request, timeout=CALL_SECONDS) for request in requests]
        responses = [call.result() for call in calls]
        seconds = time.perf_counter() - began
        for claims, response in zip(pods, responses, strict=True):
            _check_prepared(claims, response)
        return seconds

    def unprepare(self, claims: Sequence[ClaimReference]) -> float:
        """Unprepare the claims of one pod. Return the duration of the call."""
        request = dra_pb2.NodeUnprepareResourcesRequest(claims=_messages(claims))
        began = time.perf_counter()
        response = self._stub.NodeUnprepareResources(request, timeout=CALL_SECONDS)
        seconds = time.perf_counter() - began
        _check(claims, {uid: answer.error for uid, answer in response.claims.items()})
        return seconds


def _channel(socket: Path) -> grpc.Channel:
    # The kubelet's authority. By default, Python uses the escaped path.
    return grpc.insecure_channel(
        f"unix:{socket}", options=[("grpc.default_authority", "localhost")]
    )


def _messages(claims: Sequence[ClaimReference]) -> list[dra_pb2.Claim]:
    return [dra_pb2.Claim(namespace=c.namespace, name=c.name, uid=c.uid) for c in claims]


def _prepare_request(claims: Sequence[ClaimReference]) -> dra_pb2.NodePrepareResourcesRequest:
    return dra_pb2.NodePrepareResourcesRequest(claims=_messages(claims))


def _check_prepared(
    claims: Sequence[ClaimReference], response: dra_pb2.NodePrepareResourcesResponse
) -> None:
    _check(
        claims,
        {
            uid: answer.error or ("" if len(answer.devices) == 1 else "not one device")
            for uid, answer in response.claims.items()
        },
    )


def _check(claims: Sequence[ClaimReference], errors: Mapping[str, str]) -> None:
    for claim in claims:
        error = errors.get(claim.uid, "it was not answered")
        if error:
            raise SystemExit(f"claim {claim}: {error}")
