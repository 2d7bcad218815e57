"""
``kubectl drakit doctor``: findings about a cluster, each with a remedy.

A *problem* keeps pods from devices, a *note* may be intended: only problems make the exit code 1.
Only what the API shows is checked. The API does not show which drivers are registered on a node.

It must not know sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from drakit.cli.kubectl.evaluating import evaluate_selectors
from drakit.cli.kubectl.gather import Gathered
from drakit.cli.kubectl.kinds import CLASSES, NODES, SLICES
from drakit.cli.kubectl.output import Output, plural
from drakit.cli.kubectl.pools import UNHEALTHY, PoolRow, pool_rows
from drakit.cli.kubectl.releases import Releases, Workload
from drakit.explain.allocation import NotEvaluatedError
from drakit.explain.availability import analyze
from drakit.explain.model import ClaimFacts, ClassFacts, PoolID, Request, TemplateFacts
from drakit.explain.pending import missing_classes_of_claim, missing_classes_of_template

__all__ = ("Diagnosis", "Finding", "diagnose")

STOPPED = "drakit.dev/stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that is wrong, or worth a look, and its remedy."""

    what: str
    fix: str
    problem: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverRow:
    """A driver, by what it publishes."""

    name: str
    nodes: int
    pools: int
    devices: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The answer of the doctor."""

    found: Gathered
    releases: Releases
    drivers: tuple[DriverRow, ...]
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> bool:
        return any(each.problem for each in self.findings)

    def body(self) -> dict[str, Any]:
        """Write it for programs."""
        return {
            "api": {"served": list(self.found.served), "used": self.found.version},
            "drivers": [
                {
                    "name": each.name,
                    "nodes": each.nodes,
                    "pools": each.pools,
                    "devices": each.devices,
                }
                for each in self.drivers
            ],
            "releases": [
                {
                    "namespace": each.namespace,
                    "release": each.release,
                    "kind": each.kind,
                    "name": each.name,
                    "component": each.component,
                    "version": each.version,
                    "desired": each.desired,
                    "ready": each.ready,
                }
                for each in self.releases.workloads
            ],
            "findings": [
                {
                    "severity": "problem" if each.problem else "note",
                    "finding": each.what,
                    "fix": each.fix,
                }
                for each in self.findings
            ],
        }

    def show(self, output: Output) -> None:
        """Print it."""
        served = ", ".join(self.found.served) or "unknown"
        output.line(
            f"API group resource.k8s.io: served in {served}; used here: {self.found.version}"
        )
        output.line()
        if self.drivers:
            output.table(
                ("DRIVER", "NODES", "POOLS", "DEVICES"),
                [
                    [each.name, str(each.nodes), str(each.pools), str(each.devices)]
                    for each in self.drivers
                ],
            )
            output.line()
        if self.releases.workloads:
            output.table(
                ("NAMESPACE", "RELEASE", "COMPONENT", "VERSION", "READY"),
                [_cells(each) for each in self.releases.workloads],
            )
            output.line()
        for problem, word, colour in ((True, "problem", "bad"), (False, "note", "unsure")):
            for each in self.findings:
                if each.problem is problem:
                    output.line(f"{word}: {each.what}", colour=colour)
                    output.line(f"fix: {each.fix}", indent=2)
        if not self.wrong:
            output.line("No problems found.", colour="good")


def diagnose(found: Gathered, releases: Releases) -> Diagnosis:
    """Check everything that is known."""
    rows = pool_rows(found)
    findings = [
        *_api(found),
        *_pools(rows),
        *_twins(rows),
        *_nodes(rows, found),
        *_missing_classes(found),
        *_classes(found),
        *_releases(releases, rows, found),
        *_gaps(found, releases),
    ]
    return Diagnosis(
        found=found, releases=releases, drivers=tuple(_drivers(rows)), findings=tuple(findings)
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
            devices=sum(len(row.devices) for row in pools),
        )


def _api(found: Gathered) -> Iterator[Finding]:
    if found.version != "v1":
        yield Finding(
            what=f"the API server does not serve resource.k8s.io/v1; {found.version} is used",
            fix="upgrade the cluster to Kubernetes 1.34 or newer, or keep the beta API enabled",
            problem=False,
        )


def _pools(rows: Iterable[PoolRow]) -> Iterator[Finding]:
    for row in rows:
        where = f"pool {row.identity.pool} of driver {row.identity.driver}"
        if row.vanished:
            yield Finding(
                what=f"{where} is for node {row.node}, which does not exist",
                fix="delete its ResourceSlices if the node does not come back; slices that the "
                "node owns are deleted by Kubernetes",
            )
        elif row.problem:
            yield Finding(
                what=f"nothing is allocated from {where}, node {row.node}: {row.problem}",
                fix="check the log of the driver: it must publish all slices of the pool's newest "
                "generation, without contradictions",
            )
        for key, state, fix in (
            (UNHEALTHY, "unhealthy", "check the device, and the driver's log on its node"),
            (STOPPED, "without their driver", "check the log of the driver on that node"),
        ):
            names = [each.name for each in row.devices if key in each.taints]
            if names:
                yield Finding(
                    what=f"{plural(len(names), 'device')} of {where} {_is(names)} {state}: "
                    f"{_cut(names)}",
                    fix=fix,
                )


def _twins(rows: Iterable[PoolRow]) -> Iterator[Finding]:
    """Find devices that two nodes publish by one name: an allocation of one takes both."""
    seen: dict[PoolID, list[PoolRow]] = {}
    for row in rows:
        seen.setdefault(row.identity, []).append(row)
    for identity, same in seen.items():
        names = [{device.name for device in row.devices} for row in same if row.named]
        nodes = [row.node for row in same if row.named]
        common = sum(map(len, names)) > len(set[str]().union(*names))
        if len(nodes) > 1 and common:
            yield Finding(
                what=f"nodes {_cut(nodes)} publish devices of the same names in pool "
                f"{identity.pool} of driver {identity.driver}: the scheduler takes them for one "
                "device",
                fix="let the driver name its pools after their nodes",
            )


def _nodes(rows: Iterable[PoolRow], found: Gathered) -> Iterator[Finding]:
    with_devices = {row.node: len(row.devices) for row in rows if row.devices and row.named}
    for name, count in sorted(with_devices.items()):
        node = found.world.node(name)
        if node is not None and not node.ready:
            yield Finding(
                what=f"node {name} is not ready: pods do not start with its "
                f"{plural(count, 'device')}",
                fix=f"run kubectl describe node {name}",
            )


def _missing_classes(found: Gathered) -> Iterator[Finding]:
    if found.lacks_all(CLASSES):
        return
    world = found.world
    reasons = [
        *(each for one in world.of(ClaimFacts).values() for each in _of_claim(one, found)),
        *(
            each.sentence
            for one in world.of(TemplateFacts).values()
            for each in missing_classes_of_template(one, world)
        ),
    ]
    for sentence in sorted(set(reasons)):
        what, _, fix = sentence.partition("; ")
        yield Finding(what=what, fix=fix)


def _of_claim(claim: ClaimFacts, found: Gathered) -> list[str]:
    return [each.sentence for each in missing_classes_of_claim(claim, found.world)]


def _classes(found: Gathered) -> Iterator[Finding]:
    world = found.world
    if found.lacks(CLASSES, SLICES) or found.lacks_all(NODES):
        return
    classes = sorted(world.of(ClassFacts).values(), key=lambda each: each.name)
    evaluate_selectors(found, (text for each in classes for text in each.selectors if text))
    for each in classes:
        try:
            analysis = analyze(Request(name="", device_class=each.name), world)
        except (NotEvaluatedError, ValueError) as error:
            yield Finding(
                what=f"DeviceClass {each.name} is not checked: {error}",
                fix="install drakit-cel, which evaluates selectors as Kubernetes does",
                problem=False,
            )
            continue
        if analysis.errors:
            error = analysis.errors[0]
            yield Finding(
                what=f"DeviceClass {each.name} fails on device {'/'.join(error.device)}: "
                f"{error.text}",
                fix="test that a key exists before you read it, or compare device.driver first",
            )
        elif not analysis.matching:
            yield Finding(
                what=f"DeviceClass {each.name} selects none of {analysis.published} devices",
                fix="check its selectors, and that its driver publishes devices",
                problem=False,
            )


def _releases(releases: Releases, rows: Iterable[PoolRow], found: Gathered) -> Iterator[Finding]:
    if not releases.workloads and not releases.gaps:
        yield Finding(
            what="no release of drakit is installed",
            fix="install the chart, if this cluster should have one",
            problem=False,
        )
    versions: dict[tuple[str, str], set[str]] = {}
    for each in releases.workloads:
        versions.setdefault((each.namespace, each.release), set()).add(each.version)
        if each.ready < each.desired:
            kind = each.kind.lower()
            yield Finding(
                what=f"{each.kind} {each.namespace}/{each.name}: {each.ready} of "
                f"{plural(each.desired, 'pod')} ready",
                fix=f"run kubectl -n {each.namespace} describe {kind}/{each.name}, and read the "
                "log of the pods that are not ready",
            )
    for (namespace, name), found_versions in sorted(versions.items()):
        if len(found_versions) > 1:
            yield Finding(
                what=f"release {name} in namespace {namespace} has components of versions "
                f"{', '.join(sorted(found_versions))}",
                fix=f"complete the upgrade: helm upgrade {name} -n {namespace}",
            )
    if found.lacks_all(SLICES):
        return
    publishing = {row.node for row in rows}
    for pod in releases.pods:
        if pod.ready and pod.node not in publishing:
            yield Finding(
                what=f"node {pod.node} has a node plugin, but no ResourceSlice names the node",
                fix="if the node has devices, read the log: kubectl -n "
                f"{pod.namespace} logs {pod.name}",
                problem=False,
            )


def _gaps(found: Gathered, releases: Releases) -> Iterator[Finding]:
    for gap in (*found.gaps, *releases.gaps):
        fix = "correct or delete the object, or ask its owner"
        if gap.forbidden:
            fix = f"ask an administrator for the verb list on {gap.kind}, in all namespaces"
        elif not gap.where:
            fix = "run the command again"
        if gap.kind == "selectors":
            fix = "install drakit[kubectl] or the program drakit-cel"
        yield Finding(what=str(gap), fix=fix, problem=False)


def _cells(each: Workload) -> list[str]:
    ready = f"{each.ready}/{each.desired}"
    return [each.namespace, each.release, each.component, each.version, ready]


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _cut(names: list[str]) -> str:
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")
