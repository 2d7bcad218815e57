"""
The output of a command: a table with columns as wide as their content, or an error with a message
and an exit code.

Does not depend on the commands or the content.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from drakit.text import escaped, escaped_streams
from drakit_daemon.command_line import INVALID, print_error

# ---------------------------------------------------------------- errors


class CommandError(Exception):
    """The command failed."""

    exit_code = 1


class UsageError(CommandError):
    """The arguments or settings are invalid."""

    exit_code = INVALID


@escaped_streams()
def run(command: Callable[[], int], *, extra: str) -> int:
    """Run a command that needs an extra of drakit. Return the exit code."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except CommandError as error:
        print_error(error)
        return error.exit_code
    except ImportError as error:
        print_error(f"this command needs the extra {extra}: pip install '{extra}' ({error})")
        return INVALID
    except BrokenPipeError:
        # The reader closed the pipe (for example, ``| head``). Avoid a second error when the
        # interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        return 130


# ---------------------------------------------------------------- tables

_GAP = "  "


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with one line per row."""
    lines = [[visible(cell) or "-" for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        _GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def visible(text: str) -> str:
    """Return a string as one line, with control characters escaped."""
    return escaped(" ".join(text.split()))
