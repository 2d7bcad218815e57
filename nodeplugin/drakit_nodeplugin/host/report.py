"""
The NodeDeviceReports of this node: one for each driver, written by the driver's active instance.

Users, the operator and ``kubectl drakit`` read these reports. The content of a report is bounded
and stable: lists are sorted, and only ``lastUpdateTime`` changes without an event.
``charts/drakit/crds/nodedevicereports.yaml`` describes the fields.

A report is written when its content changes, but not during the first seconds after a start, so
that a restart without changes writes the same content. The object and its status are written
separately. After a crash between them, the object has no status until the next process writes it.
Nothing waits for a report. Without the resource (404) or the permission (403), no reports are
written. Reports of drivers that no plugin on this node serves any longer are removed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from drakit.device import PolicyOutcome, RejectedDevice
from drakit.text import escaped
from drakit_daemon.backoff import Backoff
from drakit_daemon.kube import ApiError, NotFoundError, Session, resource_path
from drakit_daemon.logs import ProblemLog
from drakit_formats import crds
from drakit_formats.crds import API_VERSION
from drakit_formats.resource.nodes import pool_name
from drakit_nodeplugin.changes import Revision
from drakit_nodeplugin.devices.counts import DEVICE_STATES, DeviceCounts, total
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.devices.model import DeviceHealth, EndpointStatus
from drakit_nodeplugin.host.node import PluginNode
from drakit_nodeplugin.host.policies import PolicyState, PolicyWatch
from drakit_nodeplugin.kubelet.server import Registration
from drakit_nodeplugin.slices.publisher import SlicePublisher
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from drakit_nodeplugin.state.lock import is_locked

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- content

KIND = "NodeDeviceReport"

MAX_NAME = 253
"""Maximum length of an object name."""

MAX_LISTED = 100
"""Maximum number of entries in a list. Further entries are only counted."""

MAX_STUCK = 20
"""Maximum number of stuck claims to list."""

MAX_UNHEALTHY = 20
"""Maximum number of unhealthy devices to list."""

MAX_NAMED = 3
"""Maximum number of names in a condition message."""

MAX_POLICIES = 20
"""Maximum number of policies to list. The operator keeps the lists of all nodes in memory."""

MAX_CONFLICTS = 3
"""Maximum number of conflicts to list per policy: enough to find the cause."""

MAX_LABEL = 256
"""Maximum length of a device name in a report."""

MAX_MESSAGE = 512
MAX_HEALTH = 256
"""Maximum length of an unhealthy device's message, which becomes part of an Event note."""

MAX_PROBLEM = 1024

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, kw_only=True, slots=True)
class StuckClaim:
    """A claim whose prepare or unprepare does not end."""

    namespace: str
    name: str
    uid: str
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFacts:
    """The content of a report, without limits."""

    registration: str
    """The registration state: ``Registered``, ``Pending`` or ``Rejected``."""

    registration_message: str
    endpoints: Sequence[EndpointStatus]
    devices: DeviceCounts
    published: int
    """Number of devices in the slices."""
    unhealthy: Collection[DeviceHealth]
    dropped: Mapping[str, str]
    """A description of each device feature that the API server does not support."""

    rejected: Collection[RejectedDevice]
    rejected_count: int
    """Total number of rejected devices, including devices that are not listed."""

    claims: Mapping[str, int]
    """Number of claims in each state."""

    stuck: Sequence[StuckClaim]
    stuck_count: int
    """Total number of stuck claims, including claims that are not listed."""

    slow_calls: Sequence[str] = ()
    """A description of each driver call that has been in flight for a long time."""

    policies: Sequence[PolicyState] = ()
    outcomes: Collection[PolicyOutcome] = ()
    refusal: str | None = None
    """The reason why the driver refused its latest policies, or None."""


def report_name(node: str, driver: str) -> str | None:
    """Return the name of a report, or None if it would be too long."""
    name = f"{node}.{driver}"
    return name if len(name) <= MAX_NAME else None


