"""
A row: the figures that a measurement prints in one line, and their budgets.

Each measurement builds its rows and has their budgets. docs/contributors/performance.md explains
both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """A result that is printed in one line and compared with its budgets."""

    name: str
    """The measurement, and the labels that distinguish its rows."""

    figures: Mapping[str, float | None]
    """None means that the end was not reached in time."""

    at_most: Mapping[str, float] = field(default_factory=dict[str, float])
    at_least: Mapping[str, float] = field(default_factory=dict[str, float])

    def line(self) -> str:
        return " ".join([self.name, *(f"{key}={_text(x)}" for key, x in self.figures.items())])

    def missed(self) -> Iterator[str]:
        """Return the budgets that the row exceeds, one sentence each."""
        for word, limits in (("most", self.at_most), ("least", self.at_least)):
            for key, limit in limits.items():
                figure = self.figures[key]
                if figure is None:
                    yield f"{self.name}: it was not finished in time"
                elif (figure > limit) if word == "most" else (figure < limit):
                    yield f"{self.name}: {key} is {_text(figure)}, at {word} {limit:.4g}"


def _text(figure: float | None) -> str:
    """Format a count unchanged, and a measured figure with three digits."""
    if figure is None:
        return "-"
    if isinstance(figure, int):
        return str(figure)
    decimals = 2 if figure < 10 else 1 if figure < 100 else 0
    return f"{figure:.{decimals}f}"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median_ms(seconds: Sequence[float]) -> float:
    return percentile(seconds, 0.5) * 1000


def compared(seconds: Sequence[float], skeleton: Sequence[float]) -> Mapping[str, float]:
    """Return the median of the skeleton, and the other median as a multiple of it."""
    skeleton_ms = median_ms(skeleton)
    return {"skeleton_ms": skeleton_ms, "multiple": median_ms(seconds) / skeleton_ms}
