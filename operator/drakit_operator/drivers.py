"""
Reconciles DeviceDrivers: creates one for each driver in the cluster, and writes their status.

All drivers are reconciled together, because one pass over the cluster's facts produces all of their
rows. Passes are at least 5 s apart, and take only a limited part of the main loop's time.
Therefore, the API server gets at most one status update for each driver in 5 s, and none while
nothing changes.

A condition becomes ``False`` only if a problem lasts, because updates of drivers and terminating
pods cause short problems. If the condition is already ``False`` when a new leader starts, the
problem has lasted long enough, because the previous leader has already waited.

An object that the operator created, and whose spec nobody has set, is deleted if nothing else of
the driver is left in the cluster. The garbage collector also deletes its DeviceTaintRules. Does not
depend on Kopf or queues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from drakit.text import plural
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
    MAX_DRIVERS,
    NOT_FOUND,
    REGISTERED,
    DriverState,
    Problem,
    driver_rows,
)
from drakit_explain.maintenance import NO_RULES, NOT_LISTED, rule_of
from drakit_explain.model import DeviceID, DriverFacts, TaintRuleFacts
from drakit_explain.pools import newest
from drakit_explain.reports import MANAGED_BY, OPERATOR, project_driver
from drakit_explain.world import Name, World
from drakit_formats import crds
from drakit_operator.metrics import NODE_STATES, Metrics
from drakit_operator.statuses import Condition, Object, Status, changes, turned

logger = logging.getLogger(__name__)

PASS_SECONDS = 5.0
"""The minimum time between two passes, and therefore between two writes of a status."""

SHARE = 20
"""The interval between passes is at least this many times as long as a pass takes, so that passes
take at most a twentieth of the main loop's time."""

LASTING_SECONDS = 30.0
"""How long a problem must last before it is reported. The kubelet waits as long for a plugin that
restarts."""

UNSEEN_SECONDS = 600.0
"""If nothing else of a driver is left in the cluster for this long, its object is deleted."""

REFUSED_SECONDS = 30.0
"""How long to wait after a refused write. A webhook, quota or role may allow it later."""

ABSENT_SECONDS = 60.0
"""How long to wait before trying again while the cluster does not serve DeviceDrivers."""

MAX_TAINTED = 64
"""Maximum number of devices to taint per driver. Each needs a DeviceTaintRule."""

LISTED = 20
"""Maximum number of nodes with a problem to list in the status."""

_MESSAGE = 1024
_PATH = resource_path(crds.API_VERSION, crds.DRIVERS)

TAINTED = "Tainted"
"""The type of the condition of drivers whose devices may be tainted. The condition is True while
there are taints."""

_SETTLING = ("Settling", f"a problem is reported when it has lasted for {LASTING_SECONDS:g} s")
_NO_EVIDENCE = (
    "NoEvidence",
    "the nodes of the plugin are unknown, because the ResourceSlices of the driver are for several "
    "nodes, or the operator is not allowed to list its NodeDeviceReports",
)


@dataclass(kw_only=True, slots=True)
class _Memory:
    """The leader's state of a driver. Times are readings of the controller's clock."""

    since: dict[tuple[str, str], float] | None = None
    """The time at which each problem started, keyed by condition and subject. None before the first
    pass."""

    unavailable: dict[str, float] = field(default_factory=dict[str, float])
    """The time at which the plugin became unavailable, keyed by node. Recorded only if its devices
    may be tainted."""

    tainted: dict[DeviceID, float] = field(default_factory=dict[DeviceID, float])
    """The time at which the DeviceTaintRule of each device was created."""

    unseen: float | None = None
    """The time since which only the driver's DeviceDriver is left in the cluster."""

    refused_until: float = float("-inf")
    refusal: str = ""
    """The reason why the API server refused a write. `refused_until` is the end of the pause."""


