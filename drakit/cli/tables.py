"""
Tables for people: columns that are as wide as they need to be.

It must not know what is shown.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ("table",)

_GAP = "  "


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table, a line a row; control characters in it become visible."""
    lines = [[_visible(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        _GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text) or "-"
