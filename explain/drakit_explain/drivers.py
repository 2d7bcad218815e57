"""
The state of each driver in the cluster, whether it is made with drakit or not: the nodes on which
its plugin is registered and publishes, its pools and claims, and its problems.

No object of Kubernetes names the plugins of a node. The kubelet deletes the ResourceSlices of a
node 30 s after their plugin is no longer registered. Therefore, without a NodeDeviceReport, the
ResourceSlices of a ready node are the evidence of a registered plugin.

The operator writes the rows into the status of DeviceDrivers, and ``kubectl drakit drivers`` prints
them. A problem that is normal for a moment, as in an update, is included: the caller decides how
long it must last. Does not depend on clients or clocks.
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
from drakit_explain.pools import newest
from drakit_explain.world import Name, World
from drakit_formats.resource.nodes import selects_labels

INSTALLED, REGISTERED, PUBLISHING = "Installed", "Registered", "Publishing"
PROGRESSING, RELEASED = "ClaimsProgressing", "ClaimsReleased"

CONDITIONS = (INSTALLED, REGISTERED, PUBLISHING, PROGRESSING, RELEASED)
"""The conditions that a problem can be about, the most serious first."""

MAX_DRIVERS = 100
"""Drivers with a row, the first by name of those without a DeviceDriver: whoever publishes slices
chooses their names."""

AT_ONCE = 1000
"""Objects after which others can run: a few milliseconds."""

_POOL_REASONS = {
    PoolCondition.INCOMPLETE: "PoolIncomplete",
    PoolCondition.INVALID: "PoolInvalid",
    PoolCondition.CONFLICTING: "PoolNameConflict",
    PoolCondition.OUTDATED: "ResourceSlicesOutdated",
}


class Problem(NamedTuple):
    """One thing that is wrong with a driver."""

    condition: str
    """One of `CONDITIONS`."""

    reason: str
    subject: str
    """The node, pool or object, such as ``claim lab/mine``; empty if it is about the driver."""

    message: str
    """A sentence with the command that helps. Does not change while the problem lasts."""

    node: str = ""


@dataclass(kw_only=True, slots=True)
class DriverRow:
    """The state of a driver."""

    name: str
    desired: set[str] = field(default_factory=set[str])
    """The nodes on which its plugin must run."""

    registered: set[str] = field(default_factory=set[str])
    publishing: set[str] = field(default_factory=set[str])
    unknown: bool = False
    """There is no evidence of registrations: its slices are for several nodes."""

    pools: int = 0
    incomplete: int = 0
    empty: int = 0
    stuck: int = 0
    """Claims that it does not prepare or unprepare."""

    unreleased: int = 0
    """Claims that hold its devices, and that no pod uses."""

    remains: Counter[str] = field(default_factory=Counter[str])
    """The number of its objects, by their kinds, that do not prove that it is installed."""

    problems: list[Problem] = field(default_factory=list[Problem])

    @property
    def away(self) -> frozenset[str]:
        """The nodes on which its plugin must run, and is known to be unavailable."""
        return frozenset(
            each.node for each in self.problems if each.condition == REGISTERED and each.node
        )

    @property
    def is_seen(self) -> bool:
        """Whether the cluster has an object of it, apart from its DeviceDriver."""
        return bool(self.pools or self.desired or self.remains.total())

    def add(
        self, condition: str, reason: str, subject: str, message: str, *, node: str = ""
    ) -> None:
        self.problems.append(Problem(condition, reason, subject, message, node))


def driver_rows(world: World, rows: dict[str, DriverRow]) -> Iterator[None]:
    """Add the row of each driver, by name; others can run after each part of the work."""
    found = _Drivers(world)
    yield from found.find()
    rows |= found.rows


class _Drivers:
    def __init__(self, world: World) -> None:
        self._world = world
        self._specs = {name.name: each for name, each in world.of(DriverFacts).items()}
        self._nodes = world.of(NodeFacts)
        self._reports: dict[str, dict[str, ReportFacts]] = {}
        self._shared: set[str] = set()
        self.rows: dict[str, DriverRow] = {}

    def find(self) -> Iterator[None]:
        names = {each.driver for each in self._world.slices() if each.driver}
        names |= {each.driver for each in self._world.of(ReportFacts).values()}
        names.update(drivers_of(self._world.of(ClaimFacts).values()))
        others = sorted(names - self._specs.keys())[: max(0, MAX_DRIVERS - len(self._specs))]
        self.rows = {name: DriverRow(name=name) for name in sorted({*self._specs, *others})}
        for find in (self._pools, self._claims, self._pods):
            for done, _ in enumerate(find()):
                if done % AT_ONCE == AT_ONCE - 1:
                    yield
        for rule in self._world.of(TaintRuleFacts).values():
            if (row := self.rows.get(rule.driver)) is not None and not rule.owner:
                row.remains["devicetaintrule"] += 1
        for report in self._world.of(ReportFacts).values():
            self._reports.setdefault(report.driver, {})[report.node] = report
        for row in self.rows.values():
            yield
            self._registrations(row)
            self._leftovers(row)
            row.problems.sort(key=lambda each: (CONDITIONS.index(each.condition), each.subject))

    def _exists(self, node: str) -> bool:
        return not self._nodes or Name("", node) in self._nodes

    def _pools(self) -> Iterator[None]:
        pools: dict[PoolID, None] = {}
        for each in list(self._world.slices()):
            yield
            if (row := self.rows.get(each.driver)) is None:
                continue
            node = node_of_slice(each)
            if node and not self._exists(node):
                row.remains["resourceslice"] += 1
                continue
            pools[each.of_pool] = None
            if node:
                row.publishing.add(node)
            else:
                self._shared.add(each.driver)
        for pool in pools:
            yield
            row = self.rows[pool.driver]
            row.pools += 1
            row.empty += not any(map(_has_devices, newest(self._world.slices_of_pool(pool))))
        for pool, node, condition in conditions_of_pools(self._world):
            yield
            reason, row = _POOL_REASONS.get(condition), self.rows.get(pool.driver)
            if reason is None or row is None:
                continue
            row.incomplete += condition in (PoolCondition.INCOMPLETE, PoolCondition.INVALID)
            command = f"explain node/{node}" if node else f"devices {pool.driver}/{pool.pool}"
            row.add(
                *(PUBLISHING, reason, f"pool {pool.pool}"),
                f"pool {pool.pool} is {condition}; run 'kubectl drakit {command}'",
                node=node,
            )

    def _claims(self) -> Iterator[None]:
        for claim in list(self._world.of(ClaimFacts).values()):
            yield
            if not claim.allocated:
                continue
            why = self._not_released(claim)
            for row in filter(None, map(self.rows.get, drivers_of([claim]))):
                row.remains["resourceclaim"] += 1
                if why:
                    row.unreleased += 1
                    name = f"{claim.namespace}/{claim.name}"
                    row.add(
                        *(RELEASED, "ClaimsNotReleased", f"claim {name}"),
                        f"claim {name} holds devices, but {why}; run 'kubectl drakit explain "
                        f"claim/{claim.name} -n {claim.namespace}'",
                    )

    def _not_released(self, claim: ClaimFacts) -> str:
        """Return why nobody releases an allocated claim; empty if pods use it."""
        if claim.held_by:
            return f"it is being deleted, and the finalizer {claim.held_by[0]} keeps it"
        if not claim.consumers:
            return "no pod uses it"
        node = node_of_claim(claim)
        return "" if node is None or self._exists(node) else f"its node {node} no longer exists"

    def _pods(self) -> Iterator[None]:
        """Find the pods that wait for drivers without reports: those have no other witness."""
        for pod in list(self._world.of(PodFacts).values()):
            yield
            if pod.node is None or not is_placed(pod) or not pod.is_starting:
                continue
            claims = [each for each in claims_of_pod(pod, self._world) if each.allocated]
            for name in drivers_of(claims):
                row, report = self.rows.get(name), Name("", f"{pod.node}.{name}")
                if row is None or report in self._world.of(ReportFacts):
                    continue
                row.stuck += sum(name in drivers_of([each]) for each in claims)
                row.add(
                    *(PROGRESSING, "PodsNotStarted", f"pod {pod.namespace}/{pod.name}"),
                    f"pod {pod.namespace}/{pod.name} waits on node {pod.node} for the driver, or "
                    f"for volumes or the network; run 'kubectl drakit explain pod/{pod.name} -n "
                    f"{pod.namespace}'",
                    node=pod.node,
                )

    def _registrations(self, row: DriverRow) -> None:
        spec, reports = self._specs.get(row.name), self._reports.get(row.name, {})
        if spec is not None and spec.node_selector is not None:
            row.desired = {
                each.name
                for each in self._nodes.values()
                if selects_labels(spec.node_selector, each.labels)
            }
        else:
            row.desired = row.publishing | {node for node in reports if self._exists(node)}
        for node in sorted(row.desired):
            self._node(row, node, reports.get(node))
        row.publishing &= row.desired
        row.remains["nodedevicereport"] = sum(each.outdated for each in reports.values())

    def _node(self, row: DriverRow, node: str, report: ReportFacts | None) -> None:
        """Compare what is known of a driver on a node."""
        facts, publishes = self._nodes.get(Name("", node)), node in row.publishing
        if report is not None and report.progress:
            row.stuck += report.stuck or 1
            row.add(
                *(PROGRESSING, "ClaimsStuck", node), f"node {node}: {report.progress}", node=node
            )
        describe = f"run 'kubectl describe nodedevicereport {node}.{row.name}'"
        pods = f"run 'kubectl get pods -A -o wide --field-selector spec.nodeName={node}'"
        missing: tuple[str, str] | None = None
        if facts is not None and not facts.ready:
            missing = (
                "NodeNotReady",
                f"node {node} is not ready; run 'kubectl describe node {node}'",
            )
        elif report is None and not publishes:
            if row.name in self._shared:
                row.unknown = True
            else:
                missing = (
                    "PluginMissing",
                    f"node {node} has no ResourceSlice of the driver, so its plugin is not "
                    f"registered there, or has no devices; {pods}",
                )
        elif report is not None and report.outdated:
            missing = "PluginGone", f"the node plugin on node {node} is gone; {pods}"
        elif report is not None and report.registration:
            missing = (
                "NotRegistered",
                f"the kubelet on node {node} has not registered the driver "
                f"({report.registration}); {describe}",
            )
        if missing is not None:
            row.add(REGISTERED, missing[0], node, missing[1], node=node)
            return
        if not row.unknown:
            row.registered.add(node)
        if report is None:
            return
        if report.stopped:
            text = f"the driver does not run on node {node} ({report.stopped}); {describe}"
            row.add(PUBLISHING, "DriverStopped", node, text, node=node)
        elif report.published and not publishes:
            text = f"the plugin on node {node} publishes no ResourceSlices; {describe}"
            row.add(PUBLISHING, "NoResourceSlices", node, text, node=node)

    def _leftovers(self, row: DriverRow) -> None:
        """Name what remains of a driver of which nothing runs."""
        reports = self._reports.get(row.name, {}).values()
        if row.pools or any(not each.outdated for each in reports) or self._world.unreadable():
            return
        remains = [(kind, number) for kind, number in sorted(row.remains.items()) if number]
        spec = self._specs.get(row.name)
        if remains:
            named = " and ".join(plural(number, kind) for kind, number in remains)
            commands = "; ".join(f"'{_REMOVALS[kind].format(row.name)}'" for kind, _ in remains)
            row.problems = [each for each in row.problems if each.condition == REGISTERED]
            row.add(
                *(INSTALLED, "Leftovers", ""),
                f"no plugin of the driver is available, but objects of it remain: {named}; "
                f"install the driver, or run {commands}",
            )
        elif spec is not None and spec.node_selector is None:
            row.add(
                *(INSTALLED, "NotFound", ""),
                f"the cluster has no object of the driver; install it, or run 'kubectl delete "
                f"devicedriver {row.name}'",
            )


_REMOVALS: Mapping[str, str] = {
    "devicetaintrule": "kubectl get devicetaintrules",
    "nodedevicereport": "kubectl delete nodedevicereports --field-selector spec.driver={}",
    "resourceclaim": "kubectl drakit claims -A",
    "resourceslice": "kubectl delete resourceslices --field-selector spec.driver={}",
}
"""The command that removes each kind of remaining objects, or finds them, if that would delete the
objects of others."""


def _has_devices(of: SliceFacts) -> bool:
    return of.unread or bool(len(of.devices))
