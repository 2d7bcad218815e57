"""
The rows that a measurement prints, and their budgets.

Pure: :mod:`.claims`, :mod:`.slices` and :mod:`.footprint` measure the numbers.
docs/contributors/performance.md explains the budgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = (
    "Burst",
    "Endurance",
    "Memory",
    "Neighbor",
    "Pods",
    "Row",
    "Samples",
    "Slices",
    "Times",
    "percentile",
)

RESIDENT_RATIO = 1.2
"""Budget of the ratio of the p50 with resident claims to that without."""

NEIGHBOR_RATIO = 1.1
"""Budget of the ratio of the p50 beside a misbehaving driver to that beside a quiet one. Two runs
beside a quiet one differ by as much."""

GET_INFO_MS = 1000.0
"""The time that the kubelet waits for GetInfo."""

SPEED_UP = 4.0
"""Minimum speedup of concurrent pods over sequential pods."""

GROWTH_MIB = 1.0
"""Budget of the growth from the highest VmRSS in the first fifth of an endurance run to that in the
last fifth. The heap's fragments move it by a few tenths; a leak of 32 bytes a pair would be 2.4
MiB."""

WRITES_PER_SLICE_AND_SECOND = 1.0

CHANGES_A_SECOND = 950.0
"""Minimum changes per second, of the thousand that a burst should have. A lower rate would not show
what the row claims."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Budget:
    ms: float
    above_floor: bool


_BUDGETS: Mapping[tuple[str, int], _Budget] = {
    ("prepare", 1): _Budget(ms=4, above_floor=True),
    ("prepare", 8): _Budget(ms=7, above_floor=True),
    ("prepare", 64): _Budget(ms=30, above_floor=True),
    ("repeat", 64): _Budget(ms=5, above_floor=True),
    ("unprepare", 64): _Budget(ms=8, above_floor=False),
}


