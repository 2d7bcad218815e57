"""
When to undo what somebody else does to our slices: at once, but not again and again.

Another instance of the driver, or an admin's tool, may undo in turn what we undo. Each time that it
goes on we wait for longer, so that the API server does not suffer and people have time to see it.

It must not know what is undone.
"""

from __future__ import annotations

__all__ = ("ConflictBackoff",)

FIRST_SECONDS = 2.0
LONGEST_SECONDS = 60.0
QUIET_SECONDS = 600.0
"""After so long without anything to undo, the next is undone at once again."""


class ConflictBackoff:
    """The delays of one pool; times are the loop's."""

    def __init__(self) -> None:
        self.until = 0.0
        """From when on something may be undone."""

        self._delay = FIRST_SECONDS
        self._last: float | None = None

    def undone(self, now: float) -> None:
        """Something was undone: the next time is later."""
        if self._last is None or now - self._last >= QUIET_SECONDS:
            self._delay = FIRST_SECONDS
        else:
            self._delay = min(2 * self._delay, LONGEST_SECONDS)
        self._last = now
        self.until = now + self._delay
