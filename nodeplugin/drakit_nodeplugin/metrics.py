"""
The node plugin's metrics, few and of low cardinality: no claim, pod or device is ever a label.

It must not know what the numbers lead to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from drakit.device import ClaimReference
from drakit_nodeplugin.claims.answers import ClaimService, PrepareAnswer

__all__ = ("MeteredClaims", "Metrics")

_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)


class Metrics:
    """All metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.batch_seconds = Histogram(
            "drakit_claims_batch_seconds",
            "Time to prepare or unprepare the claims of one pod",
            ("driver", "operation"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.claims = Counter(
            "drakit_claims",
            "Claims that the kubelet asked to prepare or unprepare, by result",
            ("driver", "operation", "result"),
            registry=self.registry,
        )
        self.devices = Gauge(
            "drakit_devices", "Devices to publish", ("driver",), registry=self.registry
        )
        self.registered = Gauge(
            "drakit_driver_registered",
            "1 if the kubelet has accepted the driver's registration",
            ("driver",),
            registry=self.registry,
        )
        self.running = Gauge(
            "drakit_driver_running", "1 if the driver runs", ("driver",), registry=self.registry
        )
        self.checkpoint_damaged = Gauge(
            "drakit_checkpoint_damaged",
            "1 if a damaged checkpoint was set aside when this process started",
            ("driver",),
            registry=self.registry,
        )
        self.slices_failing = Gauge(
            "drakit_slices_failing",
            "1 if the last attempt to publish ResourceSlices failed",
            ("driver",),
            registry=self.registry,
        )


class MeteredClaims:
    """A :class:`ClaimService` that counts what another one does."""

    def __init__(self, claims: ClaimService, *, driver: str, metrics: Metrics) -> None:
        self._claims = claims
        self._driver = driver
        self._metrics = metrics

    async def prepare(self, claims: Sequence[ClaimReference]) -> Mapping[str, PrepareAnswer]:
        """Prepare, and count."""
        began = asyncio.get_running_loop().time()
        answers = await self._claims.prepare(claims)
        self._count("prepare", began, [answer.error for answer in answers.values()])
        return answers

    async def unprepare(self, claims: Sequence[ClaimReference]) -> Mapping[str, str | None]:
        """Unprepare, and count."""
        began = asyncio.get_running_loop().time()
        answers = await self._claims.unprepare(claims)
        self._count("unprepare", began, list(answers.values()))
        return answers

    def _count(self, operation: str, began: float, errors: Sequence[str | None]) -> None:
        seconds = asyncio.get_running_loop().time() - began
        self._metrics.batch_seconds.labels(self._driver, operation).observe(seconds)
        for error in errors:
            result = "success" if error is None else "error"
            self._metrics.claims.labels(self._driver, operation, result).inc()