class DriverController:
    """Reconciles all drivers with the facts of a world."""

    def __init__(
        self,
        session: Session,
        world: World,
        *,
        recorder: EventRecorder,
        metrics: Metrics,
        devices: Callable[[], Mapping[str, Counter[str]] | None],
        is_current: Callable[[], bool],
        rules_version: Callable[[], str] | None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        :param devices: returns the number of devices in each state, keyed by driver, or None before
            the first count.
        :param is_current: returns whether the world has all objects, including DeviceDrivers.
        :param rules_version: returns the ``apiVersion`` of DeviceTaintRules, or an empty string if
            the cluster does not serve them. None if the operator must not write them.
        """
        self._session = session
        self._world = world
        self._recorder = recorder
        self._metrics = metrics
        self._devices = devices
        self._is_current = is_current
        self._rules_version = rules_version
        self._now = now
        self._clock = clock
        self._next = float("-inf")
        self._memories: dict[str, _Memory] = {}

    def problem(self) -> str | None:
        """Return the reason why a DeviceDriver cannot be written."""
        return next((each.refusal for each in self._memories.values() if each.refusal), None)

    async def refresh(self, _: str) -> float | None:
        """
        Reconcile all drivers. Return the seconds until the next call.

        :raises ApiError: the API server does not respond.
        """
        if not self._is_current():
            return ABSENT_SECONDS
        if (rest := self._next - self._clock()) > 0:
            return rest
        rows, seconds = await self._find()
        try:
            return await self._reconcile_all(rows)
        finally:  # set at the end of the pass, because its writes take time
            self._next = self._clock() + max(PASS_SECONDS, SHARE * seconds)

    async def _find(self) -> tuple[dict[str, DriverState], float]:
        """Return all rows, and the seconds that they took."""
        rows, seconds = dict[str, DriverState](), 0.0
        parts = driver_rows(self._world, rows)
        while True:
            started = self._clock()
            is_done = next(parts, parts) is parts
            seconds += self._clock() - started
            if is_done:
                return rows, seconds
            await asyncio.sleep(0)

    async def _reconcile_all(self, rows: Mapping[str, DriverState]) -> float | None:
        now, due, failed = self._clock(), list[float](), list[ApiError]()
        self._memories = {name: self._memories.get(name) or _Memory() for name in rows}
        self._measure(rows.values())
        for row in rows.values():
            await asyncio.sleep(0)
            if not self._is_current():  # objects that exist may be missing from the world
                return PASS_SECONDS
            memory = self._memories[row.name]
            try:
                await self._reconcile(row, memory, due, now)
            except (AlreadyExistsError, ConflictError, NotFoundError):
                due.append(PASS_SECONDS)  # the store is outdated; the watch updates it
            except ApiError as error:
                if not error.is_refusal:
                    failed.append(error)
                    continue
                memory.refused_until, memory.refusal = now + REFUSED_SECONDS, str(error)
                due.append(REFUSED_SECONDS)
                extra = {"driver": row.name, "error": str(error)}
                logger.warning("a DeviceDriver cannot be written", extra=extra)
        if failed:
            raise failed[0]
        return max(min(due), PASS_SECONDS) if due else None

    async def _reconcile(
        self, row: DriverState, memory: _Memory, due: list[float], now: float
    ) -> None:
        """Reconcile one driver. Append the seconds until the next step to `due`."""
        facts = self._world.of(DriverFacts).get(Name("", row.name))
        lasting = _lasting(row, facts, memory, due, now)
        if (rest := memory.refused_until - now) > 0:
            due.append(rest)
            return
        memory.refusal = ""
        if facts is None:
            if row.is_seen:
                await self._create(row.name)
                due.append(PASS_SECONDS)
            return
        if row.is_seen or not facts.is_generated:
            memory.unseen = None
        else:
            memory.unseen = now if memory.unseen is None else memory.unseen
            if (rest := memory.unseen + UNSEEN_SECONDS - now) <= 0:
                await self._session.delete(f"{_PATH}/{row.name}", uid=facts.uid)
                return
            due.append(rest)
        taints = await self._taint(row, facts, memory, due, now)
        counted = self._devices()
        devices = facts.status.get("devices") if counted is None else counted.get(row.name)
        wanted = status_of(row, facts, lasting, taints, devices=devices)
        if change := changes(wanted, facts.status, now=self._now()):
            await self._write(facts, wanted, change)

    async def _taint(
        self, row: DriverState, facts: DriverFacts, memory: _Memory, due: list[float], now: float
    ) -> list[Condition]:
        """Taint the driver's devices on nodes where its plugin is unavailable. Remove the taints
        where the plugin is available again. Return the condition, if the driver has one."""
        after = facts.taint_after_seconds
        nodes = row.unavailable if after is not None else ()
        memory.unavailable = {node: memory.unavailable.get(node, now) for node in nodes}
        if after is None and not row.rules:
            return []
        held = {DeviceID(each.driver, each.pool, each.device): each for each in row.rules}

        def condition(reason: str, message: str, tainted: int = len(held)) -> list[Condition]:
            return [Condition(TAINTED, "True" if tainted else "False", reason, message[:_MESSAGE])]

        if self._rules_version is None:
            remain = f"; to remove {plural(len(held), 'DeviceTaintRule')}, delete this object"
            return condition(
                "Disabled",
                "the operator is not allowed to taint devices: set operator.driverTaints.enabled "
                f"in the chart{remain if held else ''}",
            )
        if TaintRuleFacts in self._world.hidden:
            return condition("Refused", NOT_LISTED)
        if not (version := self._rules_version()):
            return condition("Unsupported", NO_RULES)
        wanted: list[DeviceID] = []
        for node, since in sorted(memory.unavailable.items()):
            devices = self._devices_on(node, row.name)
            rest = since + (after or 0) - now
            # A previous leader has already waited.
            if rest <= 0 or any(each in held for each in devices):
                wanted += devices
            else:
                due.append(rest)
        wanted.sort(key=lambda each: each not in held)
        omitted = len(wanted[MAX_TAINTED:])
        wanted = wanted[:MAX_TAINTED]
        memory.tainted = {each: memory.tainted[each] for each in wanted if each in memory.tainted}
        path = resource_path(version, "devicetaintrules")
        try:
            # Delete first, so that the taints of other nodes are removed even if a creation is
            # refused.
            for device in held.keys() - set(wanted):
                await self._session.delete(f"{path}/{held[device].name}", uid=held[device].uid)
            for device in (each for each in wanted if each not in held):
                # Wait before creating the rule again, because the client that deleted it may do so
                # again.
                if (rest := memory.tainted.get(device, float("-inf")) + REFUSED_SECONDS - now) > 0:
                    due.append(rest)
                    continue
                await self._session.create(path, rule_of(facts, device, api_version=version))
                memory.tainted[device] = now
        except (AlreadyExistsError, ConflictError, NotFoundError):
            due.append(PASS_SECONDS)
        except ApiError as error:
            if not error.is_refusal:
                raise
            due.append(REFUSED_SECONDS)
            return condition("Refused", f"a DeviceTaintRule cannot be written: {error.message}")
        if not wanted:
            return condition("NotTainted", "the operator taints no devices", 0)
        more = f"; {omitted} more are not tainted, because the limit is {MAX_TAINTED} per driver"
        return condition(
            "PluginUnavailable",
            f"taints on {plural(len(wanted), 'device')} keep new pods away until the plugin is "
            f"available again on their nodes{more if omitted else ''}",
            len(wanted),
        )

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
        self._world.confirm(None, project_driver(await self._session.create(_PATH, body)))

    async def _write(self, facts: DriverFacts, wanted: Status, change: Object) -> None:
        """Write a status, and an Event for each condition that becomes a problem, changes its
        reason while it is one, or is no longer one. The condition Ready does not get an Event."""
        body = {"metadata": {"uid": facts.uid}, "status": change}
        body = await self._session.patch(f"{_PATH}/{facts.name}/status", body)
        self._world.confirm(facts, project_driver(body))
        known = _statuses(facts)
        for each in turned(wanted, facts.status):
            bad = "True" if each.type == TAINTED else "False"
            is_problem = each.status == bad
            if each.type == "Ready" or not (is_problem or known.get(each.type) == bad):
                continue
            if each.reason == NOT_FOUND and facts.is_generated:
                continue  # the driver is being uninstalled, so nobody is affected
            await self._recorder.record(
                facts.reference.body(),
                reason=each.reason,
                action="Observing",
                note=each.message,
                type="Warning" if is_problem else "Normal",
            )

    def _measure(self, rows: Iterable[DriverState]) -> None:
        nodes, problems = self._metrics.driver_nodes, self._metrics.driver_problems
        for gauge in (nodes, problems):
            gauge.clear()
        for row in list(rows)[:MAX_DRIVERS]:
            for state, number in _nodes(row).items():
                nodes.labels(row.name, state).set(number)
            for condition in CONDITIONS:
                problems.labels(row.name, condition).set(row.numbers[condition])


def _nodes(row: DriverState) -> dict[str, int]:
    numbers = (row.desired, row.registered, row.publishing)
    return dict(zip(NODE_STATES, numbers, strict=True))


def _statuses(facts: DriverFacts | None) -> Mapping[str, str]:
    """Return the status of each condition that an object has."""
    conditions = facts.status.get("conditions") if facts is not None else None
    return {each["type"]: each["status"] for each in conditions or ()}


def _lasting(
    row: DriverState, facts: DriverFacts | None, memory: _Memory, due: list[float], now: float
) -> list[Problem]:
    """Return the problems of a driver that have lasted long enough. For each of the others, append
    the seconds until then to `due`."""
    before, known, lasting = memory.since, _statuses(facts), list[Problem]()
    memory.since = {}
    for each in row.problems:
        key = (each.condition, each.subject)
        waited = before is None and known.get(each.condition) == "False"
        since = memory.since[key] = (before or {}).get(key, now - LASTING_SECONDS * waited)
        if (rest := since + LASTING_SECONDS - now) > 0:
            due.append(rest)
        else:
            lasting.append(each)
    return lasting


def status_of(
    row: DriverState,
    facts: DriverFacts,
    problems: Iterable[Problem],
    taints: Iterable[Condition] = (),
    *,
    devices: Mapping[str, int] | None,
) -> Status:
    """
    Return the status of a driver.

    :param problems: the problems of the row that have lasted long enough.
    :param taints: the condition of its taints, if they are enabled.
    :param devices: the number of its devices in each state. None if it does not have devices, or if
        they have not been counted.
    """
    lasting, known = list(problems), _statuses(facts)
    conditions: list[Condition] = []
    for name in CONDITIONS:
        if found := [each for each in lasting if each.condition == name]:
            more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
            message = f"{found[0].message[: _MESSAGE - len(more)]}{more}"
            conditions.append(Condition(name, "False", found[0].reason, message))
        elif row.numbers[name] and known.get(name, "Unknown") == "Unknown":
            conditions.append(Condition(name, "Unknown", *_SETTLING))
        elif name == REGISTERED and row.unknown:
            conditions.append(Condition(name, "Unknown", *_NO_EVIDENCE))
        else:
            conditions.append(Condition(name, "True", *CONDITIONS[name]))
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
        "devices": devices and dict(devices),
        "claims": {"failing": row.stuck, "unreleased": row.unreleased},
        "problems": [
            {"node": node, "message": message} for node, message in sorted(nodes.items())[:LISTED]
        ],
    }
    return Status(conditions=(ready, *conditions, *taints), fields=fields)
