"""
How long to wait before trying again: twice as long each time, up to a limit, never all at once.

It must not know what is tried.
"""

from __future__ import annotations

import random

__all__ = ("Backoff",)


class Backoff:
    """The delays of one thing that is tried again and again."""

    def __init__(self, *, first_seconds: float, limit_seconds: float, jitter: float = 0.5) -> None:
        """``jitter`` is the part of each delay that is random: the nodes of a cluster, all cut off
        at once, must not all come back at once."""
        self._first = first_seconds
        self._limit = limit_seconds
        self._jitter = jitter
        self._failures = 0

    @property
    def failures(self) -> int:
        """How often it has failed since it last succeeded."""
        return self._failures

    def next_seconds(self) -> float:
        """Count a failure, and say how long to wait now."""
        # The exponent is bounded: 2.0 ** 1024 is an error, after a long night of retries.
        delay = min(self._limit, self._first * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return delay * (1 - self._jitter * random.random())  # noqa: S311 - no secret

    def succeeded(self) -> None:
        """Begin anew with the first delay."""
        self._failures = 0
