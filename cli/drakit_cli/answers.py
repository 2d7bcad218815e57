"""
How a command answers people: a table with columns as wide as their content, or an error, which is a
sentence and an exit code.

It must not know the commands, or what is shown.
"""

from __future__ import annotations

from collections.abc import Sequence

# ---------------------------------------------------------------- errors


class CommandError(Exception):
    """The command failed."""

    exit_code = 1


class UsageError(CommandError):
    """Wrong usage: invalid arguments or settings."""

    exit_code = 2


# ---------------------------------------------------------------- tables

_GAP = "  "


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table, one line per row."""
    lines = [[visible(cell) or "-" for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        _GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def visible(text: str) -> str:
    """Write a text on one line, with control characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
