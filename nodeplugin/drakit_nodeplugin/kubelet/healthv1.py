"""
The health service of kubelets from 1.37 on: the messages of :mod:`.healthservice`, called v1.

Loaded only for drivers that have health: generated modules cost memory.

It must not know devices, or when what is told.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from drakit_nodeplugin.devices.model import DeviceHealth
from drakit_nodeplugin.kubelet.health import HealthReports, shown
from drakit_proto.kubelet.drahealth.v1 import health_pb2, health_pb2_grpc

__all__ = ("add_health_v1",)

_STATUSES = {
    "healthy": health_pb2.HEALTHY,
    "unhealthy": health_pb2.UNHEALTHY,
    "unknown": health_pb2.UNKNOWN,
}


def add_health_v1(server: grpc.aio.Server, reports: HealthReports) -> None:
    """Serve version v1."""
    health_pb2_grpc.add_DRAResourceHealthServicer_to_server(_HealthV1(reports), server)


class _HealthV1(health_pb2_grpc.DRAResourceHealthServicer):
    def __init__(self, reports: HealthReports) -> None:
        self._reports = reports

    async def NodeWatchResources(
        self,
        request: health_pb2.NodeWatchResourcesRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[health_pb2.NodeWatchResourcesResponse]:
        await context.send_initial_metadata(())
        timeout_seconds = self._reports.timeout_seconds
        with self._reports.stream("v1.NodeWatchResources") as subscription:
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
