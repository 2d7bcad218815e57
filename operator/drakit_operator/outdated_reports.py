"""
Marks the NodeDeviceReports of node plugins that are gone. Each plugin writes its own report, so
without this module, conditions such as Registered would stay True after the plugin is gone.

A plugin writes its report at least every 45 minutes. If a plugin is gone, the kubelet deletes the
slices of its driver much earlier, after 30 s. When the plugin is available again, it rewrites its
report.

Does not depend on Kopf or queues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from drakit_daemon.kube import ApiError, ConflictError, NotFoundError, Session, resource_path
from drakit_explain.broken import publishes
from drakit_explain.model import ReportFacts
from drakit_explain.reports import OUTDATED
from drakit_explain.world import Name, World
from drakit_formats import crds
from drakit_formats.resource.objects import children

logger = logging.getLogger(__name__)

SILENT_SECONDS = 3600.0
"""The age at which a report is outdated. It exceeds 45 minutes, because clocks can differ."""

WITHDRAWN_SECONDS = 60.0
"""How long a driver that published devices can be without slices before its plugin is considered
gone. The kubelet also deletes slices when it starts, but then a plugin publishes them again within
seconds."""

RETRY_SECONDS = 300.0
"""How long to wait after a refused write."""


class OutdatedReports:
    """Reconciles the reports of a world."""

    def __init__(
        self,
        session: Session,
        world: World,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._session = session
        self._world = world
        self._now = now
        self._withdrawn: dict[str, float] = {}
        """The time at which the last slice of the driver disappeared from the node, keyed by report
        name."""

    async def refresh(self, name: str) -> float | None:
        """
        Mark a report if its plugin is gone. Return the seconds until the next check.

        :raises ApiError: the API server does not respond.
        """
        report, now = self._world.of(ReportFacts).get(Name("", name)), self._now()
        if report is None or report.outdated:
            self._withdrawn.pop(name, None)
            return None
        due, why = float("inf"), ""
        if report.updated:
            due = report.updated + SILENT_SECONDS
            why = "the node plugin has not written this report for an hour"
        unread = self._world.unreadable()  # an unreadable slice may belong to the driver
        if report.published and not (unread or publishes(report.driver, report.node, self._world)):
            since = self._withdrawn.setdefault(name, now.timestamp())
            if since + WITHDRAWN_SECONDS < due:
                due = since + WITHDRAWN_SECONDS
                why = "the kubelet has deleted the ResourceSlices of the driver"
        else:
            self._withdrawn.pop(name, None)
        if due > now.timestamp():
            return due - now.timestamp() if why else None
        return await self._mark(name, f"{why}; check that the node plugin runs on the node", now)

    async def _mark(self, name: str, message: str, now: datetime) -> float | None:
        path = resource_path(crds.API_VERSION, crds.REPORTS, name=name)
        marked = {"status": "Unknown", "reason": OUTDATED, "message": message}
        marked["lastTransitionTime"] = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            body = await self._session.get(path)
            conditions = [{**each, **marked} for each in children(body, "status", "conditions")]
            seen = {"resourceVersion": body["metadata"]["resourceVersion"]}
            change: dict[str, Any] = {"metadata": seen, "status": {"conditions": conditions}}
            await self._session.patch(f"{path}/status", change)
        except (ConflictError, NotFoundError):
            return WITHDRAWN_SECONDS  # the report is not outdated, or is deleted
        except ApiError as error:
            if not error.is_refusal:
                raise
            facts = {"report": name, "error": str(error)}
            logger.warning("an outdated report cannot be marked", extra=facts)
            return RETRY_SECONDS
        logger.info("an outdated report is marked", extra={"report": name, "why": message})
        return None
