"""
Determines the state of each driver in the cluster, whether or not it is built with drakit: on which
nodes its plugin is registered and publishes devices, its pools and claims, and its problems.

The API does not list the plugins of a node. The kubelet deletes the ResourceSlices of a node 30 s
after their plugin is no longer registered. Therefore, if there is no NodeDeviceReport, the
ResourceSlices of a ready node are evidence of a registered plugin.

The operator writes the rows into the status of DeviceDrivers, and ``kubectl drakit drivers`` prints
them. The rows include problems that are normal for a short time, as during an update. The caller
decides how long a problem must last. Does not depend on clients or clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from drakit.text import plural
from drakit_explain.broken import claims_of_pod, drivers_of, is_placed, node_of_claim
from drakit_explain.model import (
    ClaimFacts,
    DriverFacts,
    NodeFacts,
    PodFacts,
    PoolID,
    ReportFacts,
    SliceFacts,
    TaintRuleFacts,
)
from drakit_explain.poolchecks import PoolCondition, conditions_of_pools, node_of_slice
from drakit_explain.world import Name, World
from drakit_formats.resource.nodes import selects_labels

INSTALLED, REGISTERED, PUBLISHING = "Installed", "Registered", "Publishing"
PROGRESSING, RELEASED = "ClaimsProgressing", "ClaimsReleased"

CONDITIONS: Mapping[str, tuple[str, str]] = {
    INSTALLED: ("Installed", "the cluster has plugins or ResourceSlices of the driver"),
    REGISTERED: ("Registered", "the plugin is registered on each node on which it must run"),
    PUBLISHING: ("Published", "all pools are complete"),
    PROGRESSING: ("Progressing", "the driver prepares and unprepares claims"),
    RELEASED: ("Released", "pods use all claims that hold devices"),
}
"""The conditions that a problem can affect, the most serious first, with the reason and message to
use without a problem."""

MAX_DRIVERS = 100
"""Maximum number of drivers to return a row for. Drivers without a DeviceDriver are limited,
because anyone who publishes a slice chooses the name of its driver. The first ones by name are
used."""

MAX_PROBLEMS = 1000
"""Maximum number of a driver's problems to keep for each condition. Further problems are only
counted. Tenants choose the numbers of pods and claims, and a cluster has thousands of nodes."""

AT_ONCE = 250
"""How many objects to process before other tasks can run. They take a few milliseconds, even if the
nodes' pools must be determined again after a change to slices."""

NOT_FOUND = "NotFound"
"""The condition reason if the cluster does not contain any objects of a driver."""

_PODS = "kubectl get pods -A -o wide --field-selector spec.nodeName={node}"
_REPORT = "kubectl describe nodedevicereport {node}.{driver}"
_DRAKIT = "kubectl drakit {command}"

_REASONS: Mapping[str, tuple[str, str, str]] = {
    "Leftovers": (INSTALLED, "the driver is unavailable, but its objects remain: {words}", ""),
    NOT_FOUND: (INSTALLED, "the driver is not installed", "kubectl delete devicedriver {driver}"),
    "NodeNotReady": (REGISTERED, "node {node} is not ready", "kubectl describe node {node}"),
    "PluginMissing": (
        REGISTERED,
        "node {node} has no ResourceSlice of the driver, so its plugin is not registered there, or "
        "has no devices",
        _PODS,
    ),
    "PluginGone": (REGISTERED, "the node plugin on node {node} is gone", _PODS),
    "NotRegistered": (REGISTERED, "node {node} has not registered the plugin ({words})", _REPORT),
    "DriverStopped": (PUBLISHING, "the driver does not run on node {node} ({words})", _REPORT),
    "NoResourceSlices": (PUBLISHING, "the plugin on {node} publishes no ResourceSlices", _REPORT),
    "PoolIncomplete": (PUBLISHING, "{subject} is incomplete", _DRAKIT),
    "PoolInvalid": (PUBLISHING, "{subject} is invalid", _DRAKIT),
    "PoolNameConflict": (PUBLISHING, "several nodes publish {subject}", _DRAKIT),
    "ResourceSlicesOutdated": (PUBLISHING, "{subject} has outdated ResourceSlices", _DRAKIT),
    "ClaimsStuck": (PROGRESSING, "node {node}: {words}", ""),
    "PodsNotStarted": (
        *(PROGRESSING, "{subject} waits on node {node} for the driver, volumes or the network"),
        _DRAKIT,
    ),
    "ClaimsNotReleased": (RELEASED, "{subject} holds devices, but {words}", _DRAKIT),
}
"""For each reason: its condition, a sentence, and the command to investigate, unless the sentence
contains it."""

