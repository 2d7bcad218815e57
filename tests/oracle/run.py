"""
Many random worlds at once: what our search and the allocator answer, counted.

The worlds are divided over processes; each asks a helper process of its own.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from drakit_explain.allocation import Outcome
from drakit_explain.cel.helper import Helper
from drakit_explain.selectors import SelectorIndex
from tests.oracle.compare import Comparison, compare
from tests.oracle.worlds import NEWEST, make_cluster

PART = 500
"""Worlds that one process compares before it takes the next."""

MAX_UNDECIDED = 0.03
"""The share of nodes on which our search may give up."""


@dataclass(slots=True)
class Tally:
    """The answers of both for some worlds."""

    answers: Counter[tuple[Outcome, Outcome]] = field(
        default_factory=Counter[tuple[Outcome, Outcome]]
    )
    """Of each node, by our outcome and theirs."""

    worlds: int = 0
    disagreements: list[str] = field(default_factory=list[str])

    skipped: int = 0
    """Worlds in which the answer of our search does not count."""

    @property
    def undecided(self) -> int:
        """Nodes on which our search gave up."""
        return sum(n for (ours, _), n in self.answers.items() if ours is Outcome.UNDECIDED)

    @property
    def good(self) -> bool:
        return not self.disagreements and self.undecided <= MAX_UNDECIDED * self.answers.total()

    def add(self, seed: int, nodes: Iterable[Comparison | None]) -> None:
        self.worlds += 1
        for number, found in enumerate(nodes, start=1):
            if found is None:
                self.skipped += 1
                continue
            self.answers[found.ours.outcome, found.theirs] += 1
            if not found.agrees:
                text = f" ({found.text})" if found.text else ""
                self.disagreements.append(
                    f"seed {seed}, node {number}: ours {found.ours.outcome.name}, theirs "
                    f"{found.theirs.name}{text}"
                )

    def merge(self, other: Tally) -> None:
        self.worlds += other.worlds
        self.answers += other.answers
        self.disagreements += other.disagreements
        self.skipped += other.skipped

    def lines(self) -> Iterator[str]:
        """Return the report: counts by answer, the undecided share, each disagreement."""
        nodes = self.answers.total()
        yield f"{self.worlds} worlds, {nodes} nodes, and {self.skipped} that do not count"
        for (ours, theirs), number in sorted(self.answers.items(), key=lambda each: -each[1]):
            yield f"  ours {ours.name:9} theirs {theirs.name:9} {number:7}"
        share = self.undecided / nodes if nodes else 0
        yield f"undecided by us: {self.undecided} ({share:.2%}, at most {MAX_UNDECIDED:.0%})"
        yield f"disagreements: {len(self.disagreements)}"
        yield from self.disagreements


def compare_worlds(seeds: Sequence[int], *, program: Path, minor: str = NEWEST) -> Tally:
    """
    Compare the worlds of some seeds, one after the other.

    :param program: the helper for the minor release.
    """
    tally = Tally()
    index = SelectorIndex()
    with Helper(program) as helper:
        for seed in seeds:
            tally.add(seed, compare(make_cluster(seed, minor), helper, index))
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
