"""
The kubelet's side of a health stream: what the status of pods would show, and for how long.

It must not know the source of the health.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from drakit_proto.kubelet.drahealth.v1 import health_pb2 as v1
from drakit_proto.kubelet.drahealth.v1 import health_pb2_grpc as v1_grpc
from drakit_proto.kubelet.drahealth.v1alpha1 import health_pb2 as v1alpha1
from drakit_proto.kubelet.drahealth.v1alpha1 import health_pb2_grpc as v1alpha1_grpc

__all__ = ("HealthSubscriber", "Report", "health_version")

_VERSIONS: Mapping[str, tuple[Any, Any]] = {
    "v1": (v1, v1_grpc),
    "v1alpha1": (v1alpha1, v1alpha1_grpc),
}
DEFAULT_TIMEOUT_SECONDS = 30
"""Seconds for which the kubelet uses a report without a timeout."""


def health_version(supported: Iterable[str]) -> str | None:
    """Choose a version as the kubelet does: by its own preference, whatever the driver's order."""
    advertised = set(supported)
    for version in _VERSIONS:
        if f"{version}.DRAResourceHealth" in advertised:
            return version
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The kubelet's record of one device."""

    status: str
    message: str
    until: float
    """Until when the report holds, loop clock."""


class HealthSubscriber:
    """
    Reads one stream: a report holds from its receipt for the time in it.

    `async with` ends it. When the stream ends, all reports are dropped.
    """

    def __init__(self, channel: Any, *, version: str) -> None:
        self.version = version
        self.messages: list[dict[tuple[str, str], tuple[str, str]]] = []
        """Each message: status and text by pool and device."""

        self.ended: bool = False
        self._messages, stubs = _VERSIONS[version]
        self.call: Any = stubs.DRAResourceHealthStub(channel).NodeWatchResources(
            self._messages.NodeWatchResourcesRequest()
        )
        self._known: dict[tuple[str, str], Report] = {}
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def __aenter__(self) -> HealthSubscriber:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.call.cancel()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    def status(self, device: str, *, pool: str = "node-1") -> str:
        """Return the health of a device in a pod's status."""
        report = self._known.get((pool, device))
        if report is None or asyncio.get_running_loop().time() > report.until:
            return "Unknown"
        return report.status

    def message(self, device: str, *, pool: str = "node-1") -> str:
        """Return the message beside it."""
        report = self._known.get((pool, device))
        return "" if report is None else report.message

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for messages, or the stream's end, until a condition holds."""
        async with asyncio.timeout(5):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def _read(self) -> None:
        try:
            async for response in self.call:
                self._receive(response)
                self._news.set()
        finally:
            self._known.clear()
            self.ended = True
            self._news.set()

    def _receive(self, response: Any) -> None:
        now = asyncio.get_running_loop().time()
        message: dict[tuple[str, str], tuple[str, str]] = {}
        for health in response.devices:
            key = health.device.pool_name, health.device.device_name
            status = self._messages.HealthStatus.Name(health.health).capitalize()
            seconds = health.health_check_timeout_seconds
            self._known[key] = Report(
                status=status,
                message=health.message,
                until=now + (seconds if seconds > 0 else DEFAULT_TIMEOUT_SECONDS),
            )
            message[key] = status, health.message
        self.messages.append(message)
