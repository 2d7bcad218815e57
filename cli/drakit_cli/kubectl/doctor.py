"""
``kubectl drakit doctor``: findings about a cluster, each with a remedy.

A *problem* prevents pods from getting devices, or a release from working. A *note* describes a
state that may be intended. By default, only problems cause the exit code 1.

The doctor checks only what the API shows. The API does not show which drivers a kubelet has
registered, except in the readiness and the reports of drakit's node plugin. Does not depend on
sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from drakit.text import plural
from drakit_cli.kubectl.cluster_checks import (
    Finding,
    check_cluster,
    check_gaps,
    check_kubernetes,
    note,
)
from drakit_cli.kubectl.components import GATES, Components
from drakit_cli.kubectl.devices import PoolRow, pool_rows
from drakit_cli.kubectl.gather import Gathered
from drakit_cli.kubectl.output import Output
from drakit_cli.kubectl.permissions import Denied, Lacking, commands_that_grant, find_viewer
from drakit_cli.kubectl.release_checks import check_components, check_releases
from drakit_cli.kubectl.releases import Releases, Workload
from drakit_explain.reports import not_registered

_OF_WORKLOAD = ("namespace", "release", "kind", "name", "component", "version", "desired", "ready")


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """The facts that the doctor examines."""

    found: Gathered
    releases: Releases
    components: Components = field(default_factory=Components)
    denied: Sequence[Denied]
    lacking: Sequence[Lacking] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverRow:
    """A driver, as its slices show it."""

    name: str
    nodes: int
    pools: int
    devices: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRow:
    """One driver on one node."""

    node: str
    driver: str
    pools: int = 0
    devices: int = 0
    registered: str
    """Whether the kubelet has registered the driver: "yes", "no" or "unknown"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The result of the doctor."""

    examined: Examined
    drivers: tuple[DriverRow, ...]
    nodes: tuple[NodeRow, ...]
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> bool:
        return any(each.problem for each in self.findings)

    def body(self) -> dict[str, Any]:
        """Return the diagnosis as JSON."""
        examined = self.examined
        return {
            "api": {"served": list(examined.found.served), "used": examined.found.version},
            "kubernetes": examined.found.kubernetes,
            "featureGates": examined.found.gates_of_devices,
            "components": [
                {
                    "component": each.kind,
                    "name": each.name,
                    "featureGates": {name: on for name, on in each.gates.items() if name in GATES},
                }
                for each in examined.components.checked
            ],
            "notChecked": list(examined.components.unchecked),
            "drivers": [asdict(each) for each in self.drivers],
            "nodes": [asdict(each) for each in self.nodes],
            "nodePlugins": [
                {
                    "namespace": each.namespace,
                    "release": each.release,
                    "pod": each.name,
                    "node": each.node,
                    "ready": each.ready,
                }
                for each in examined.releases.pods
            ],
            "releases": [
                {key: getattr(each, key) for key in _OF_WORKLOAD}
                for each in examined.releases.workloads
            ],
            "findings": [
                {
                    "severity": each.severity,
                    "object": each.object,
                    "finding": each.what,
                    "fix": each.fix,
                }
                for each in self.findings
            ],
        }

    def show(self, output: Output) -> None:
        """Print the diagnosis."""
        self._show_api(output)
        if self.drivers:
            output.line()
            output.table(
                ("DRIVER", "NODES", "POOLS", "DEVICES"),
                [[*map(str, astuple(each))] for each in self.drivers],
            )
        if self.nodes and output.wide:
            output.line()
            output.table(
                ("NODE", "DRIVER", "POOLS", "DEVICES", "REGISTERED"),
                [[*map(str, astuple(each))] for each in self.nodes],
            )
        if self.examined.releases.workloads:
            output.line()
            output.table(
                ("NAMESPACE", "RELEASE", "COMPONENT", "VERSION", "READY"),
                [_cells(each) for each in self.examined.releases.workloads],
            )
        self._show_findings(output)

    def _show_api(self, output: Output) -> None:
        found = self.examined.found
        gates = found.gates_of_devices
        output.line(f"Kubernetes {found.kubernetes.removeprefix('v') or 'of unknown version'}")
        served = ", ".join(found.served) or "unknown"
        output.line(f"API group resource.k8s.io: served in {served}; used here: {found.version}")
        off = [name for name, enabled in gates.items() if not enabled]
        if output.wide:
            on = [name for name, enabled in gates.items() if enabled]
            output.line(f"Enabled feature gates of the API server: {', '.join(on) or 'unknown'}")
        if gates:
            output.line(f"Disabled feature gates of the API server: {', '.join(off) or 'none'}")
        kinds = Counter(each.kind for each in self.examined.components.checked)
        if kinds:
            checked = ", ".join(plural(number, kind) for kind, number in kinds.items())
            output.line(f"Feature gates also checked: {checked}")
        for each in self.examined.components.unchecked:
            output.line(f"Feature gates not checked: {each}")

    def _show_findings(self, output: Output) -> None:
        for problem, color in ((True, "bad"), (False, "unsure")):
            for each in self.findings:
                if each.problem is problem:
                    output.line()
                    output.line(f"{each.severity}: {each.what}", color=color)
                    if output.wide:
                        output.line(f"object: {each.object}", indent=2)
                    output.line(f"fix: {each.fix}", indent=2)
        if not self.wrong and not any(each.is_bug for each in self.findings):
            output.line()
            output.line("No problems found.", color="good")


def diagnose(examined: Examined) -> Diagnosis:
    """Run all checks."""
    found, releases = examined.found, examined.releases
    rows = pool_rows(found)
    # Report releases first: if a release is not running, that explains why its pools are missing.
    findings = check_releases(releases, found, rows, examined.denied)
    findings += check_cluster(found, rows)
    findings += check_components(examined.components, found)
    findings += check_kubernetes(found)
    viewer = find_viewer(releases, found.gaps)
    findings += [*_lacking(examined.lacking, viewer), *check_gaps(found.gaps, viewer)]
    return Diagnosis(
        examined=examined,
        drivers=tuple(_drivers(rows)),
        nodes=tuple(_nodes(rows, releases, found)),
        findings=tuple(findings),
    )


def _lacking(lacking: Sequence[Lacking], viewer: str) -> Iterator[Finding]:
    """Report the permissions that other commands need but the user lacks."""
    if lacking:
        names = [f"{each.permission} ({each.command})" for each in lacking]
        yield note(
            object="Your permissions",
            what=f"in namespace {lacking[0].permission.namespace}, you are not allowed to "
            + ", ".join(names),
            fix=commands_that_grant(lacking, viewer),
        )


def _drivers(rows: Iterable[PoolRow]) -> Iterator[DriverRow]:
    by_driver: dict[str, list[PoolRow]] = {}
    for row in rows:
        by_driver.setdefault(row.identity.driver, []).append(row)
    for name, pools in sorted(by_driver.items()):
        yield DriverRow(
            name=name,
            nodes=len({row.node for row in pools if row.named}),
            pools=len({row.identity for row in pools}),
            devices=sum(len(row.published) for row in pools),
        )


def _nodes(rows: Iterable[PoolRow], releases: Releases, found: Gathered) -> Iterator[NodeRow]:
    published: dict[tuple[str, str], list[PoolRow]] = {}
    for row in rows:
        if row.named:
            published.setdefault((row.node, row.identity.driver), []).append(row)
    ready: dict[tuple[str, str], bool] = {}
    for release in releases.releases:
        for pod in release.pods:
            for driver in release.values.claimed:
                key = (pod.node, driver)
                # The driver for device plugins is registered only after the first device plugin has
                # registered.
                if driver in release.values.drivers or key in published:
                    ready[key] = ready.get(key, False) or pod.ready
    words = {True: "yes", False: "no", None: "unknown"}
    for node, driver in sorted(published.keys() | ready.keys()):
        pools = published.get((node, driver), [])
        rejected = not_registered(driver, node, found.world)
        yield NodeRow(
            node=node,
            driver=driver,
            pools=len(pools),
            devices=sum(len(row.published) for row in pools),
            registered="no" if rejected else words[ready.get((node, driver))],
        )


def _cells(each: Workload) -> list[str]:
    ready = f"{each.ready}/{each.desired}"
    return [each.namespace, each.release, each.component, each.version, ready]
