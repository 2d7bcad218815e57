"""
The reason for not publishing a device that a policy matches.

It must not depend on the rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from drakit import LeftOutReason

__all__ = ("Refusal",)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason, as a code for programs and a message for users."""

    reason: LeftOutReason
    message: str
    """A clause without times and counters: ``it is mounted at /``."""

    is_unknown: bool = False
    """Whether a rule cannot be checked, because something is unreadable. Then no new device is
    published, but one that was published before stays, with a taint."""

    def __str__(self) -> str:
        return self.message
