"""
Terminal pictures: each recording in `docs/pictures/*.txt`, drawn as a terminal shows it.

:mod:`.record` writes the recordings on a real cluster.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from tools.pictures.svg import Picture, width_of

LEAST = 80
"""Columns of a terminal, at least; otherwise as many as its longest line."""
MOST = 112
"""Columns to which long lines are broken."""
TABLE = 124
"""Columns of the longest line that is not broken, so that a table's rows stay together."""
SIZE = 12.5
STEP = 17
MARGIN = 18
BAR = 30


def draw(recording: Path) -> str:
    """Return the picture of a recording: its first line is the title, the rest is the screen."""
    title, _, text = recording.read_text().partition("\n")
    screen = list(_lines(text.strip("\n")))
    columns = max(LEAST, *map(len, screen))
    width = 2 * MARGIN + width_of("x" * columns, SIZE, mono=True)
    picture = Picture(title, text.strip(), width, BAR + MARGIN + STEP * len(screen) + 8)
    for number in range(3):
        picture.dot(MARGIN + 16 * number, BAR / 2 + 2, "first")
    picture.text(width / 2, BAR / 2 + 6, title, style="dim", anchor="middle")
    picture.line([(1, BAR), (width - 1, BAR)])
    for number, line in enumerate(screen):
        style = "m b" if line.startswith("$ ") else "m"
        picture.fixed(MARGIN, BAR + MARGIN + 4 + STEP * number, line, size=SIZE, style=style)
    return picture.svg()


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a screen; long ones are broken between words, commands as in a shell."""
    for line in text.splitlines():
        if len(line) <= TABLE:
            yield line
            continue
        is_command = line.startswith("$ ")
        parts = textwrap.wrap(
            line, MOST - 2, subsequent_indent="    ", break_on_hyphens=False, drop_whitespace=True
        )
        for number, part in enumerate(parts, start=1):
            yield f"{part} \\" if is_command and number < len(parts) else part
