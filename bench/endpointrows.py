"""
Rows of endpoints that are processes of vendors, and the budgets that they must keep.

Pure: :mod:`.endpoints` measures the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.rows import percentile

__all__ = ("Endpoints", "Overhead")

OVERHEAD_MS = 3.0
"""Budget of the additional p50 of a prepare, compared with a driver in the plugin's own process."""

ENDPOINTS_MIB = 128.0
"""Budget with fifty idle endpoints."""

IDLE_SHARE = 0.01
"""Share of a core while idle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """A row of the cost of an endpoint in another process."""

    endpoint: str
    batch: int
    p50_ms: float
    p99_ms: float
    in_process_ms: float
    """p50 of a driver in the plugin's process, whose calls took turns with these."""

    @classmethod
    def of(
        cls, *, endpoint: str, batch: int, seconds: Sequence[float], in_process: Sequence[float]
    ) -> Overhead:
        return cls(
            endpoint=endpoint,
            batch=batch,
            p50_ms=percentile(seconds, 0.5) * 1000,
            p99_ms=percentile(seconds, 0.99) * 1000,
            in_process_ms=percentile(in_process, 0.5) * 1000,
        )

    @property
    def overhead_ms(self) -> float:
        return self.p50_ms - self.in_process_ms

    def line(self) -> str:
        return (
            f"overhead endpoint={self.endpoint} batch={self.batch} p50_ms={self.p50_ms:.2f} "
            f"p99_ms={self.p99_ms:.2f} in_process_ms={self.in_process_ms:.2f} "
            f"overhead_ms={self.overhead_ms:.2f}"
        )

    def missed(self) -> Iterator[str]:
        if self.overhead_ms > OVERHEAD_MS:
            yield (
                f"overhead endpoint={self.endpoint} batch={self.batch}: p50 is "
                f"{self.overhead_ms:.2f} ms above that of a driver in the process, at most "
                f"{OVERHEAD_MS:g}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoints:
    """A row of the cost of many endpoints at rest."""

    device_plugins: int
    backends: int
    published_seconds: float
    """Seconds from the start of the plugin until the API server has the devices of all
    endpoints."""

    rss_mib: float
    cpu_share: float
    """Share of a core while idle."""

    threads: int

    @property
    def _name(self) -> str:
        return f"endpoints device_plugins={self.device_plugins} backends={self.backends}"

    def line(self) -> str:
        return (
            f"{self._name} published_seconds={self.published_seconds:.1f} "
            f"rss_mib={self.rss_mib:.1f} idle_cpu_percent={self.cpu_share * 100:.2f} "
            f"threads={self.threads}"
        )

    def missed(self) -> Iterator[str]:
        if self.rss_mib > ENDPOINTS_MIB:
            yield f"{self._name}: VmRSS is {self.rss_mib:.1f} MiB, at most {ENDPOINTS_MIB:.0f}"
        if self.cpu_share > IDLE_SHARE:
            yield (
                f"{self._name}: {self.cpu_share * 100:.2f} % of a core at rest, at most "
                f"{IDLE_SHARE * 100:g}"
            )
