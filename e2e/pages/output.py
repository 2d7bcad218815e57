"""
Compares what a command printed with what a page shows.

The page shows real output of one cluster; numbers, ages, UIDs and generated names are others on the
next cluster. They match by their shape, and `...` matches anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

SUFFIX = "[bcdfghjklmnpqrstvwxz2456789]"
"""A character of a generated name (k8s.io/apimachinery/pkg/util/rand)."""

SHAPES = (
    (
        r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    ),
    (r"sha256:[0-9a-f]{6,64}", r"sha256:[0-9a-f]{6,64}"),
    # A ResourceSlice of drakit.
    (r"-[0-9a-f]{8}(?![\w-])", r"-[0-9a-f]{8}(?![\w-])"),
    # The pod of a Deployment, then any other generated name.
    (rf"-{SUFFIX}{{8,10}}-{SUFFIX}{{5}}(?![\w-])", rf"-{SUFFIX}{{8,10}}-{SUFFIX}{{5}}(?![\w-])"),
    (rf"-{SUFFIX}{{5}}(?![\w-])", rf"-{SUFFIX}{{5}}(?![\w-])"),
    # The age of an object, or of an Event that may have come more than once.
    (
        r"(?<![\w.-])(?:\d+[smhdy])+(?![\w-])(?: \(x\d+ over (?:\d+[smhdy])+\))?",
        r"(?:\d+[smhdy])+(?: \(x\d+ over (?:\d+[smhdy])+\))?",
    ),
    (r"\d+", r"\d+"),
    (r"\.\.\.", r".*"),
    (r"\s+", r"\s+"),
)
"""What a piece of the page looks like, and what it stands for; the first that fits is taken."""

PIECES = re.compile("|".join(f"({shown})" for shown, _ in SHAPES))


def line_pattern(line: str) -> re.Pattern[str]:
    """The pattern of a line of the page."""
    parts: list[str] = []
    place = 0
    for piece in PIECES.finditer(line.strip()):
        parts.append(re.escape(line.strip()[place : piece.start()]))
        parts.append(SHAPES[(piece.lastindex or 1) - 1][1])
        place = piece.end()
    parts.append(re.escape(line.strip()[place:]))
    return re.compile("".join(parts))


def difference(shown: str, printed: str) -> str | None:
    """
    Return how the output differs from the page; None if it does not.

    Empty lines do not count. A line `...` stands for any number of lines, also none.
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
    """Whether lines match patterns, of which None matches any number of them."""
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