class Row(Protocol):
    """A result that is printed in one line and compared with its budget."""

    def line(self) -> str:
        """Return the line."""
        ...

    def missed(self) -> Iterator[str]:
        """Return the budgets that the row exceeds, one sentence each."""
        ...


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(kw_only=True, slots=True)
class Samples:
    """The times of one operation in one state of the plugin, in seconds, as they come."""

    seconds: list[float] = field(default_factory=list[float])
    floors: list[float] = field(default_factory=list[float])
    """The floor's times beside them; none where the API server is not asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """A row of times: one operation, one size of batch, one number of prepared claims."""

    operation: str
    batch: int
    resident: int
    """Number of other claims that were prepared."""

    driver: str
    p50_ms: float
    p99_ms: float
    floor_ms: float | None
    above_floor_ms: float
    """The p50 of the time of each call minus the floor that was measured just before it."""

    rss_mib: float
    none_resident: Times | None = None
    """The row that this one is compared with."""

    @classmethod
    def of(
        cls,
        samples: Samples,
        *,
        operation: str,
        batch: int,
        resident: int,
        driver: str,
        rss_mib: float,
        none_resident: Times | None,
    ) -> Times:
        floors = samples.floors or [0.0] * len(samples.seconds)
        above = [took - floor for took, floor in zip(samples.seconds, floors, strict=True)]
        return cls(
            operation=operation,
            batch=batch,
            resident=resident,
            driver=driver,
            p50_ms=percentile(samples.seconds, 0.5) * 1000,
            p99_ms=percentile(samples.seconds, 0.99) * 1000,
            floor_ms=percentile(floors, 0.5) * 1000 if samples.floors else None,
            above_floor_ms=percentile(above, 0.5) * 1000,
            rss_mib=rss_mib,
            none_resident=none_resident,
        )

    def line(self) -> str:
        floor = "-" if self.floor_ms is None else f"{self.floor_ms:.2f}"
        line = (
            f"{self.operation} batch={self.batch} resident={self.resident} "
            f"p50_ms={self.p50_ms:.2f} p99_ms={self.p99_ms:.2f} floor_ms={floor} "
            f"rss_mib={self.rss_mib:.1f} driver={self.driver}"
        )
        if self.floor_ms is not None:
            line += f" above_floor_ms={self.above_floor_ms:.2f}"
        if (none := self.none_resident) is not None:
            line += f" ratio={self.p50_ms / none.p50_ms:.2f}"
            if self.floor_ms is not None:
                line += f" ratio_above_floor={self.above_floor_ms / none.above_floor_ms:.2f}"
        return line

    def missed(self) -> Iterator[str]:
        name = f"{self.operation} batch={self.batch} driver={self.driver}"
        if self.resident == 0:
            budget = _BUDGETS.get((self.operation, self.batch))
            if budget is not None:
                floor = (self.floor_ms or 0.0) if budget.above_floor else 0.0
                limit = floor + budget.ms
                if self.p50_ms > limit:
                    yield (
                        f"{name}: p50 is {self.p50_ms:.2f} ms, at most {limit:.2f} "
                        f"(floor {floor:.2f} + {budget.ms:g})"
                    )
        if self.none_resident is not None:
            limit = self.none_resident.p50_ms * RESIDENT_RATIO
            if self.p50_ms > limit:
                yield (
                    f"{name} resident={self.resident}: p50 is {self.p50_ms:.2f} ms, at most "
                    f"{limit:.2f} ({RESIDENT_RATIO:g} times that with none resident)"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pods:
    """A row of pods that start at once, with a slow driver."""

    pods: int
    claims: int
    """Claims of each pod."""

    resident: int
    sequential_ms: float
    """p50 until all are prepared, one after the other."""

    parallel_ms: float
    """p50 until all are prepared, at once."""

    rss_mib: float
    none_resident: Pods | None = None

    @property
    def speed_up(self) -> float:
        return self.sequential_ms / self.parallel_ms

    def line(self) -> str:
        line = (
            f"pods pods={self.pods} claims={self.claims} resident={self.resident} "
            f"sequential_ms={self.sequential_ms:.1f} parallel_ms={self.parallel_ms:.1f} "
            f"speed_up={self.speed_up:.1f} rss_mib={self.rss_mib:.1f}"
        )
        if self.none_resident is not None:
            line += f" ratio={self.parallel_ms / self.none_resident.parallel_ms:.2f}"
        return line

    def missed(self) -> Iterator[str]:
        name = f"pods={self.pods} claims={self.claims} resident={self.resident}"
        if self.resident == 0 and self.speed_up < SPEED_UP:
            yield f"{name}: at once is {self.speed_up:.1f} times as fast, at least {SPEED_UP:g}"
        if self.none_resident is not None:
            limit = self.none_resident.parallel_ms * RESIDENT_RATIO
            if self.parallel_ms > limit:
                yield (
                    f"{name}: p50 at once is {self.parallel_ms:.1f} ms, at most {limit:.1f} "
                    f"({RESIDENT_RATIO:g} times that with none resident)"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbor:
    """A row of a driver whose neighbor in the same process misbehaves."""

    action: str
    """Behavior of the neighbor."""

    batch: int
    p50_ms: float
    p99_ms: float
    floor_ms: float
    get_info_ms: float
    """The longest that either driver's GetInfo took."""

    quiet: Neighbor | None = None
    """The row that this one is compared with."""

    def line(self) -> str:
        line = (
            f"neighbor action={self.action} batch={self.batch} p50_ms={self.p50_ms:.2f} "
            f"p99_ms={self.p99_ms:.2f} floor_ms={self.floor_ms:.2f} "
            f"get_info_max_ms={self.get_info_ms:.0f}"
        )
        return line if self.quiet is None else f"{line} ratio={self.p50_ms / self.quiet.p50_ms:.2f}"

    def missed(self) -> Iterator[str]:
        name = f"neighbor action={self.action}"
        if self.get_info_ms > GET_INFO_MS:
            yield f"{name}: GetInfo took {self.get_info_ms:.0f} ms, at most {GET_INFO_MS:.0f}"
        if self.quiet is not None and self.p50_ms > (limit := self.quiet.p50_ms * NEIGHBOR_RATIO):
            yield (
                f"{name}: p50 is {self.p50_ms:.2f} ms, at most {limit:.2f} ({NEIGHBOR_RATIO:g} "
                f"times that beside a quiet one)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """A row of the memory in a state of the plugin, and the time of a start into it."""

    name: str
    rss_mib: float
    rss_budget_mib: float
    served_ms: float | None = None
    served_budget_ms: float | None = None

    def line(self) -> str:
        served = "" if self.served_ms is None else f"served_ms={self.served_ms:.0f} "
        return f"{self.name} {served}rss_mib={self.rss_mib:.1f}"

    def missed(self) -> Iterator[str]:
        if self.rss_mib > self.rss_budget_mib:
            yield (
                f"{self.name}: VmRSS is {self.rss_mib:.1f} MiB, at most {self.rss_budget_mib:.0f}"
            )
        limit = self.served_budget_ms
        if self.served_ms is not None and limit is not None and self.served_ms > limit:
            yield f"{self.name}: served after {self.served_ms:.0f} ms, at most {limit:.0f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endurance:
    """A row of the memory after many pairs of prepare and unprepare."""

    driver: str
    pairs: int
    rss_mib: Sequence[float]
    """VmRSS in even steps, from the first pairs to the last."""

    @property
    def first_mib(self) -> float:
        return max(self.rss_mib[: self._fifth])

    @property
    def last_mib(self) -> float:
        return max(self.rss_mib[-self._fifth :])

    @property
    def _fifth(self) -> int:
        return max(1, len(self.rss_mib) // 5)

    def line(self) -> str:
        return (
            f"endurance pairs={self.pairs} rss_first_fifth_mib={self.first_mib:.1f} "
            f"rss_last_fifth_mib={self.last_mib:.1f} "
            f"growth_mib={self.last_mib - self.first_mib:.1f} driver={self.driver}"
        )

    def missed(self) -> Iterator[str]:
        growth = self.last_mib - self.first_mib
        if growth > GROWTH_MIB:
            yield (
                f"endurance driver={self.driver}: VmRSS has grown by {growth:.1f} MiB, at most "
                f"{GROWTH_MIB:g}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices:
    """A row of the number of writes until the API server has the driver's devices."""

    name: str
    devices: int
    slices: int
    """Slices that the API server has at the end."""

    writes: int
    """Successful writes, as the API server counts them."""

    seconds: float | None
    """Seconds until it has all devices; None if there is nothing to wait for."""

    rss_mib: float
    """The highest VmRSS of the plugin until then."""

    slices_budget: int | None = None
    writes_budget: int | None = None
    rss_budget_mib: float | None = None

    def line(self) -> str:
        seconds = "-" if self.seconds is None else f"{self.seconds:.2f}"
        return (
            f"slices-{self.name} devices={self.devices} slices={self.slices} "
            f"writes={self.writes} seconds={seconds} rss_mib={self.rss_mib:.1f}"
        )

    def missed(self) -> Iterator[str]:
        name = f"slices-{self.name} devices={self.devices}"
        if self.slices_budget is not None and self.slices > self.slices_budget:
            yield f"{name}: {self.slices} slices, at most {self.slices_budget}"
        if self.writes_budget is not None and self.writes > self.writes_budget:
            yield f"{name}: {self.writes} writes, at most {self.writes_budget}"
        if self.rss_budget_mib is not None and self.rss_mib > self.rss_budget_mib:
            yield (f"{name}: VmRSS is {self.rss_mib:.1f} MiB, at most {self.rss_budget_mib:.0f}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """A row of many changes in a short time."""

    devices: int
    changes: int
    changes_seconds: float
    """Seconds from the first change until the driver has made the last one."""

    seconds: float
    """Seconds from the first change until the API server has the last one."""

    writes: Mapping[str, int]
    """Writes by slice, as the API server counts the changes of its spec."""

    rss_mib: float

    @property
    def changes_per_second(self) -> float:
        return self.changes / self.changes_seconds

    @property
    def writes_per_second(self) -> float:
        """Rate of the slice with the most writes, without its first write, which has no pause
        before it."""
        return max(0, max(self.writes.values()) - 1) / self.seconds

    def line(self) -> str:
        return (
            f"slices-burst devices={self.devices} changes={self.changes} "
            f"changes_per_second={self.changes_per_second:.0f} seconds={self.seconds:.2f} "
            f"slices={len(self.writes)} writes={sum(self.writes.values())} "
            f"writes_per_slice_and_second={self.writes_per_second:.2f} rss_mib={self.rss_mib:.1f}"
        )

    def missed(self) -> Iterator[str]:
        if self.changes_per_second < CHANGES_A_SECOND:
            yield (
                f"slices-burst devices={self.devices}: {self.changes_per_second:.0f} changes a "
                f"second, at least {CHANGES_A_SECOND:.0f}: the driver is held up"
            )
        if self.writes_per_second > WRITES_PER_SLICE_AND_SECOND:
            yield (
                f"slices-burst devices={self.devices}: a slice was written "
                f"{self.writes_per_second:.2f} times a second, at most "
                f"{WRITES_PER_SLICE_AND_SECOND:g}"
            )