def object_of(*, node: str, node_uid: str, driver: str) -> dict[str, Any]:
    """Return the report object, without its status, for a server-side apply."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": report_name(node, driver), "ownerReferences": [owner]},
        "spec": {"nodeName": node, "driver": driver},
    }


def status_of(facts: ReportFacts) -> dict[str, Any]:
    """Return the status of a report, without times."""
    rejected, _ = _first(
        facts.rejected, MAX_LISTED, key=lambda each: (each.device, each.policy, each.reason)
    )
    unhealthy, _ = _first(facts.unhealthy, MAX_UNHEALTHY, key=lambda each: (each.pool, each.device))
    endpoints, _ = _first(facts.endpoints, MAX_LISTED, key=lambda each: each.name)
    listed = _by_key([_endpoint(each) for each in endpoints], "name")
    stuck, _ = _first(facts.stuck, MAX_STUCK, key=lambda each: each.uid)
    status: dict[str, Any] = {
        "conditions": _conditions(facts),
        "endpoints": listed,
        "devices": {
            "published": facts.published,
            **{state: getattr(facts.devices, state) for state in DEVICE_STATES},
            "rejected": facts.rejected_count,
        },
        "unhealthyDevices": _by_key([_unhealthy(each) for each in unhealthy], "pool", "device"),
        "droppedFields": [
            {"feature": feature, "message": _cut(facts.dropped[feature], MAX_MESSAGE)}
            for feature in sorted(facts.dropped)
        ],
        "rejectedDevices": [_rejected(each) for each in rejected],
        "claims": {
            "prepared": facts.claims.get("prepared", 0),
            "preparing": facts.claims.get("preparing", 0),
            "unpreparing": facts.claims.get("unpreparing", 0),
            "stuck": facts.stuck_count,
        },
        "stuckClaims": [
            {"namespace": each.namespace, "name": each.name, "uid": each.uid, "state": each.state}
            for each in stuck
        ],
    }
    policies, more_policies = _policies(facts)
    status["policies"] = policies
    omitted = {
        "rejectedDevicesOmitted": facts.rejected_count - len(rejected),
        "endpointsOmitted": len(facts.endpoints) - len(listed),
        "stuckClaimsOmitted": facts.stuck_count - len(stuck),
        "policiesOmitted": more_policies,
    }
    status |= {key: count for key, count in omitted.items() if count > 0}
    if facts.refusal:
        status["policiesRefused"] = _cut(facts.refusal, MAX_PROBLEM)
    return status


def dated(
    status: Mapping[str, Any], before: Sequence[Mapping[str, Any]], *, time: str
) -> dict[str, Any]:
    """Return the status with times. `before` are the previous conditions of the report."""
    known = {each.get("type"): each for each in before}

    def since(condition: Mapping[str, Any]) -> str:
        old = known.get(condition["type"], {})
        return old["lastTransitionTime"] if old.get("status") == condition["status"] else time

    conditions = [each | {"lastTransitionTime": since(each)} for each in status["conditions"]]
    return {**status, "conditions": conditions, "lastUpdateTime": time}


def _conditions(facts: ReportFacts) -> list[dict[str, Any]]:
    """Return the conditions of a report. A condition is True if there is no problem."""
    registered = {"Registered": "True", "Pending": "Unknown"}.get(facts.registration, "False")
    stopped = sorted(each.name for each in facts.endpoints if each.state in ("Stopped", "Removing"))
    waiting = sorted(each.name for each in facts.endpoints if each.state == "Waiting")
    running = ("True", "Running", "")
    if stopped:
        running = ("False", "Stopped", f"stopped: {_some(stopped)}")
    elif waiting:
        running = ("False", "Waiting", f"no devices were listed since the start: {_some(waiting)}")
    progressing = ("True", "Progressing", "")
    if facts.stuck_count:
        names = sorted(f"{each.namespace}/{each.name}" for each in facts.stuck)[:MAX_NAMED]
        message = f"{facts.stuck_count} claims have been preparing or unpreparing for a minute"
        if names:
            message += f", such as {', '.join(names)}"
        progressing = ("False", "Stuck", message)
    elif facts.slow_calls:
        message = (
            f"{facts.slow_calls[0]}; if this persists, restart the pod in which the driver runs"
        )
        progressing = ("False", "Slow", f"{len(facts.slow_calls)} slow calls: {message}")
    found = {
        "Registered": (registered, facts.registration, facts.registration_message),
        "EndpointsRunning": running,
        "ClaimsProgressing": progressing,
    }
    return [
        {"type": kind, "status": status, "reason": reason, "message": _cut(message, MAX_MESSAGE)}
        for kind, (status, reason, message) in found.items()
    ]


def _some(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _by_key(bodies: Iterable[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Return the first body for each key, because the API server rejects duplicates, and truncated
    names can collide."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for body in bodies:
        found.setdefault(tuple(body[key] for key in keys), body)
    return list(found.values())


def _endpoint(endpoint: EndpointStatus) -> dict[str, Any]:
    body = {"name": _cut(endpoint.name, MAX_LABEL), "state": endpoint.state}
    if endpoint.reason:
        body["message"] = _cut(endpoint.reason, MAX_MESSAGE)
    return body


def _unhealthy(health: DeviceHealth) -> dict[str, Any]:
    # Truncate the names: in pools that no node owns, the driver's names are not validated.
    body = {"pool": _cut(health.pool, MAX_NAME), "device": _cut(health.device, MAX_LABEL)}
    if message := _cut(health.message, MAX_HEALTH):
        body["message"] = message
    return body


def _rejected(rejected: RejectedDevice) -> dict[str, Any]:
    body = {"device": _cut(rejected.device, MAX_LABEL), "reason": rejected.reason}
    if rejected.policy:
        body["policy"] = _cut(rejected.policy, MAX_NAME)
    if rejected.message:
        body["message"] = _cut(rejected.message, MAX_MESSAGE)
    return body


def _policies(facts: ReportFacts) -> tuple[list[dict[str, Any]], int]:
    """Return the most important policies, and the number of others. Policies with a problem come
    first, then policies that are not in effect, and then policies that match a device."""
    outcomes = {each.policy: each for each in facts.outcomes}
    shown = [_policy(each, outcomes.get(each.name)) for each in facts.policies]
    shown.sort(
        key=lambda each: (
            "problem" not in each,
            "generation" in each,
            not each["matched"],
            each["name"],
        )
    )
    first = sorted(shown[:MAX_POLICIES], key=lambda each: each["name"])
    return first, len(shown) - len(first)


def _policy(state: PolicyState, outcome: PolicyOutcome | None) -> dict[str, Any]:
    # Until the driver has applied the policy, an outcome belongs to an earlier policy with this
    # name.
    if outcome is None or state.generation is None:
        outcome = PolicyOutcome(policy=state.name)
    body: dict[str, Any] = {
        "name": state.name,
        "uid": state.uid,
        "observedGeneration": state.observed_generation,
        "matched": outcome.matched,
        "published": outcome.published,
    }
    if state.generation is not None:
        body["generation"] = state.generation
    if outcome.in_use:
        body["inUse"] = outcome.in_use
        if outcome.in_use_by:
            body["inUseBy"] = _cut(outcome.in_use_by, MAX_MESSAGE)
    if problem := state.problem or outcome.problem:
        body["problem"] = _cut(problem, MAX_PROBLEM)
    if outcome.conflicts:
        conflicts, more = _first(
            outcome.conflicts, MAX_CONFLICTS, key=lambda each: (each.device, each.policy)
        )
        body["conflicts"] = [
            {"device": _cut(each.device, MAX_LABEL), "policy": _cut(each.policy, MAX_NAME)}
            for each in conflicts
        ]
        if more:
            body["conflictsOmitted"] = more
    return body


def _first(
    items: Collection[ItemT], limit: int, *, key: Callable[[ItemT], Any]
) -> tuple[list[ItemT], int]:
    """Return the first items, sorted by a key, and the number of others."""
    ordered = sorted(items, key=key)
    return ordered[:limit], max(0, len(ordered) - limit)


def _cut(text: str, limit: int) -> str:
    """Return a driver's string as one line of limited length. Surrogates, which occur in file names
    that are not valid UTF-8, are replaced, because JSON cannot encode them."""
    line = escaped(" ".join(text[:limit].split()))
    return line if max(len(line), len(text)) <= limit else f"{line[: limit - 3]}..."


# ---------------------------------------------------------------- writes

FIELD_MANAGER = "drakit-nodeplugin"

PACE_SECONDS = 10.0
"""Minimum time between two writes of a report, and between two reads of facts for which there are
no change notifications."""

SETTLE_SECONDS = 1.0
"""Time from a change to the write. Published slices follow a change to devices within a second."""

START_SECONDS = 30.0
"""Maximum time from the start to the first report."""

REPEAT_SECONDS = 1800.0
"""Average time after which an unchanged report is written again with a new time. This lets readers
detect outdated reports, and restores reports that another client has deleted. 5,000 reports result
in three writes per second."""

RETRY_SECONDS = (10.0, 300.0)
"""Initial and maximum delay after a failed write."""

STUCK_SECONDS = 60.0
"""How long a claim must be preparing or unpreparing to be considered stuck."""

FORMER_SECONDS = (60.0, 600.0)
"""Time from the start to the first search for reports of former drivers, and between two
searches."""

_STATES = {"registered": "Registered", "rejected": "Rejected", "never asked": "Pending"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportSources:
    """The sources of the facts in one driver's report."""

    manager: DeviceManager
    publisher: SlicePublisher
    checkpoint: Checkpoint
    counts: Callable[[], Awaitable[Mapping[str, DeviceCounts]]]
    """Returns the device counts of each pool. Raises CheckpointError."""
    registration: Registration
    policies: PolicyWatch | None
    slow_calls: Callable[[], Sequence[str]] = tuple
    """Returns a description of each driver call that has been in flight for a long time."""


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
        self._conditions: Sequence[Mapping[str, Any]] = ()
        """The conditions of the report in the API server."""
        self._unfinished: dict[str, float] = {}
        """The time at which each unfinished claim was first found to be preparing or unpreparing
        (loop clock)."""
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
            while True:
                await asyncio.Event().wait()
        session = await asyncio.shield(self._session)
        log = ProblemLog(
            logger,
            "report cannot be written",
            recovered="report can be written again",
            facts={"driver": self._driver},
        )
        backoff = Backoff(*RETRY_SECONDS)
        loop = asyncio.get_running_loop()
        start_until = loop.time() + START_SECONDS
        written: dict[str, Any] | None = None
        repeat_at = 0.0
        while True:
            self._changed.clear()
            status = None
            try:
                if self._settled() or loop.time() >= start_until:
                    start_until = 0.0
                    status = await self._status()
                if status is None or (status == written and loop.time() < repeat_at):
                    await self._change()
                    continue
                await self._apply(session, name, status, create=loop.time() >= repeat_at)
            except Exception as error:
                # An error must not stop the daemon. For example, a driver's value may not be
                # encodable as JSON.
                log.report(str(error) if isinstance(error, ApiError) else repr(error))
                await asyncio.sleep(backoff.next_seconds())
                continue
            log.report(None)
            backoff.succeeded()
            written = status
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
        """Return whether the report of an earlier process can be replaced now."""
        sources = self._sources
        return (
            sources.publisher.listed.is_set()
            and sources.registration.status.state != "never asked"
            and all(each.state != "Waiting" for each in sources.manager.endpoint_statuses())
        )

    async def _status(self) -> dict[str, Any] | None:
        """Return the status, or None if too little is known yet."""
        if self._node.uid is None:
            return None
        try:
            return status_of(await self._facts())
        except CheckpointError:
            return None  # the readiness probe reports the problem; counts of zero would be wrong

    async def _apply(
        self, session: Session, name: str, status: Mapping[str, Any], *, create: bool
    ) -> None:
        if create:
            assert self._node.uid is not None
            body = object_of(node=self._node.name, node_uid=self._node.uid, driver=self._driver)
            path = resource_path(API_VERSION, crds.REPORTS, name=name)
            found = await session.apply(path, body, field_manager=FIELD_MANAGER)
            self._conditions = found.get("status", {}).get("conditions", [])
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        new = dated(status, self._conditions, time=now)
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name},
            "status": new,
        }
        path = resource_path(API_VERSION, crds.REPORTS, name=name, subresource="status")
        try:
            await session.apply(path, body, field_manager=FIELD_MANAGER)
        except NotFoundError:
            if create:
                raise
            # Another client has deleted the object.
            await self._apply(session, name, status, create=True)
        else:
            self._conditions = new["conditions"]

    async def _facts(self) -> ReportFacts:
        sources = self._sources
        registration = sources.registration.status
        states = await sources.checkpoint.states()
        by_drivers = sources.manager.rejected_by_drivers
        refused = [
            replace(each, policy=self._policy_of(each.device))
            for each in _as_rejected(sources.publisher.rejected, "Refused")
        ]
        of_policies: Mapping[str, str] = {}
        if sources.policies is not None:
            of_policies = sources.manager.rejected_policies
        invalid = [
            replace(each, policy=of_policies.get(each.device, ""))
            for each in _as_rejected(sources.manager.rejected, "Invalid")
        ]
        rejected = [*by_drivers, *invalid, *refused]
        stuck = await self.stuck(states)
        counted = len(by_drivers) + len(refused)
        policies = sources.policies
        return ReportFacts(
            registration=_STATES[registration.state],
            registration_message=registration.reason or "",
            endpoints=sources.manager.endpoint_statuses(),
            devices=total((await sources.counts()).values()),
            published=sources.publisher.published_count,
            unhealthy=[
                each
                for each in sources.manager.health_states()
                if each.status == "unhealthy"
                and not sources.manager.is_gone(each.pool, each.device)
            ],
            dropped=sources.publisher.explain_dropped(),
            rejected=rejected,
            rejected_count=counted + sources.manager.rejected_count,
            claims=states,
            stuck=await self._named(stuck),
            stuck_count=len(stuck),
            slow_calls=sources.slow_calls(),
            policies=() if policies is None else policies.states(),
            outcomes=_without_rejected(sources.manager.policy_outcomes, [*invalid, *refused]),
            refusal=None if policies is None else policies.refusal,
        )

    def _policy_of(self, name: str) -> str:
        """Return the name of a device's policy, as published, or an empty string."""
        if self._sources.policies is None:
            return ""
        pool, _, device = name.rpartition("/")
        found = self._sources.manager.device(pool_name(self._node.name, pool), device)
        policy = None if found is None else found.attributes.get("policy")
        return policy if isinstance(policy, str) else ""

    async def stuck(self, states: Mapping[str, int]) -> Sequence[str]:
        """Return the UIDs of claims that have been preparing or unpreparing for at least
        :data:`STUCK_SECONDS` since this method first found them. Raises CheckpointError."""
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


