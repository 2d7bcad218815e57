"""
Rows of the operator and of ``kubectl drakit``: their lines, and the budgets that they miss.

Pure: :mod:`.operator` measures the numbers. docs/contributors/performance.md explains the budgets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = (
    "ClaimChanges",
    "Command",
    "Hostile",
    "OneExplanation",
    "OperatorMemory",
    "Quiet",
    "SliceChange",
    "Synced",
)

MEMORY_MIB = 320.0
"""The memory limit that the chart sets."""

SYNC_SECONDS = 30.0
CLAIM_SECONDS = 1.0
SLICE_SECONDS = 10.0
EXPLANATION_MS = 100.0

CHANGES_SHARE = 0.95
"""The share of the wanted changes per second that a run must reach to count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Synced:
    """From the start of the process until each waiting pod has its Event."""

    facts: str
    seconds: float | None
    """None if a pod had none in time."""

    cpu_seconds: float
    rss_mib: float
    peak_mib: float

    def line(self) -> str:
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        return (
            f"operator-sync {self.facts} seconds={seconds} cpu_seconds={self.cpu_seconds:.1f} "
            f"rss_mib={self.rss_mib:.1f} rss_peak_mib={self.peak_mib:.1f}"
        )

    def missed(self) -> Iterator[str]:
        if self.seconds is None:
            yield "operator-sync: not every pod had its Event in time"
        elif self.seconds > SYNC_SECONDS:
            yield f"operator-sync: took {self.seconds:.1f} s, at most {SYNC_SECONDS:.0f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Quiet:
    """Changes that give nothing to report, and the writes of the operator meanwhile."""

    seconds: float
    changes: int
    writes: int
    cpu_percent: float

    def line(self) -> str:
        return (
            f"operator-quiet seconds={self.seconds:.0f} changes={self.changes} "
            f"writes={self.writes} cpu_percent={self.cpu_percent:.1f}"
        )

    def missed(self) -> Iterator[str]:
        if self.writes:
            yield f"operator-quiet: {self.writes} writes without anything to report, at most 0"


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceChange:
    """From the write of a slice until all waiting pods are evaluated again."""

    pods: int
    seconds: float | None

    def line(self) -> str:
        seconds = "-" if self.seconds is None else f"{self.seconds:.2f}"
        return f"operator-slice-change pods={self.pods} seconds={seconds}"

    def missed(self) -> Iterator[str]:
        if self.seconds is None or self.seconds > SLICE_SECONDS:
            took = "was not finished in time" if self.seconds is None else f"{self.seconds:.2f} s"
            yield f"operator-slice-change: {took}, at most {SLICE_SECONDS:.0f} s"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimChanges:
    """From the write of a claim until its Event arrives in a watch."""

    changes: int
    per_second: float
    """Reached; `wanted_per_second` were to be."""

    wanted_per_second: int
    unanswered: int
    """Changes without an Event."""

    p50_ms: float
    p99_ms: float
    cpu_percent: float
    peak_mib: float

    def line(self) -> str:
        return (
            f"operator-claims changes={self.changes} changes_per_second={self.per_second:.0f} "
            f"p50_ms={self.p50_ms:.0f} p99_ms={self.p99_ms:.0f} unanswered={self.unanswered} "
            f"cpu_percent={self.cpu_percent:.0f} rss_peak_mib={self.peak_mib:.1f}"
        )

    def missed(self) -> Iterator[str]:
        if self.unanswered:
            yield f"operator-claims: {self.unanswered} changed claims had no Event"
        if self.per_second < self.wanted_per_second * CHANGES_SHARE:
            yield (
                f"operator-claims: {self.per_second:.0f} changes a second were made, "
                f"{self.wanted_per_second} must be"
            )
        if self.p99_ms > CLAIM_SECONDS * 1000:
            yield (
                f"operator-claims: p99 is {self.p99_ms:.0f} ms, at most {CLAIM_SECONDS * 1000:.0f}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorMemory:
    """The peak of the operator and its helper up to the end of a phase."""

    phase: str
    seconds: float | None
    """The duration of a relist; None if it exceeded the time limit."""

    rss_mib: float
    peak_mib: float
    helper_peak_mib: float

    def line(self) -> str:
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        return (
            f"operator-{self.phase} seconds={seconds} rss_mib={self.rss_mib:.1f} "
            f"rss_peak_mib={self.peak_mib:.1f} helper_peak_mib={self.helper_peak_mib:.1f}"
        )

    def missed(self) -> Iterator[str]:
        if self.seconds is None:
            yield f"operator-{self.phase}: it was not complete in time"
        if self.peak_mib > MEMORY_MIB:
            yield (
                f"operator-{self.phase}: the peak is {self.peak_mib:.1f} MiB, at most "
                f"{MEMORY_MIB:.0f}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OneExplanation:
    """One explanation in one process, after a slice has changed, and the first one of all."""

    devices: int
    first_ms: float
    """With the compilation and evaluation of its selectors: the highest."""

    p50_ms: float
    max_ms: float

    def line(self) -> str:
        return (
            f"operator-explanation devices={self.devices} first_ms={self.first_ms:.1f} "
            f"p50_ms={self.p50_ms:.1f} max_ms={self.max_ms:.1f}"
        )

    def missed(self) -> Iterator[str]:
        if self.max_ms > EXPLANATION_MS:
            yield f"operator-explanation: {self.max_ms:.1f} ms, at most {EXPLANATION_MS:.0f} ms"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hostile:
    """Claims that are designed to be expensive: a waiting pod must still get its Event."""

    facts: str
    seconds: float | None
    peak_mib: float
    ended: int | None
    """The exit code, if the operator ended by itself."""

    def line(self) -> str:
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        return f"operator-hostile {self.facts} seconds={seconds} rss_peak_mib={self.peak_mib:.1f}"

    def missed(self) -> Iterator[str]:
        if self.ended is not None:
            yield f"operator-hostile: the operator ended by itself, with {self.ended}"
        elif self.seconds is None:
            yield "operator-hostile: not every pod had its Event in time"
        if self.peak_mib > MEMORY_MIB:
            yield f"operator-hostile: the peak is {self.peak_mib:.1f} MiB, at most {MEMORY_MIB:.0f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command of ``kubectl drakit`` on the same cluster; without a budget."""

    command: str
    seconds: float
    peak_mib: float
    code: int

    def line(self) -> str:
        return (
            f'kubectl-drakit command="{self.command}" seconds={self.seconds:.1f} '
            f"rss_peak_mib={self.peak_mib:.1f} code={self.code}"
        )

    def missed(self) -> Iterator[str]:
        if self.code not in (0, 1):
            yield f"kubectl-drakit {self.command}: it ended with {self.code}"
