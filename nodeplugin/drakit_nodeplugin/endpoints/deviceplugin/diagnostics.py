"""
The Events about device plugins, bounded: the same sentence once a minute or once a day, and all
sentences at a rate that people can read. A device plugin that fails all the time, or under many
names, must flood neither the log nor the API server.

It must not know what a diagnostic is about, or where it goes.
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

REPEAT_SECONDS = 60.0
"""Minimum time between two reports of the same sentence."""

ONCE_SECONDS = 86_400.0
"""The same for a condition that lasts for as long as a plugin is as it is."""

MAX_REMEMBERED = 256
"""Different sentences that are remembered; the oldest is forgotten first."""

BURST = 50.0
SECONDS_EACH = 5.0
"""So many diagnostics are reported at once, and then one in so many seconds; others are dropped."""


class Diagnostics:
    """Deduplicates and limits diagnostics."""

    def __init__(self, report: Callable[[Diagnostic], None]) -> None:
        self._report = report
        self._quiet_until: dict[Diagnostic, float] = {}
        """Until when a diagnostic is not repeated; loop time."""
        self._limiter = RateLimiter(burst=BURST, per_second=1 / SECONDS_EACH)
        self._dropping = False

    def report(self, reason: str, note: str, *, once: bool = False) -> None:
        """Report a sentence, unless it was reported a moment ago."""
        now = asyncio.get_running_loop().time()
        diagnostic = Diagnostic(reason=reason, note=note)
        if now < self._quiet_until.get(diagnostic, -math.inf) or not self._within_limit():
            return
        self._quiet_until.pop(diagnostic, None)
        self._quiet_until[diagnostic] = now + (ONCE_SECONDS if once else REPEAT_SECONDS)
        if len(self._quiet_until) > MAX_REMEMBERED:
            del self._quiet_until[next(iter(self._quiet_until))]
        self._report(diagnostic)

    def _within_limit(self) -> bool:
        within = self._limiter.take()
        if not within and not self._dropping:
            logger.warning("too many diagnostics of device plugins, some are dropped")
        self._dropping = not within
        return within
