"""
Many random worlds at once: verdicts and counts, compared.

The worlds are divided over processes; each asks a helper process of its own.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from drakit_explain.cel.allocator import Allocator
from drakit_explain.cel.helper import Helper
from drakit_explain.verdicts import VerdictOutcome
from tests.oracle.compare import Comparison, compare
from tests.oracle.worlds import NEWEST, make_cluster

PART = 500
"""Worlds that one process compares before it takes the next."""

MAX_UNDECIDED = 0.03
"""The share of nodes about which the allocator may find no end in time."""


@dataclass(slots=True)
class Tally:
    """The verdicts about the nodes of some worlds."""

    answers: Counter[VerdictOutcome] = field(default_factory=Counter[VerdictOutcome])
    worlds: int = 0
    shared: int = 0
    """Worlds of which a verdict was that of another node."""

    different: list[str] = field(default_factory=list[str])

    skipped: int = 0
    """Worlds that the explainer does not evaluate."""

    @property
    def undecided(self) -> int:
        return self.answers[VerdictOutcome.UNDECIDED]

    @property
    def good(self) -> bool:
        return not self.different and self.undecided <= MAX_UNDECIDED * self.answers.total()

    def add(self, seed: int, nodes: Iterable[Comparison | None]) -> None:
        self.worlds += 1
        found = list(nodes)
        for number, each in enumerate(found, start=1):
            if each is None:
                self.skipped += 1
                continue
            self.answers[each.ours.outcome] += 1
            if each.problem:
                self.different.append(f"seed {seed}, node {number}: {each.problem}")
        self.shared += len({id(each and each.ours) for each in found}) < len(found)

    def merge(self, other: Tally) -> None:
        self.worlds += other.worlds
        self.answers += other.answers
        self.different += other.different
        self.skipped += other.skipped
        self.shared += other.shared

    def lines(self) -> Iterator[str]:
        """Return the report: counts by answer, the undecided share, each difference."""
        nodes = self.answers.total()
        yield (
            f"{self.worlds} worlds, {nodes} nodes; {self.shared} worlds with equal nodes, "
            f"{self.skipped} that are not evaluated"
        )
        for outcome, number in self.answers.most_common():
            yield f"  {outcome.value:12} {number:7}"
        share = self.undecided / nodes if nodes else 0
        yield f"undecided: {self.undecided} ({share:.2%}, at most {MAX_UNDECIDED:.0%})"
        yield f"different: {len(self.different)}"
        yield from self.different


def compare_worlds(seeds: Sequence[int], *, program: Path, minor: str = NEWEST) -> Tally:
    """
    Compare the worlds of some seeds, one after the other.

    :param program: the helper for the minor release.
    """
    tally = Tally()
    with Helper(program) as helper, closing(Allocator(lambda _: program)) as allocator:
        for seed in seeds:
            tally.add(seed, compare(make_cluster(seed, minor), helper, allocator))
    return tally


def compare_all(
    seeds: range, *, program: Path, minor: str = NEWEST, processes: int | None = None
) -> Tally:
    """Compare the worlds of all seeds, in several processes."""
    parts = [seeds[start : start + PART] for start in range(0, len(seeds), PART)]
    tally = Tally()
    with ProcessPoolExecutor(processes or os.cpu_count()) as pool:
        for part in pool.map(partial(compare_worlds, program=program, minor=minor), parts):
            tally.merge(part)
    return tally
