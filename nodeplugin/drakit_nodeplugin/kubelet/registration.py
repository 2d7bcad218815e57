"""
Registration: answers the kubelet's GetInfo for a driver, and keeps its response.

A kubelet that rejects a driver does not ask again until the socket is recreated. This module
decides when that is due; :mod:`.server` does it. A kubelet that restarts asks again by itself.

It must not know claims or devices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc.aio

from drakit.backoff import Backoff
from drakit_proto.kubelet.pluginregistration.v1 import registration_pb2, registration_pb2_grpc

__all__ = ("Registration", "RegistrationStatus")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistrationStatus:
    """The kubelet's last response."""

    state: Literal["never asked", "registered", "rejected"] = "never asked"
    reason: str | None = None
    """Why the kubelet rejected it, in its own words."""

    registered_at: float | None = None
    """Time of the last success, loop clock; later rejections do not reset it."""

    def readiness_problem(self) -> str | None:
        """Return what prevents the kubelet from calling the driver; None if it is registered."""
        match self.state:
            case "registered":
                return None
            case "rejected":
                return f"the kubelet rejected the registration: {self.reason}"
            case "never asked":
                return "the kubelet has not registered the driver yet"


class Registration(registration_pb2_grpc.RegistrationServicer):
    """The registration service of one driver."""

    def __init__(
        self,
        driver: str,
        *,
        dra_socket: Path,
        versions: Sequence[str],
        backoff: Backoff,
    ) -> None:
        self.status = RegistrationStatus()
        self._driver = driver
        self._backoff = backoff
        self._retry_at: float | None = None
        self._info = registration_pb2.PluginInfo(
            type="DRAPlugin", name=driver, endpoint=str(dra_socket), supported_versions=versions
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        registration_pb2_grpc.add_RegistrationServicer_to_server(self, server)

    def retry_due(self, now: float) -> bool:
        """Return whether the socket must be recreated now, so that the kubelet asks again. In any
        thread; the time is the loop's."""
        retry_at = self._retry_at
        return retry_at is not None and now >= retry_at

    def recreated(self, *, lost: bool) -> None:
        """Note that the socket is a new one. A lost socket ends the registration; after a
        rejection, its reason stays until the kubelet responds again."""
        self._retry_at = None
        if lost:
            self.status = RegistrationStatus(registered_at=self.status.registered_at)

    async def GetInfo(
        self,
        request: registration_pb2.InfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> registration_pb2.PluginInfo:
        return self._info

    async def NotifyRegistrationStatus(
        self,
        request: registration_pb2.RegistrationStatus,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> registration_pb2.RegistrationStatusResponse:
        if request.plugin_registered:
            self._registered()
        else:
            self._rejected(request.error or "it gave no reason")
        return registration_pb2.RegistrationStatusResponse()

    def _registered(self) -> None:
        now = asyncio.get_running_loop().time()
        self.status = RegistrationStatus(state="registered", registered_at=now)
        self._backoff.succeeded()
        self._retry_at = None
        logger.info("the kubelet registered the driver", extra={"driver": self._driver})

    def _rejected(self, reason: str) -> None:
        self.status = RegistrationStatus(
            state="rejected", reason=reason, registered_at=self.status.registered_at
        )
        retry_seconds = self._backoff.next_seconds()
        self._retry_at = asyncio.get_running_loop().time() + retry_seconds
        logger.error(
            "the kubelet rejected the driver; its registration socket will be recreated",
            extra={"driver": self._driver, "error": reason, "retry_seconds": retry_seconds},
        )
