"""
The health service: from our words to the kubelet's messages, or the silence of a driver without.

A kubelet of 1.36 asks every plugin for the v1alpha1 stream, advertised or not, and logs an error
every 5 s where it is missing: a driver that knows no health keeps it open. A stream that says
nothing changes no pod's status. Kubelets from 1.37 on ask for what is advertised alone.

What is told, and when, is :mod:`.health`'s business; v1, which has the same messages under another
name, is in :mod:`.healthv1`. It must not know devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc.aio

from drakit_nodeplugin.devices.model import DeviceHealth
from drakit_nodeplugin.kubelet.health import HealthReports, HealthSource, logged_stream, shown
from drakit_proto.kubelet.drahealth.v1alpha1 import health_pb2, health_pb2_grpc

__all__ = ("HealthService", "ReportedHealth", "SilentHealth", "health_service")

_STATUSES = {
    "healthy": health_pb2.HEALTHY,
    "unhealthy": health_pb2.UNHEALTHY,
    "unknown": health_pb2.UNKNOWN,
}


class HealthService(Protocol):
    """What is served of health, in all versions of the service."""

    @property
    def versions(self) -> tuple[str, ...]:
        """What the kubelet is told that there is."""
        ...

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve it. May be called again, for a server that replaces another one."""
        ...

    def end(self) -> None:
        """End all streams: they would hold up the server's stop."""
        ...


_METHOD = "v1alpha1.NodeWatchResources"


def health_service(
    source: HealthSource | None, *, driver: str, timeout_seconds: float
) -> HealthService:
    """Return the service of a driver, with or without a source of device health."""
    if source is None:
        return SilentHealth(driver)
    return ReportedHealth(HealthReports(source, driver=driver, timeout_seconds=timeout_seconds))


class SilentHealth(health_pb2_grpc.DRAResourceHealthServicer):
    """Holds streams open until the server stops."""

    versions = ()

    def __init__(self, driver: str) -> None:
        self._driver = driver
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
        with logged_stream(self._driver, _METHOD, ended=self._ended):
            await self._ended.wait()
        return
        yield health_pb2.NodeWatchResourcesResponse()


class ReportedHealth:
    """Tells the health of a driver's devices, in both versions."""

    versions = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")

    def __init__(self, reports: HealthReports) -> None:
        self._reports = reports

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve both versions."""
        # Most drivers have no health, and need not the memory of its messages.
        from drakit_nodeplugin.kubelet.healthv1 import add_health_v1

        health_pb2_grpc.add_DRAResourceHealthServicer_to_server(
            _HealthV1alpha1(self._reports), server
        )
        add_health_v1(server, self._reports)

    def end(self) -> None:
        """End all streams: they would hold up the server's stop."""
        self._reports.end()


class _HealthV1alpha1(health_pb2_grpc.DRAResourceHealthServicer):
    def __init__(self, reports: HealthReports) -> None:
        self._reports = reports

    async def NodeWatchResources(
        self,
        request: health_pb2.NodeWatchResourcesRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[health_pb2.NodeWatchResourcesResponse]:
        # As above: devices may be long in coming, and a cancellation is passed on.
        await context.send_initial_metadata(())
        timeout_seconds = self._reports.timeout_seconds
        with self._reports.stream(_METHOD) as subscription:
            while (part := await subscription.next()) is not None:
                yield health_pb2.NodeWatchResourcesResponse(
                    devices=[_message(health, timeout_seconds) for health in part]
                )


def _message(health: DeviceHealth, timeout_seconds: int) -> health_pb2.DeviceHealth:
    return health_pb2.DeviceHealth(
        device=health_pb2.DeviceIdentifier(pool_name=health.pool, device_name=health.device),
        health=_STATUSES[health.status],
        last_updated_time=health.changed_at,
        health_check_timeout_seconds=timeout_seconds,
        message=shown(health.message),
    )
