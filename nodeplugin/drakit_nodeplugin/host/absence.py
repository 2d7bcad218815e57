"""How long the API server has not served a resource."""

from __future__ import annotations

import asyncio

from drakit_daemon.kube import ApiError, NotFoundError

MISSING_SECONDS = 60.0
"""How long a resource must be missing before its objects are treated as deleted. A starting API
server may not serve it yet."""


class Absence:
    """The time since which a resource has been missing."""

    def __init__(self) -> None:
        self._since: float | None = None

    def has_lasted(self, error: ApiError) -> bool:
        """Return whether the resource has been missing for :data:`MISSING_SECONDS`, according to an
        error. After any other error, this time starts again."""
        if not isinstance(error, NotFoundError):
            self.end()
            return False
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
        return now - self._since >= MISSING_SECONDS

    def end(self) -> None:
        """Record that the resource is served."""
        self._since = None
