"""
Compares the output of a command with the output on a page.

The page shows real output of one cluster. Numbers, ages, UIDs and generated names differ in other
clusters, so they are compared by their format. `...` matches anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

SUFFIX = "[bcdfghjklmnpqrstvwxz2456789]"
"""A character of a generated name (k8s.io/apimachinery/pkg/util/rand)."""

AGE = r"(?:\d+[smhdy])+"

SHAPES = (
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    r"sha256:[0-9a-f]{6,64}",
    # A ResourceSlice of drakit.
    r"-[0-9a-f]{8}(?![\w-])",
    # First the pod of a Deployment, then any other generated name.
    rf"-{SUFFIX}{{8,10}}-{SUFFIX}{{5}}(?!\w)",
    rf"-{SUFFIX}{{5}}(?!\w)",
    # The age of an object, or of an Event that may have been repeated.
    rf"(?<![\w.-]){AGE}(?![\w-])(?: \(x\d+ over {AGE}\))?",
    r"\d+",
    r"\s+",
    r"\.\.\.",
)
"""If a piece of the page matches one of these patterns, it stands for any text that matches it. The
first match applies."""

PIECES = re.compile("|".join(f"({shape})" for shape in SHAPES))


def line_pattern(line: str) -> re.Pattern[str]:
    """Return the pattern for a line of the page."""
    parts: list[str] = []
    place = 0
    for piece in PIECES.finditer(line):
        shape = SHAPES[(piece.lastindex or 1) - 1]
        parts += [re.escape(line[place : piece.start()]), ".*" if piece[0] == "..." else shape]
        place = piece.end()
    return re.compile("".join([*parts, re.escape(line[place:])]))


def difference(shown: str, printed: str) -> str | None:
    """
    Return how the output differs from the page, or None.

    Ignores empty lines. A line `...` stands for any number of lines, including none.
    """
    expected = [line.strip() for line in shown.splitlines() if line.strip()]
    actual = [line.strip() for line in printed.splitlines() if line.strip()]
    patterns = [None if line == "..." else line_pattern(line) for line in expected]
    if _matches(patterns, actual):
        return None
    for number, (pattern, line) in enumerate(zip(patterns, actual, strict=False)):
        if pattern is None:
            break
        if not pattern.fullmatch(line):
            return f"the page shows   {expected[number]}\nbut this came    {line}"
    return f"the page shows {len(expected)} lines, and {len(actual)} came that do not fit them"


def _matches(patterns: Sequence[re.Pattern[str] | None], lines: Sequence[str]) -> bool:
    """Return whether lines match patterns. None matches any number of lines."""
    places = {0}
    for line_number in range(len(lines) + 1):
        places = _past_gaps(patterns, places)
        if line_number == len(lines):
            break
        places = {
            place if patterns[place] is None else place + 1
            for place in places
            if place < len(patterns)
            and ((pattern := patterns[place]) is None or pattern.fullmatch(lines[line_number]))
        }
    return len(patterns) in places


def _past_gaps(patterns: Sequence[re.Pattern[str] | None], places: set[int]) -> set[int]:
    found = set(places)
    for place in sorted(places):
        while place < len(patterns) and patterns[place] is None:
            place += 1
            found.add(place)
    return found
