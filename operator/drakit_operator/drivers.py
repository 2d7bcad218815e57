"""
Reconciles DeviceDrivers: creates those of drivers that the cluster has, and writes their status.

All drivers are reconciled together, because their rows come from one pass over the facts of the
cluster. A pass begins at most every 5 s, and takes at most a part of the main loop's time. So the
API server gets at most one update of a status in 5 s, and none while nothing changes.

A condition gets the status ``False`` when a problem has lasted, because updates of drivers and the
end of pods have them for a moment. The status that the object has is not judged again, so a new
leader continues where the last one ended.

An object that the operator created, and that nobody has specified, is deleted when the cluster has
nothing else of the driver. The garbage collector deletes the DeviceTaintRules of an object with it.
Does not depend on Kopf or queues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal

from drakit_daemon.kube import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    NotFoundError,
    Session,
    resource_path,
)
from drakit_daemon.kube.events import EventRecorder
from drakit_explain.drivers import (
    CONDITIONS,
    INSTALLED,
    MAX_DRIVERS,
    PROGRESSING,
    PUBLISHING,
    REGISTERED,
    RELEASED,
    DriverRow,
    Problem,
    driver_rows,
)
from drakit_explain.maintenance import rule_name, rule_of
from drakit_explain.model import DeviceID, DriverFacts, TaintRuleFacts
from drakit_explain.pools import newest
from drakit_explain.reports import MANAGED_BY, OPERATOR, project_driver
from drakit_explain.world import Name, World
from drakit_formats import crds
from drakit_operator.metrics import NODE_STATES, Metrics
from drakit_operator.statuses import Condition, Object, Status, changes, turned

logger = logging.getLogger(__name__)

PASS_SECONDS = 5.0
"""Least time between two passes, and so between two writes of a status."""

SHARE = 20
"""Passes take at most a part of the main loop's time."""

LASTING_SECONDS = 30.0
"""The time that a problem must last: the kubelet waits as long for a plugin that restarts."""

UNSEEN_SECONDS = 600.0
"""The time after which the object of a driver is deleted of which the cluster has nothing."""

REFUSED_SECONDS = 30.0
"""Pause after a refusal: a webhook, quota or role may allow the write later."""

ABSENT_SECONDS = 60.0
"""Pause while the cluster does not serve DeviceDrivers."""

MAX_TAINTED = 64
"""Devices of a driver that are tainted at a time; each needs a DeviceTaintRule."""

LISTED = 20
"""Nodes with a problem that the status lists."""

_MESSAGE = 1024
_PATH = resource_path(crds.API_VERSION, crds.DRIVERS)

_GOOD = {
    INSTALLED: ("Installed", "the cluster has plugins or ResourceSlices of the driver"),
    REGISTERED: ("Registered", "the plugin is registered on each node on which it must run"),
    PUBLISHING: ("Published", "all pools are complete"),
    PROGRESSING: ("Progressing", "the driver prepares and unprepares claims"),
    RELEASED: ("Released", "pods use all claims that hold devices"),
}
"""The reason and the message of each condition without a problem."""

TAINTED = "Tainted"
"""The condition of drivers that ask for taints. It is True while there are any."""

_SETTLING = ("Settling", f"a problem is reported when it has lasted for {LASTING_SECONDS:g} s")
_NO_EVIDENCE = (
    "NoEvidence",
    "the ResourceSlices of the driver are for several nodes, so those of its plugin are unknown",
)