def _as_rejected(rejected: Mapping[str, str], reason: Any) -> list[RejectedDevice]:
    return [
        RejectedDevice(device=name, reason=reason, message=message)
        for name, message in rejected.items()
    ]


def _without_rejected(
    outcomes: Iterable[PolicyOutcome], rejected: Iterable[RejectedDevice]
) -> list[PolicyOutcome]:
    """Return the policy outcomes with corrected counts: the driver counts devices as published even
    if the node plugin finds them invalid or the API server rejects them."""
    of_policy: dict[str, list[RejectedDevice]] = {}
    for each in rejected:
        of_policy.setdefault(each.policy, []).append(each)
    found: list[PolicyOutcome] = []
    for outcome in outcomes:
        if lost := of_policy.get(outcome.policy):
            first = min(lost, key=lambda each: each.device)
            problem = (
                f"{len(lost)} of its devices cannot be published, such as {first.device}: "
                f"{first.message}"
            )
            outcome = replace(
                outcome,
                published=max(0, outcome.published - len(lost)),
                problem=outcome.problem or problem,
            )
        found.append(outcome)
    return found


async def remove_report(session: Session, *, node: str, driver: str) -> bool:
    """Delete a report. Return whether it definitely no longer exists."""
    name = report_name(node, driver)
    if name is None:
        return True
    try:
        await session.delete(resource_path(API_VERSION, crds.REPORTS, name=name))
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
    Until canceled, remove the reports of drivers that this node no longer serves.

    `drivers` is the parent of the driver data directories, which are not removed. A driver that
    another release of the chart serves is kept, because it has an active instance.
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
        with suppress(OSError):  # another process may remove the directory in the meantime
            if not is_locked(path.parent):
                found.add(path.parent.name)
    return found
