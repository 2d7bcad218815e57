"""
What cannot be listed or read, for readiness, metrics and the log.

It must not know Kopf, sessions, or the store.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from drakit_operator.kinds import Kind
from drakit_operator.metrics import Metrics

__all__ = ("Observer",)

logger = logging.getLogger(__name__)

REMEMBERED = 1000
"""Objects that are logged once; beyond that, the log may repeat itself."""


class Observer:
    """Counts and logs; its methods may be called from any thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._errors: dict[str, str] = {}
        self._logged: set[str] = set()

    def problem(self) -> str | None:
        """Name a kind that cannot be listed, and why; None if there is none."""
        for kind, error in list(self._errors.items()):
            return f"{kind} cannot be listed: {error}"
        return None

    def listed(self, kind: Kind, error: str | None) -> None:
        """Take in how the list of a kind ended."""
        self._metrics.kind_listed.labels(str(kind)).set(0 if error else 1)
        if error is None:
            self._errors.pop(str(kind), None)
        else:
            self._errors[str(kind)] = error

    def skipped(self, kind: Kind, metadata: Mapping[str, Any], reason: str) -> None:
        """Take in that an object cannot be read."""
        self._metrics.skipped_objects.labels(str(kind)).inc()
        uid = str(metadata.get("uid"))
        if uid in self._logged:
            return
        if len(self._logged) >= REMEMBERED:
            self._logged.clear()
        self._logged.add(uid)
        name = f"{metadata.get('namespace') or ''}/{metadata.get('name')}".lstrip("/")
        logger.warning(
            "an object is skipped", extra={"kind": str(kind), "object": name, "error": reason}
        )
