"""
Rows of a claim's cost, independent of the disk's speed, and of pods prepared per second.

Pure: :mod:`.cost` measures the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ("Cost", "Hops", "Throughput")

_CPU_BUDGETS_MS: Mapping[tuple[str, int], float] = {("prepare", 1): 2.5, ("unprepare", 1): 1.2}
_CPU_BUDGETS_BEYOND_CLIENT_MS: Mapping[tuple[str, int], float] = {("prepare", 64): 25.0}

ITERATIONS = 25.0
"""Budget of main loop iterations, for a pair of prepare and unprepare."""

ROUND_TRIPS: Mapping[str, float] = {"effects": 6.0, "plain": 2.0}
"""Budget of round trips to threads, for a pair, by driver."""

PODS_PER_SECOND = 300.0
"""Minimum rate with four cores. With fewer cores, the rate is only reported."""

CORES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """A row of the processor time of one call, which other work on the machine hardly changes."""

    operation: str
    batch: int
    driver: str
    cpu_ms: float
    client_cpu_ms: float | None
    """Time of the same number of GETs by the API client alone; None without calls of the API
    server."""

    def line(self) -> str:
        line = f"cost {self.operation} batch={self.batch} cpu_ms={self.cpu_ms:.2f} "
        if self.client_cpu_ms is not None:
            line += f"client_cpu_ms={self.client_cpu_ms:.2f} "
        return f"{line}driver={self.driver}"

    def missed(self) -> Iterator[str]:
        name = f"cost {self.operation} batch={self.batch} driver={self.driver}"
        limit = _CPU_BUDGETS_MS.get((self.operation, self.batch))
        if limit is not None and self.cpu_ms > limit:
            yield f"{name}: {self.cpu_ms:.2f} ms of processor time, at most {limit:g}"
        limit = _CPU_BUDGETS_BEYOND_CLIENT_MS.get((self.operation, self.batch))
        beyond = self.cpu_ms - (self.client_cpu_ms or 0.0)
        if limit is not None and beyond > limit:
            yield (
                f"{name}: {beyond:.2f} ms of processor time beyond the API client's, at most "
                f"{limit:g}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hops:
    """A row of what one pair of prepare and unprepare of one claim makes the loops do."""

    driver: str
    main_iterations: float
    other_iterations: float
    round_trips: float

    def line(self) -> str:
        return (
            f"hops pair batch=1 loop_iterations={self.main_iterations:.1f} "
            f"driver_loop_iterations={self.other_iterations:.1f} "
            f"thread_round_trips={self.round_trips:.1f} driver={self.driver}"
        )

    def missed(self) -> Iterator[str]:
        if self.main_iterations > ITERATIONS:
            yield (
                f"hops driver={self.driver}: {self.main_iterations:.1f} loop iterations a pair, at "
                f"most {ITERATIONS:g}"
            )
        limit = ROUND_TRIPS[self.driver]
        if self.round_trips > limit:
            yield (
                f"hops driver={self.driver}: {self.round_trips:.1f} thread round trips a pair, at "
                f"most {limit:g}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """A row of pods with one claim each that are prepared at once, repeatedly."""

    pods: int
    resident: int
    driver: str
    cores: int
    pods_per_second: float
    client_pods_per_second: float
    """The rate of the API client alone, for the same number of concurrent GETs."""

    def line(self) -> str:
        return (
            f"throughput pods={self.pods} claims=1 resident={self.resident} "
            f"pods_per_second={self.pods_per_second:.0f} "
            f"client_alone_per_second={self.client_pods_per_second:.0f} driver={self.driver}"
        )

    def missed(self) -> Iterator[str]:
        if self.cores >= CORES and self.pods_per_second < PODS_PER_SECOND:
            yield (
                f"throughput resident={self.resident} driver={self.driver}: "
                f"{self.pods_per_second:.0f} pods a second, at least {PODS_PER_SECOND:g}"
            )
