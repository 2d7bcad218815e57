"""
The error with which a command ends: a sentence and an exit code.

It must not know the commands.
"""

from __future__ import annotations

__all__ = ("CommandError", "UsageError")


class CommandError(Exception):
    """What was asked for could not be done."""

    exit_code = 1


class UsageError(CommandError):
    """It cannot be done like this: wrong arguments, or wrong settings."""

    exit_code = 2