class DriverController:
    """Reconciles all drivers with the facts of a world."""

    def __init__(
        self,
        session: Session,
        world: World,
        *,
        recorder: EventRecorder,
        metrics: Metrics,
        devices: Callable[[], Mapping[str, Counter[str]]],
        is_served: Callable[[], bool],
        rules_version: Callable[[], str] | None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        :param devices: returns the numbers of devices by state, of the drivers that are counted.
        :param is_served: returns whether the cluster has DeviceDrivers.
        :param rules_version: returns the ``apiVersion`` of DeviceTaintRules, empty if the cluster
            has none; None if the operator must not write them.
        """
        self._session = session
        self._world = world
        self._recorder = recorder
        self._metrics = metrics
        self._devices = devices
        self._is_served = is_served
        self._rules_version = rules_version
        self._now = now
        self._clock = clock
        self._next = float("-inf")
        self._since: dict[tuple[str, ...], float] = {}
        """Since when each problem lasts."""

        self._away: dict[tuple[str, str], float] = {}
        """Since when the plugin of a driver is unavailable on a node."""

        self._unseen: dict[str, float] = {}
        """Since when the cluster has nothing of a driver."""

        self._refused: dict[str, tuple[float, str]] = {}
        """By driver, until when nothing is written, and what the API server refuses."""

    def problem(self) -> str | None:
        """Return why a DeviceDriver cannot be written."""
        return next((why for _, why in self._refused.values()), None)

    async def refresh(self, _: str) -> float | None:
        """
        Reconcile all drivers; return in how many seconds to do it again.

        :raises ApiError: the API server does not answer.
        """
        if not self._is_served():
            return ABSENT_SECONDS
        if (rest := self._next - self._clock()) > 0:
            return rest
        rows = await self._find()
        now, pauses, failed = self._clock(), list[float](), list[ApiError]()
        before, self._since = self._since, {}
        self._unseen = {name: at for name, at in self._unseen.items() if name in rows}
        away = ((row.name, node) for row in rows.values() for node in row.away)
        self._away = {each: self._away.get(each, now) for each in away}
        self._refused = {
            name: each for name, each in self._refused.items() if name in rows and each[0] > now
        }
        self._measure(rows.values())
        for row in rows.values():
            try:
                pauses += await self._reconcile(row, before, now)
            except (AlreadyExistsError, ConflictError, NotFoundError):
                pauses.append(PASS_SECONDS)  # the store is behind: the watch reports it
            except ApiError as error:
                if not error.is_refusal:
                    failed.append(error)
                    continue
                self._refused[row.name] = now + REFUSED_SECONDS, str(error)
                pauses.append(REFUSED_SECONDS)
                extra = {"driver": row.name, "error": str(error)}
                logger.warning("a DeviceDriver cannot be written", extra=extra)
        if failed:
            raise failed[0]
        return max(min(pauses), PASS_SECONDS) if pauses else None

    async def _find(self) -> dict[str, DriverRow]:
        rows, seconds = dict[str, DriverRow](), 0.0
        parts, began = driver_rows(self._world, rows), self._clock()
        while True:
            started = self._clock()
            is_done = next(parts, parts) is parts
            seconds += self._clock() - started
            if is_done:
                break
            await asyncio.sleep(0)
        self._next = began + max(PASS_SECONDS, SHARE * seconds)
        return rows

    async def _reconcile(
        self, row: DriverRow, before: Mapping[tuple[str, ...], float], now: float
    ) -> list[float]:
        """Reconcile one driver; return in how many seconds something of it is due."""
        facts = self._world.of(DriverFacts).get(Name("", row.name))
        lasting, pauses = self._lasting(row, facts, before, now)
        if row.name in self._refused:
            return [*pauses, self._refused[row.name][0] - now]
        if row.is_seen or facts is None or not facts.is_generated:
            self._unseen.pop(row.name, None)
        elif (rest := self._unseen.setdefault(row.name, now) + UNSEEN_SECONDS - now) > 0:
            pauses.append(rest)
        else:
            await self._session.delete(f"{_PATH}/{row.name}", uid=facts.uid)
            return pauses
        if facts is None:
            if row.is_seen:
                await self._create(row.name)
                pauses.append(PASS_SECONDS)
            return pauses
        taints = await self._taint(row, facts, pauses, now)
        wanted = status_of(row, facts, lasting, taints, devices=self._devices().get(row.name))
        if change := changes(wanted, facts.status, now=self._now()):
            await self._write(facts, wanted, change)
        return pauses

    def _lasting(
        self,
        row: DriverRow,
        facts: DriverFacts | None,
        before: Mapping[tuple[str, ...], float],
        now: float,
    ) -> tuple[list[Problem], list[float]]:
        """Return the problems of a driver that count, and in how many seconds others do."""
        known, lasting, pauses = _statuses(facts), list[Problem](), list[float]()
        for each in row.problems:
            key = (row.name, each.condition, each.reason, each.subject)
            since = self._since[key] = before.get(key, now)
            if known.get(each.condition) == "False" or since + LASTING_SECONDS <= now:
                lasting.append(each)
            else:
                pauses.append(since + LASTING_SECONDS - now)
        return lasting, pauses

    async def _taint(
        self, row: DriverRow, facts: DriverFacts, pauses: list[float], now: float
    ) -> list[Condition]:
        """Taint the devices of a driver on nodes where its plugin is unavailable, and remove the
        taints where it is available again. Return the condition, and add when more is due."""
        rules = self._world.of(TaintRuleFacts)
        mine = [each for each in rules.values() if each.owner == facts.uid]
        after = facts.taint_after_seconds
        if after is None and not mine:
            return []
        if self._rules_version is None:
            text = (
                "the operator may not taint devices: set operator.driverTaints.enabled in the chart"
            )
            return [Condition(TAINTED, "False", "Disabled", text)]
        if not (version := self._rules_version()):
            text = (
                "the cluster has no DeviceTaintRules: enable the feature gate DRADeviceTaintRules"
            )
            return [Condition(TAINTED, "False", "Unsupported", text)]
        tainted = {DeviceID(each.driver, each.pool, each.device): each for each in mine}
        wanted: list[DeviceID] = []
        for node in sorted(row.away):
            if after is None:
                break
            devices = self._devices_on(node, row.name)
            rest = self._away[row.name, node] + after - now
            if rest <= 0 or any(each in tainted for each in devices):  # or an earlier leader waited
                wanted += devices
            else:
                pauses.append(rest)
        omitted = len(wanted[MAX_TAINTED:])
        path = resource_path(version, "devicetaintrules")
        try:
            for device in wanted[:MAX_TAINTED]:
                if rule_name(facts, device) not in (rule.name for rule in mine):
                    await self._session.create(path, rule_of(facts, device, api_version=version))
            for device, rule in tainted.items():
                if device not in wanted[:MAX_TAINTED]:
                    await self._session.delete(f"{path}/{rule.name}", uid=rule.uid)
        except (AlreadyExistsError, ConflictError, NotFoundError):
            pauses.append(PASS_SECONDS)
        except ApiError as error:
            if not error.is_refusal:
                raise
            pauses.append(REFUSED_SECONDS)
            text = f"a DeviceTaintRule cannot be written: {error.message}"
            return [Condition(TAINTED, "False", "Refused", text[:_MESSAGE])]
        if not wanted:
            return [Condition(TAINTED, "False", "NotTainted", "the operator taints no devices")]
        more = (
            f"; {omitted} more are not tainted, because {MAX_TAINTED} are the most"
            if omitted
            else ""
        )
        text = (
            f"{len(wanted) - omitted} devices have a taint that keeps new pods away, until the "
            f"plugin is available again on their nodes{more}"
        )
        return [Condition(TAINTED, "True", "PluginUnavailable", text)]

    def _devices_on(self, node: str, driver: str) -> list[DeviceID]:
        """Return the published devices of a driver on a node."""
        slices = [each for each in self._world.slices_of_node(node) if each.driver == driver]
        pools = sorted({each.of_pool for each in slices})
        return [
            DeviceID(*pool, name)
            for pool in pools
            for each in newest([each for each in slices if each.of_pool == pool])
            for name in each.devices.names
        ]

    async def _create(self, name: str) -> None:
        metadata = {"name": name, "labels": {MANAGED_BY: OPERATOR}}
        body = {"apiVersion": crds.API_VERSION, "kind": DriverFacts.kind, "metadata": metadata}
        self._world.apply(project_driver(await self._session.create(_PATH, body)))

    async def _write(self, facts: DriverFacts, wanted: Status, change: Object) -> None:
        """Write a status, and an Event about each condition that turns."""
        body = {"metadata": {"uid": facts.uid}, "status": change}
        body = await self._session.patch(f"{_PATH}/{facts.name}/status", body)
        self._world.apply(project_driver(body))
        known = _statuses(facts)
        for each in turned(wanted, facts.status):
            bad = "True" if each.type == TAINTED else "False"
            is_problem = each.status == bad
            if each.type == "Ready" or not (is_problem or known.get(each.type) == bad):
                continue
            kind: Literal["Normal", "Warning"] = "Warning" if is_problem else "Normal"
            await self._recorder.record(
                facts.reference.body(),
                reason=each.reason,
                action="Observing",
                note=each.message,
                type=kind,
            )

    def _measure(self, rows: Iterable[DriverRow]) -> None:
        nodes, problems = self._metrics.driver_nodes, self._metrics.driver_problems
        for gauge in (nodes, problems):
            gauge.clear()
        for row in list(rows)[:MAX_DRIVERS]:
            for state, number in _nodes(row).items():
                nodes.labels(row.name, state).set(number)
            found = Counter(each.condition for each in row.problems)
            for condition in CONDITIONS:
                problems.labels(row.name, condition).set(found[condition])


def _nodes(row: DriverRow) -> dict[str, int]:
    sets = (row.desired, row.registered, row.publishing)
    return dict(zip(NODE_STATES, map(len, sets), strict=True))


def _statuses(facts: DriverFacts | None) -> Mapping[str, str]:
    """Return the status of each condition that an object has."""
    conditions = facts.status.get("conditions") if facts is not None else None
    return {each["type"]: each["status"] for each in conditions or ()}


def status_of(
    row: DriverRow,
    facts: DriverFacts,
    problems: Iterable[Problem],
    taints: Iterable[Condition] = (),
    *,
    devices: Mapping[str, int] | None,
) -> Status:
    """
    Return the status of a driver.

    :param problems: those of the row that have lasted.
    :param taints: the condition of its taints, if it asks for them.
    :param devices: its devices by state; None if they are not counted.
    """
    lasting, known = list(problems), _statuses(facts)
    unsettled = {each.condition for each in row.problems}
    conditions: list[Condition] = []
    for name in CONDITIONS:
        if found := [each for each in lasting if each.condition == name]:
            more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
            message = f"{found[0].message[: _MESSAGE - len(more)]}{more}"
            conditions.append(Condition(name, "False", found[0].reason, message))
        elif name in unsettled and known.get(name) != "True":
            conditions.append(Condition(name, "Unknown", *_SETTLING))
        elif name == REGISTERED and row.unknown:
            conditions.append(Condition(name, "Unknown", *_NO_EVIDENCE))
        else:
            conditions.append(Condition(name, "True", *_GOOD[name]))
    ready = Condition("Ready", "True", "Ready", "the driver has no known problem")
    for status in ("Unknown", "False"):
        bad = (one for one in conditions if one.status == status and one[2:] != _NO_EVIDENCE)
        ready = next((Condition("Ready", *one[1:]) for one in bad), ready)
    nodes: dict[str, str] = {}
    for each in lasting:
        if each.node:
            nodes.setdefault(each.node, each.message[:512])
    fields: Object = {
        "observedGeneration": facts.generation,
        "nodes": _nodes(row),
        "pools": {"total": row.pools, "incomplete": row.incomplete, "empty": row.empty},
        "claims": {"failing": row.stuck, "unreleased": row.unreleased},
        "problems": [
            {"node": node, "message": message} for node, message in sorted(nodes.items())[:LISTED]
        ],
    }
    if devices is not None:
        fields["devices"] = dict(devices)
    return Status(conditions=(ready, *conditions, *taints), fields=fields)