_POOL_REASONS = {
    PoolCondition.INCOMPLETE: "PoolIncomplete",
    PoolCondition.INVALID: "PoolInvalid",
    PoolCondition.CONFLICTING: "PoolNameConflict",
    PoolCondition.OUTDATED: "ResourceSlicesOutdated",
}

_REMOVALS: Mapping[str, str] = {
    "devicetaintrule": "kubectl get devicetaintrules",
    "nodedevicereport": "kubectl delete nodedevicereports --field-selector spec.driver={}",
    "resourceclaim": "kubectl drakit claims -A",
    "resourceslice": "kubectl delete resourceslices --field-selector spec.driver={}",
}
"""For each kind of remaining object, the command that removes the objects, or the command that
finds them if the removal could affect other objects."""


class Problem(NamedTuple):
    """A problem with a driver."""

    reason: str
    driver: str
    subject: str
    """The node, pool or object, such as ``claim lab/mine``. Empty for the driver itself."""

    node: str = ""
    words: str = ""
    """The part of the message that is specific to this problem."""

    command: str = ""
    """The arguments of the ``kubectl drakit`` command in the message."""

    @property
    def condition(self) -> str:
        """The condition that the problem affects: one of `CONDITIONS`."""
        return _REASONS[self.reason][0]

    @property
    def message(self) -> str:
        """A sentence with the command to investigate. It does not change while the problem
        lasts."""
        _, sentence, command = _REASONS[self.reason]
        return (f"{sentence}; run '{command}'" if command else sentence).format(**self._asdict())


@dataclass(kw_only=True, slots=True)
class DriverState:
    """The state of a driver."""

    name: str
    desired: int = 0
    """The number of nodes on which the driver's plugin must run."""

    registered: int = 0
    """The number of desired nodes with evidence that the plugin is registered."""

    publishing: int = 0
    unavailable: set[str] = field(default_factory=set[str])
    """The desired nodes on which the plugin is known to be unavailable."""

    unknown: bool = False
    """Whether some registrations are unknown, because slices are for several nodes, or objects may
    not be listed."""

    pools: int = 0
    incomplete: int = 0
    empty: int = 0
    stuck: int = 0
    """The number of claims that the driver fails to prepare or unprepare."""

    unreleased: int = 0
    """The number of claims that hold the driver's devices, but that no pod uses."""

    remains: Counter[str] = field(default_factory=Counter[str])
    """The number of the driver's objects that can remain after the driver is uninstalled, keyed by
    kind."""

    rules: list[TaintRuleFacts] = field(default_factory=list[TaintRuleFacts])
    """The DeviceTaintRules that the driver's DeviceDriver owns."""

    problems: list[Problem] = field(default_factory=list[Problem])
    numbers: Counter[str] = field(default_factory=Counter[str])
    """The number of problems for each condition."""

    is_seen: bool = False
    """Whether the cluster has an object of the driver in addition to its DeviceDriver, or may have
    one that may not be listed."""

    def add(self, reason: str, subject: str = "", node: str = "", **words: str) -> None:
        problem = Problem(reason, self.name, subject, node, **words)
        self.numbers[problem.condition] += 1
        if self.numbers[problem.condition] <= MAX_PROBLEMS:
            self.problems.append(problem)


class _Rows(dict[str, DriverState]):
    def __missing__(self, name: str) -> DriverState:
        row = self[name] = DriverState(name=name)
        return row


