"""
Liveness from outside: a client that goes through the driver's real sockets, as the kubelet does.

A prepare of no claims must be answered with no claims: it passes all of the front door and nothing
of the engine. What to do about a failure is the caller's decision.

It must not know the server's objects: what it sees is what the kubelet sees.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio

from drakit_proto.kubelet.dra.v1 import dra_pb2, dra_pb2_grpc
from drakit_proto.kubelet.pluginregistration.v1 import registration_pb2, registration_pb2_grpc

__all__ = ("PROBE_SECONDS", "local_channel", "probe_sockets")

PROBE_SECONDS = 1.0
"""Per call: what the kubelet waits for GetInfo."""


def local_channel(path: Path) -> grpc.aio.Channel:
    """Connect to a unix socket. By itself Python's client sends the escaped path as authority,
    which some servers refuse; the kubelet sends "localhost"."""
    return grpc.aio.insecure_channel(
        f"unix:{path}", options=[("grpc.default_authority", "localhost")]
    )


async def probe_sockets(
    driver: str, *, registration: Path, dra: Path, timeout_seconds: float = PROBE_SECONDS
) -> str | None:
    """Say what the kubelet could not do at these sockets; None if they answer."""
    try:
        async with local_channel(registration) as channel:
            info = await registration_pb2_grpc.RegistrationStub(channel).GetInfo(
                registration_pb2.InfoRequest(), timeout=timeout_seconds
            )
    except grpc.aio.AioRpcError as error:
        return f"the registration socket {registration} gives no answer: {_told(error)}"
    if info.name != driver:
        return f"the registration socket {registration} answers for driver {info.name!r}"
    try:
        async with local_channel(dra) as channel:
            answer = await dra_pb2_grpc.DRAPluginStub(channel).NodePrepareResources(
                dra_pb2.NodePrepareResourcesRequest(), timeout=timeout_seconds
            )
    except grpc.aio.AioRpcError as error:
        return f"the DRA socket {dra} gives no answer: {_told(error)}"
    if answer.claims:
        return f"the DRA socket {dra} answers with claims that nobody asked for"
    return None


def _told(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name.lower().replace('_', ' ')} ({error.details()})"
