"""
Which resources the kubelet's own device manager serves, or has given devices of to containers that
still run: two may not serve one.

Asked at a registration and again and again; who asks within a moment shares one answer. If the
kubelet does not say it, nobody knows, and that is no reason to refuse anybody.

It must not know how the kubelet is asked, or what follows from its answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping

__all__ = ("KubeletResources",)

logger = logging.getLogger(__name__)

FRESH_SECONDS = 1.0
"""How long an answer is as good as a new one."""

ANSWER_SECONDS = 2.0
"""How long it may take: a plugin waits for it."""


class KubeletResources:
    """Asks the kubelet, and says when that fails."""

    def __init__(self, read: Callable[[], Awaitable[Mapping[str, bool]]]) -> None:
        self._read = read
        self._lock = asyncio.Lock()
        self._asked_at = -math.inf
        self._answer: Mapping[str, bool] | None = None
        self._failed = False

    async def names(self) -> Mapping[str, bool] | None:
        """Give the names of the resources, and whether they are served (True) or containers only
        still have devices of them (False); None if the kubelet does not say it."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if loop.time() - self._asked_at >= FRESH_SECONDS:
                self._answer = await self._ask()
                self._asked_at = loop.time()
            return self._answer

    async def _ask(self) -> Mapping[str, bool] | None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await self._read()
        except Exception as error:  # of a client that is handed in
            if not self._failed:
                text = str(error) or type(error).__name__
                logger.warning("the kubelet's resources cannot be read", extra={"error": text})
            self._failed = True
            return None
        if self._failed:
            logger.info("the kubelet's resources can be read again")
        self._failed = False
        return dict(answer)
