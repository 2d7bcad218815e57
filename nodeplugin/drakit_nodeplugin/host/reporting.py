"""
Writes the NodeDeviceReports of this node: one for each driver, by the driver's active instance.

A report is written when its content changes, but not during the first seconds after a start: a
restart without a change writes the same content. Nothing waits for it, and without the resource
(404) or the permission (403) there are no reports. Reports of drivers that no plugin of this node
serves any more are removed.

:mod:`.report` decides what a report contains. This module must not know the rules for the states of
devices, claims and policies.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drakit.device import LeftOut
from drakit_daemon.backoff import Backoff
from drakit_daemon.kube import ApiError, NotFoundError, Session, resource_path
from drakit_daemon.logs import ProblemLog
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.host.node import PluginNode
from drakit_nodeplugin.host.policies import PolicyWatch
from drakit_nodeplugin.host.report import (
    API_VERSION,
    MAX_NAME,
    MAX_STUCK,
    PLURAL,
    DeviceCounts,
    ReportFacts,
    StuckClaim,
    body_of,
    report_name,
    status_of,
)
from drakit_nodeplugin.kubelet.server import Registration
from drakit_nodeplugin.revision import Revision
from drakit_nodeplugin.slices.publisher import SlicePublisher
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from drakit_nodeplugin.state.lock import is_locked

__all__ = ("DriverReport", "ReportSources", "remove_former_reports", "remove_report")

logger = logging.getLogger(__name__)

FIELD_MANAGER = "drakit-nodeplugin"

PACE_SECONDS = 10.0
"""Minimum time between two writes of a report, and between two reads of facts without
notifications."""

SETTLE_SECONDS = 1.0
"""Time from a change to the write: published slices follow a change of devices within a second."""

START_SECONDS = 30.0
"""The time after the start at which a report is written at the latest."""

REPEAT_SECONDS = 1800.0
"""The time after which an unchanged report is written again, because another client may have
deleted it."""

RETRY_SECONDS = (10.0, 300.0)
"""First and longest delay after a failed write."""

STUCK_SECONDS = 60.0
"""The time after which a claim that is preparing or unpreparing counts as stuck."""

FORMER_SECONDS = (60.0, 600.0)
"""Time from the start to the first search for reports of former drivers, and time between two
searches."""

_STATES = {"registered": "Registered", "rejected": "Rejected", "never asked": "Pending"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportSources:
    """The sources of the facts in one driver's report."""

    manager: DeviceManager
    publisher: SlicePublisher
    checkpoint: Checkpoint
    counts: Callable[[], Awaitable[DeviceCounts]]
    """Returns the numbers of devices. Raises CheckpointError."""
    registration: Registration
    policies: PolicyWatch | None