def driver_rows(world: World, rows: dict[str, DriverState]) -> Iterator[None]:
    """Add the row of each driver, sorted by name. Other tasks can run after each part of the
    work."""
    yield from _Drivers(world).find(rows)


class _Drivers:
    def __init__(self, world: World) -> None:
        self._world = world
        self._specs = {name.name: each for name, each in world.of(DriverFacts).items()}
        self._nodes = {name.name: each for name, each in world.of(NodeFacts).items()}
        self._not_ready = {name for name, each in self._nodes.items() if not each.ready}
        self._reports: dict[str, dict[str, ReportFacts]] = {}
        self._publishing: dict[str, set[str]] = {}
        self._shared: set[str] = set()
        self._hidden = not world.hidden.isdisjoint({ReportFacts, SliceFacts})
        self._rows = _Rows()

    def find(self, rows: dict[str, DriverState]) -> Iterator[None]:
        for find in (self._claims, self._pools, self._pods):
            for done, _ in enumerate(find()):
                if done % AT_ONCE == AT_ONCE - 1:
                    yield
        for report in self._world.of(ReportFacts).values():
            if report.driver:
                self._reports.setdefault(report.driver, {})[report.node] = report
        names = (self._rows.keys() | self._reports.keys()) - self._specs.keys()
        others = sorted(names)[: max(0, MAX_DRIVERS - len(self._specs))]
        found = {name: self._rows[name] for name in sorted({*self._specs, *others})}
        self._rules(found)
        order = list(CONDITIONS)
        for row in found.values():
            yield
            self._registrations(row)
            self._leftovers(row)
            row.problems.sort(key=lambda each: (order.index(each.condition), each.subject))
        rows |= found

    def _exists(self, node: str) -> bool:
        return not self._nodes or node in self._nodes

    def _claims(self) -> Iterator[None]:
        for claim in list(self._world.of(ClaimFacts).values()):
            yield
            if not claim.allocated:
                continue
            why = self._not_released(claim)
            for row in map(self._rows.__getitem__, drivers_of([claim])):
                row.remains["resourceclaim"] += 1
                if why:
                    row.unreleased += 1
                    subject = f"claim {claim.namespace}/{claim.name}"
                    command = f"explain claim/{claim.name} -n {claim.namespace}"
                    row.add("ClaimsNotReleased", subject, words=why, command=command)

    def _not_released(self, claim: ClaimFacts) -> str:
        """Return the reason why nothing releases an allocated claim. Empty if pods use it."""
        if claim.held_by:
            return f"it is being deleted, and the finalizer {claim.held_by[0]} keeps it"
        if not claim.consumers:
            return "no pod uses it"
        node = node_of_claim(claim)
        return "" if node is None or self._exists(node) else f"its node {node} no longer exists"

    def _pools(self) -> Iterator[None]:
        pools: dict[PoolID, bool] = {}
        for each in list(self._world.slices()):
            yield
            if not each.driver:
                continue
            row, node = self._rows[each.driver], node_of_slice(each)
            if node and not self._exists(node):
                row.remains["resourceslice"] += 1
                continue
            has_devices = each.unread or bool(len(each.devices))
            pools[each.of_pool] = has_devices or pools.get(each.of_pool, False)
            if node:
                self._publishing.setdefault(each.driver, set()).add(node)
            else:
                self._shared.add(each.driver)
        for pool, has_devices in pools.items():
            self._rows[pool.driver].pools += 1
            self._rows[pool.driver].empty += not has_devices
        for pool, node, condition in conditions_of_pools(self._world):
            yield
            if (reason := _POOL_REASONS.get(condition)) is None or not pool.driver:
                continue
            row = self._rows[pool.driver]
            row.incomplete += condition in (PoolCondition.INCOMPLETE, PoolCondition.INVALID)
            command = f"explain node/{node}" if node else f"devices {pool.driver}/{pool.pool}"
            row.add(reason, f"pool {pool.pool}", node, command=command)

    def _pods(self) -> Iterator[None]:
        """Find the pods that are waiting for drivers without reports, because there is no other
        evidence about these drivers."""
        reports = self._world.of(ReportFacts)
        for pod in list(self._world.of(PodFacts).values()):
            yield
            if pod.node is None or not is_placed(pod) or not pod.is_starting:
                continue
            claims = [each for each in claims_of_pod(pod, self._world) if each.allocated]
            for name in drivers_of(claims):
                if Name("", f"{pod.node}.{name}") in reports:
                    continue
                row = self._rows[name]
                row.stuck += sum(name in drivers_of([each]) for each in claims)
                command = f"explain pod/{pod.name} -n {pod.namespace}"
                subject = f"pod {pod.namespace}/{pod.name}"
                row.add("PodsNotStarted", subject, pod.node, command=command)

    def _rules(self, rows: Mapping[str, DriverState]) -> None:
        owners = {each.uid: name for name, each in self._specs.items()}
        for rule in self._world.of(TaintRuleFacts).values():
            if (owner := owners.get(rule.owner)) is not None:
                rows[owner].rules.append(rule)
            elif not rule.owner and rule.driver in rows:
                rows[rule.driver].remains["devicetaintrule"] += 1

    def _registrations(self, row: DriverState) -> None:
        spec, reports = self._specs.get(row.name), self._reports.get(row.name, {})
        publishing = self._publishing.pop(row.name, set())
        if spec is not None and spec.node_selector is not None:
            desired = {
                name
                for name, each in self._nodes.items()
                if selects_labels(spec.node_selector, each.labels)
            }
        else:
            desired = publishing | {node for node in reports if self._exists(node)}
        publishing &= desired
        registered = publishing - self._not_ready - reports.keys()
        row.desired, row.publishing, row.registered = map(len, (desired, publishing, registered))
        for node in sorted(desired - registered):
            self._node(row, node, reports.get(node), publishes=node in publishing)
        row.remains["nodedevicereport"] = sum(each.outdated for each in reports.values())

    def _node(
        self, row: DriverState, node: str, report: ReportFacts | None, *, publishes: bool
    ) -> None:
        """Compare the facts about a driver on a node with its report. If there is no report, use
        the slices."""
        if report is not None and report.progress:
            row.stuck += report.stuck or 1
            row.add("ClaimsStuck", node, node, words=report.progress)
        if reason := self._unavailable(row, node, report):
            row.unavailable.add(node)
            row.add(reason, node, node, words=report.registration if report else "")
        elif report is None:
            row.unknown = True
        else:
            row.registered += 1
            if report.stopped:
                row.add("DriverStopped", node, node, words=report.stopped)
            elif report.published and not publishes and not self._hidden:
                row.add("NoResourceSlices", node, node)

    def _unavailable(self, row: DriverState, node: str, report: ReportFacts | None) -> str:
        """Return the reason why the plugin is unavailable on a node. Empty if it is available, or
        if that is unknown."""
        if node in self._not_ready:
            return "NodeNotReady"
        if report is None:
            return "" if row.name in self._shared or self._hidden else "PluginMissing"
        if report.outdated:
            return "PluginGone"
        return "NotRegistered" if report.registration else ""

    def _leftovers(self, row: DriverState) -> None:
        """Add the objects that remain of a driver that is no longer running."""
        reports = self._reports.get(row.name, {}).values()
        is_partial = self._hidden or bool(self._world.unreadable())
        row.is_seen = is_partial or bool(row.pools or row.desired or row.remains.total())
        if is_partial or row.pools or any(not each.outdated for each in reports):
            return
        spec = self._specs.get(row.name)
        if remains := [(kind, number) for kind, number in sorted(row.remains.items()) if number]:
            named = " and ".join(plural(number, kind) for kind, number in remains)
            commands = "; ".join(f"'{_REMOVALS[kind].format(row.name)}'" for kind, _ in remains)
            row.problems = [each for each in row.problems if each.condition == REGISTERED]
            row.numbers = Counter({REGISTERED: row.numbers[REGISTERED]})
            row.add("Leftovers", words=f"{named}; install the driver, or run {commands}")
        elif spec is not None and spec.node_selector is None:
            row.add(NOT_FOUND)
