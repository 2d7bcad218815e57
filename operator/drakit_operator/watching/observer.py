"""
Records list failures, kinds that are left out and unreadable objects, for readiness, metrics and
the log.

It must not know Kopf, sessions, or the store.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from drakit.kube.listing import SkippedLog
from drakit_operator.kinds import Kind
from drakit_operator.metrics import Metrics
from drakit_operator.watching.discovery import Absence

__all__ = ("Observer",)

logger = logging.getLogger(__name__)


class Observer:
    """Counts and logs; its methods may be called from any thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._errors: dict[str, str] = {}
        self._left_out: dict[str, str] = {}
        self._log = SkippedLog()

    def problem(self) -> str | None:
        """Return a required kind that cannot be listed, with the reason; None if there is none."""
        for kind, error in list(self._errors.items()):
            return f"{kind} cannot be listed: {error}"
        return None

    def listed(self, kind: Kind, error: str | None) -> None:
        """Record the result of a kind's list."""
        self._metrics.kind_listed.labels(str(kind)).set(0 if error else 1)
        if error is not None:
            self._errors[str(kind)] = error
            return
        self._errors.pop(str(kind), None)
        if self._left_out.pop(str(kind), None) is not None:
            logger.info("kind is watched again", extra={"kind": str(kind)})

    def left_out(self, kind: Kind, absence: Absence) -> None:
        """Record that a kind is not watched, because of permissions or the cluster's version."""
        if absence.forbidden or kind.required:
            self._metrics.kind_listed.labels(str(kind)).set(0)
        else:  # nothing is wrong with a cluster that does not have the kind
            with contextlib.suppress(KeyError):
                self._metrics.kind_listed.remove(str(kind))
        if kind.required:
            self._errors[str(kind)] = absence.reason
        if self._left_out.get(str(kind)) != absence.reason:
            self._left_out[str(kind)] = absence.reason
            level = logging.WARNING if absence.forbidden else logging.INFO
            extra = {"kind": str(kind), "reason": absence.reason}
            logger.log(level, "kind is not watched", extra=extra)

    def skipped(self, kind: Kind, metadata: Mapping[str, Any], reason: str) -> None:
        """Record an object that cannot be read."""
        self._metrics.skipped_objects.labels(str(kind)).inc()
        self._log.log(metadata, reason, kind=str(kind))
