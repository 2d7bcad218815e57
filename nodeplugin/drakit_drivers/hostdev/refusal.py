"""
Why a device that a policy matches is not published.

It must not know which rules there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from drakit import LeftOutReason

__all__ = ("Refusal",)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason for programs, and for people."""

    reason: LeftOutReason
    message: str
    """A clause without times and counters: ``it is mounted at /``."""

    def __str__(self) -> str:
        return self.message
