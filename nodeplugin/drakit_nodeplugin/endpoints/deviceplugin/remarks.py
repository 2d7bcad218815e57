"""
What people are told of device plugins: some things once, others again when they happen again, and
nothing faster than anybody reads.

It must not know what is told, or where it goes.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from drakit.rate_limiter import RateLimiter
from drakit_nodeplugin.endpoints.endpoint import Diagnostic

__all__ = ("Diagnostics",)

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
"""After which the same sentence is told again, if its cause comes up again."""

ONCE_SECONDS = 86_400.0
"""The same for what is so for as long as a plugin is as it is."""

MAX_REMARKS = 256
"""Different sentences that are remembered; the oldest is forgotten first."""

MAX_AT_ONCE = 50.0
SECONDS_EACH = 5.0
"""So many sentences are told, and then one in so many seconds; others are not."""


class Diagnostics:
    """Passes remarks on."""

    def __init__(self, tell: Callable[[Diagnostic], None]) -> None:
        self._tell = tell
        self._told: dict[Diagnostic, float] = {}
        """Until when a remark is not told again; loop time."""
        self._allowance = RateLimiter(burst=MAX_AT_ONCE, per_second=1 / SECONDS_EACH)
        self._silent = False

    def say(self, reason: str, note: str, *, once: bool = False) -> None:
        """Tell a sentence."""
        now = asyncio.get_running_loop().time()
        remark = Diagnostic(reason=reason, note=note)
        if now < self._told.get(remark, -math.inf) or not self._may_tell():
            return
        self._told.pop(remark, None)
        self._told[remark] = now + (ONCE_SECONDS if once else AGAIN_SECONDS)
        if len(self._told) > MAX_REMARKS:
            del self._told[next(iter(self._told))]
        self._tell(remark)

    def _may_tell(self) -> bool:
        may = self._allowance.take()
        if not may and not self._silent:
            logger.warning("device plugins have too much to say; some of it is left out")
        self._silent = not may
        return may