class DriverReport:
    """The report of one driver."""

    def __init__(
        self,
        driver: str,
        sources: ReportSources,
        *,
        node: PluginNode,
        session: asyncio.Future[Session],
    ) -> None:
        self._driver = driver
        self._sources = sources
        self._node = node
        self._session = session
        self._unfinished: dict[str, float] = {}
        """The times since which claims are preparing or unpreparing; loop time."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Write the report until canceled."""
        async with asyncio.TaskGroup() as group:
            sources = self._sources
            group.create_task(self._follow(sources.manager.revision))
            group.create_task(self._follow(sources.manager.endpoint_changes))
            if sources.policies is not None:
                group.create_task(self._follow(sources.policies.revision))
            group.create_task(self._write())

    async def _follow(self, revision: Revision) -> None:
        seen = revision.number
        while True:
            seen = await revision.after(seen)
            self._changed.set()

    async def _write(self) -> None:
        name = report_name(self._node.name, self._driver)
        if name is None:
            facts = {"driver": self._driver, "limit": MAX_NAME}
            logger.warning("no report: the names of node and driver are too long", extra=facts)
            await asyncio.Event().wait()
        path = resource_path(API_VERSION, PLURAL, name=name)
        session = await asyncio.shield(self._session)
        log = ProblemLog(
            logger,
            "report cannot be written",
            recovered="report can be written again",
            facts={"driver": self._driver},
        )
        first, limit = RETRY_SECONDS
        backoff = Backoff(first_seconds=first, limit_seconds=limit)
        loop = asyncio.get_running_loop()
        start_until = loop.time() + START_SECONDS
        written: dict[str, Any] | None = None
        repeat_at = 0.0
        while True:
            self._changed.clear()
            body = None
            try:
                if self._settled() or loop.time() >= start_until:
                    start_until = 0.0
                    body = await self._body()
                if body is None or (body == written and loop.time() < repeat_at):
                    await self._change()
                    continue
                await session.apply(path, body, field_manager=FIELD_MANAGER)
            except Exception as error:
                # Such as a driver's value that is not JSON: a report must not end the daemon.
                log.report(f"{type(error).__name__}: {error}")
                await asyncio.sleep(backoff.next_seconds())
                continue
            log.report(None)
            backoff.succeeded()
            written = body
            repeat_at = loop.time() + REPEAT_SECONDS * (0.5 + random.random())  # noqa: S311
            await asyncio.sleep(PACE_SECONDS)

    async def _change(self) -> None:
        try:
            async with asyncio.timeout(PACE_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return
        await asyncio.sleep(SETTLE_SECONDS)

    def _settled(self) -> bool:
        """Return whether the report of an earlier process may be replaced."""
        sources = self._sources
        return (
            sources.publisher.listed.is_set()
            and sources.registration.status.state != "never asked"
            and all(each.state != "Waiting" for each in sources.manager.endpoint_statuses())
        )

    async def _body(self) -> dict[str, Any] | None:
        """Return the object; None if too little is known yet."""
        uid = self._node.uid
        if uid is None:
            return None
        try:
            status = status_of(await self._facts())
        except CheckpointError:
            return None  # readiness reports it; numbers of zero would be wrong
        return body_of(node=self._node.name, node_uid=uid, driver=self._driver, status=status)

    async def _facts(self) -> ReportFacts:
        sources = self._sources
        registration = sources.registration.status
        states = await sources.checkpoint.states()
        by_drivers = sources.manager.left_out_by_drivers
        left_out = [
            *by_drivers,
            *_left_out(sources.manager.left_out, "Invalid"),
            *_left_out(sources.publisher.left_out, "Refused"),
        ]
        stuck = await self._stuck(states)
        counted = len(by_drivers) + len(sources.publisher.left_out)
        policies = sources.policies
        return ReportFacts(
            registration=_STATES[registration.state],
            registration_message=registration.reason or "",
            endpoints=sources.manager.endpoint_statuses(),
            devices=await sources.counts(),
            left_out=left_out,
            left_out_count=counted + sources.manager.left_out_count,
            claims=states,
            stuck=await self._named(stuck),
            stuck_count=len(stuck),
            policies=() if policies is None else policies.states(),
            outcomes=sources.manager.policy_outcomes,
            refusal=None if policies is None else policies.refusal,
        )

    async def _stuck(self, states: Mapping[str, int]) -> Sequence[str]:
        """Return the UIDs of stuck claims."""
        checkpoint = self._sources.checkpoint
        now = asyncio.get_running_loop().time()
        uids: set[str] = set()
        if states.get("preparing"):
            uids |= await checkpoint.uids(state="preparing")
        if states.get("unpreparing"):
            uids |= await checkpoint.uids(state="unpreparing")
        self._unfinished = {uid: self._unfinished.get(uid, now) for uid in uids}
        return sorted(u for u, since in self._unfinished.items() if now - since >= STUCK_SECONDS)

    async def _named(self, uids: Sequence[str]) -> Sequence[StuckClaim]:
        found = await self._sources.checkpoint.find(uids[:MAX_STUCK]) if uids else None
        return (
            []
            if found is None
            else [
                StuckClaim(namespace=claim.namespace, name=claim.name, uid=uid, state=claim.state)
                for uid, claim in found.items()
            ]
        )


def _left_out(left_out: Mapping[str, str], reason: Any) -> list[LeftOut]:
    return [
        LeftOut(device=name, reason=reason, message=message) for name, message in left_out.items()
    ]


async def remove_report(session: Session, *, node: str, driver: str) -> bool:
    """Delete a report; return whether it is gone for certain."""
    name = report_name(node, driver)
    if name is None:
        return True
    try:
        await session.delete(resource_path(API_VERSION, PLURAL, name=name))
    except NotFoundError:
        return True
    except ApiError as error:
        facts = {"driver": driver, "error": str(error)}
        logger.warning("report of a former driver cannot be removed", extra=facts)
        return False
    logger.info("report of a former driver removed", extra={"driver": driver})
    return True


async def remove_former_reports(
    drivers: Path,
    *,
    hosted: Callable[[], Collection[str]],
    node: str,
    session: asyncio.Future[Session],
) -> None:
    """
    Remove the reports of drivers that this node no longer serves, until canceled.

    `drivers` is the parent of the drivers' data directories, which remain. Another release of the
    chart may serve a driver. The driver then has an active instance.
    """
    api = await asyncio.shield(session)
    removed: set[str] = set()
    delay, period = FORMER_SECONDS
    while True:
        await asyncio.sleep(delay)
        delay = period
        former = await asyncio.to_thread(_unserved, drivers)
        removed &= former
        for driver in sorted(former - removed - set(hosted())):
            if await remove_report(api, node=node, driver=driver):
                removed.add(driver)


def _unserved(drivers: Path) -> set[str]:
    """Return the drivers without an active instance. Blocks."""
    found: set[str] = set()
    for path in drivers.glob("*/checkpoint.db"):
        with suppress(OSError):  # another process may remove it meanwhile
            if not is_locked(path.parent):
                found.add(path.parent.name)
    return found
