"""
The error with which a command ends: a sentence and an exit code.

It must not know the commands.
"""

from __future__ import annotations

__all__ = ("CommandError", "UsageError")


class CommandError(Exception):
    """The command failed."""

    exit_code = 1


class UsageError(CommandError):
    """Wrong usage: invalid arguments or settings."""

    exit_code = 2
