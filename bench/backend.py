"""
A vendor's backend whose own work costs nothing: `python -m bench.backend SOCKET`.

It runs in a process of its own, so that neither its memory nor its garbage is in the plugin's
figures. The time of a call here is a part of the caller's wait, as with any vendor.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio

from drakit_proto.backend.v1 import backend_pb2 as pb
from drakit_proto.backend.v1 import backend_pb2_grpc as pb_grpc

DRIVER = "backend.bench.drakit.dev"
DEVICES = 8


class Backend(pb_grpc.BackendServicer):
    """A backend without the optional methods."""

    async def GetInfo(self, request: Any, context: Any):
        return pb.GetInfoResponse(driver_name=DRIVER, version="1")

    async def WatchDevices(
        self, request: Any, context: Any
    ) -> AsyncIterator[pb.WatchDevicesResponse]:
        devices = [pb.Device(name=f"device-{number}") for number in range(DEVICES)]
        yield pb.WatchDevicesResponse(devices=devices)
        await asyncio.Event().wait()

    async def PrepareClaims(self, request: Any, context: Any):
        return pb.PrepareClaimsResponse(
            claims=[
                pb.PreparedClaim(uid=claim.uid, edits=[_edits(each.name) for each in claim.devices])
                for claim in request.claims
            ]
        )

    async def UnprepareClaims(self, request: Any, context: Any):
        done = [pb.UnpreparedClaim(uid=claim.uid) for claim in request.claims]
        return pb.UnprepareClaimsResponse(claims=done)


def _edits(name: str) -> pb.Edits:
    node = pb.DeviceNode(path=f"/dev/{name}", host_path="/dev/null", type="c")
    return pb.Edits(env={"BENCH_DEVICE": name}, device_nodes=[node])


async def _serve(socket: Path) -> None:
    socket.parent.mkdir(parents=True, exist_ok=True)
    server = grpc.aio.server()
    pb_grpc.add_BackendServicer_to_server(Backend(), server)  # pyright: ignore[reportAbstractUsage]
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
