"""
Exponential backoff with jitter: each retry waits twice as long, up to a limit.

The caller sleeps, and decides whether to continue.
"""

from __future__ import annotations

import random


class Backoff:
    """Computes the delays between the attempts of one operation."""

    def __init__(self, first_seconds: float, limit_seconds: float, *, jitter: float = 0.5) -> None:
        """
        :param jitter: the random fraction of each delay. It prevents nodes that lost the API server
            at the same time from all reconnecting at the same time.
        """
        self._first = first_seconds
        self._limit = limit_seconds
        self._jitter = jitter
        self._failures = 0

    @property
    def failures(self) -> int:
        """The number of failures since the last success."""
        return self._failures

    def next_seconds(self) -> float:
        """Record a failure, and return the delay before the next attempt."""
        # The exponent is bounded, because after enough retries, 2.0 ** 1024 would raise an error.
        delay = min(self._limit, self._first * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return delay * (1 - self._jitter * random.random())  # noqa: S311 - no secret

    def succeeded(self) -> None:
        """Reset the delay to the first one."""
        self._failures = 0
