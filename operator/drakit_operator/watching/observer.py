"""
Records list failures and unreadable objects, for readiness, metrics and the log.

It must not know Kopf, sessions, or the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drakit.kube.listing import SkippedLog
from drakit_operator.kinds import Kind
from drakit_operator.metrics import Metrics

__all__ = ("Observer",)


class Observer:
    """Counts and logs; its methods may be called from any thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._errors: dict[str, str] = {}
        self._log = SkippedLog()

    def problem(self) -> str | None:
        """Return a kind that cannot be listed, with the reason; None if there is none."""
        for kind, error in list(self._errors.items()):
            return f"{kind} cannot be listed: {error}"
        return None

    def listed(self, kind: Kind, error: str | None) -> None:
        """Record the result of a kind's list."""
        self._metrics.kind_listed.labels(str(kind)).set(0 if error else 1)
        if error is None:
            self._errors.pop(str(kind), None)
        else:
            self._errors[str(kind)] = error

    def skipped(self, kind: Kind, metadata: Mapping[str, Any], reason: str) -> None:
        """Record an object that cannot be read."""
        self._metrics.skipped_objects.labels(str(kind)).inc()
        self._log.log(metadata, reason, kind=str(kind))
