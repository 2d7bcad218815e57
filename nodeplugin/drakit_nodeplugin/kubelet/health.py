"""
The health service, silent: a driver that knows no health still keeps the kubelet's stream open.

A kubelet of 1.36 asks every plugin for this stream, advertised or not, and logs an error every 5 s
where it is missing. A stream that says nothing changes no pod's status.

It must not know devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from drakit_proto.kubelet.drahealth.v1alpha1 import health_pb2, health_pb2_grpc

__all__ = ("SilentHealth",)


class SilentHealth(health_pb2_grpc.DRAResourceHealthServicer):
    """Holds streams open until the server stops."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve it, without advertising it."""
        health_pb2_grpc.add_DRAResourceHealthServicer_to_server(self, server)

    def end(self) -> None:
        """End all streams: they would hold up the server's stop."""
        self._ended.set()

    async def NodeWatchResources(
        self,
        request: health_pb2.NodeWatchResourcesRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[health_pb2.NodeWatchResourcesResponse]:
        # Without it nothing at all would be sent, and a client cannot tell that the stream is open.
        await context.send_initial_metadata(())
        # A cancellation (the kubelet hung up) must leave this function as one: grpc.aio leaks
        # the call of a stream that swallows it (github.com/grpc/grpc/issues/43360).
        await self._ended.wait()
        return
        yield health_pb2.NodeWatchResourcesResponse()
