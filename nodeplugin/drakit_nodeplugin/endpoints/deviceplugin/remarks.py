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

from drakit_nodeplugin.endpoints.endpoint import Remark

__all__ = ("Remarks",)

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
"""After which the same sentence is told again, if its cause comes up again."""

MAX_REMARKS = 256
"""Different sentences; what comes on top is in the log alone."""


class Remarks:
    """Passes remarks on."""

    def __init__(self, tell: Callable[[Remark], None]) -> None:
        self._tell = tell
        self._told: dict[Remark, float] = {}
        """Until when a remark is not told again; loop time."""

    def say(self, reason: str, note: str, *, once: bool = False) -> None:
        """Tell a sentence."""
        now = asyncio.get_running_loop().time()
        remark = Remark(reason=reason, note=note)
        if now < self._told.get(remark, -math.inf):
            return
        if remark not in self._told and len(self._told) >= MAX_REMARKS:
            facts = {"reason": reason, "note": note}
            logger.warning("device plugins have too much to say", extra=facts)
            return
        self._told[remark] = math.inf if once else now + AGAIN_SECONDS
        self._tell(remark)
