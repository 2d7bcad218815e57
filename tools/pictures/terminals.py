"""
Draws terminal pictures: each recording in `docs/pictures/*.txt` looks like a terminal.

:mod:`.record` writes the recordings on a real cluster. A picture has its own background, and colors
for light and dark mode: a browser applies the scheme of the page that shows the picture.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

__all__ = ("FOLDER", "draw")

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"

LEAST = 80
"""The minimum number of columns. Otherwise, the longest line determines it."""
MOST = 112
"""The column at which long lines are wrapped."""
TABLE = 124
"""The length of the longest line that is not wrapped, so that a table's rows stay together."""
SIZE = 12.5
COLUMN = SIZE * 0.61
"""The approximate width of a character in common fonts."""
STEP = 17
MARGIN = 18
BAR = 30
"""The height of the title bar."""

STYLE = """\
text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, \
sans-serif; fill: #1f2328 }
.m { font-family: ui-monospace, Menlo, Consolas, 'Liberation Mono', 'DejaVu Sans Mono', monospace }
.b { font-weight: 600 }
.page { fill: #ffffff; stroke: #d0d7de }
.dot { fill: #8c959f }
.title { fill: #57606a }
.rule { stroke: #57606a; stroke-opacity: 0.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .page { fill: #161b22; stroke: #3d444d }
  .dot { fill: #6e7781 }
  .title { fill: #9aa4af }
  .rule { stroke: #9aa4af }
}
"""


def draw(recording: Path) -> str:
    """Return the picture of a recording. Its first line is the title, the rest is the screen."""
    title, _, text = recording.read_text().partition("\n")
    screen = list(_lines(text.strip("\n")))
    width = 2 * MARGIN + COLUMN * max(LEAST, *map(len, screen))
    height = BAR + MARGIN + STEP * len(screen) + 8
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.1f} {height}"'
            f' width="{width:.1f}" height="{height}" role="img"'
            ' aria-labelledby="title description">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(text.strip())}</desc>',
            f"<style>\n{STYLE}</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{width - 1:.1f}" height="{height - 1}"'
            ' rx="8"/>',
            *(f'<circle class="dot" cx="{MARGIN + 16 * n}" cy="17" r="4"/>' for n in range(3)),
            f'<text x="{width / 2:.1f}" y="21" font-size="12" class="title" text-anchor="middle">'
            f"{escape(title)}</text>",
            f'<path class="rule" d="M1 {BAR} H{width - 1:.1f}"/>',
            *_texts(screen),
            "</svg>\n",
        ]
    )


def _texts(screen: list[str]) -> Iterator[str]:
    """Yield the elements of a screen. Each character has the same width, whatever the font is."""
    for number, line in enumerate(screen):
        if line.strip():
            style = "m b" if line.startswith("$ ") else "m"
            yield (
                f'<text x="{MARGIN}" y="{BAR + MARGIN + 4 + STEP * number}" font-size="{SIZE}"'
                f' class="{style}" textLength="{COLUMN * len(line):.1f}"'
                f' lengthAdjust="spacingAndGlyphs" xml:space="preserve">{escape(line)}</text>'
            )


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a screen. Long ones are wrapped between words, and commands as in a
    shell."""
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
