"""
Checks drakit's releases: their pods and permissions, and values that conflict with the cluster or
with each other.

Does not depend on sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from drakit.text import plural
from drakit_cli.kubectl.cluster_checks import Finding, note
from drakit_cli.kubectl.components import (
    CONTROLLERS,
    GATES,
    KUBELET,
    SCHEDULER,
    Components,
    is_default,
)
from drakit_cli.kubectl.devices import PoolRow
from drakit_cli.kubectl.gather import Gathered
from drakit_cli.kubectl.output import shortened
from drakit_cli.kubectl.permissions import Denied, Permission
from drakit_cli.kubectl.releases import NODEPLUGIN, OPERATOR, Container, Release, Releases, Workload
from drakit_explain.kinds import POLICIES, SLICES
from drakit_explain.model import DriverFacts, NodeFacts, PolicyFacts, ReportFacts
from drakit_explain.world import World

OLDEST = (1, 34)
"""The oldest Kubernetes version that the chart supports (the chart's `kubeVersion`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gate:
    """A feature gate that a value requires."""

    name: str
    needed: Callable[[Release], bool]
    without: str
    option: str = ""
    """The Helm option that changes the value so that it does not require the gate. Empty if there
    is no such option."""


_GATES = (
    _Gate(
        name="DRADeviceTaints",
        needed=lambda release: release.workload(NODEPLUGIN) is not None,
        without="unhealthy devices are still allocated",
    ),
    _Gate(
        name="DRAPartitionableDevices",
        needed=lambda release: release.values.partitions,
        without="partitions are not published",
        option="--set-json 'simulated.config.gpu.partitions=[]'",
    ),
    _Gate(
        name="DRAConsumableCapacity",
        needed=lambda release: release.values.shares,
        without="claims cannot share a device",
        option="--set simulated.config.nic.count=0,simulated.config.cpu.grouping=devices",
    ),
    _Gate(
        name="DRAListTypeAttributes",
        needed=lambda release: release.values.lists,
        without="drakit publishes devices without list attributes",
        option="--set simulated.config.nic.listAttributes=false",
    ),
    _Gate(
        name="DRAExtendedResource",
        needed=lambda release: bool(release.values.plugin_driver),
        without="pods can request device plugins' devices only with claims, not in "
        "resources.limits",
    ),
)


def check_releases(
    installed: Releases, found: Gathered, rows: Sequence[PoolRow], denied: Iterable[Denied]
) -> list[Finding]:
    """Run all checks."""
    world = found.world
    findings: list[Finding] = []
    if not installed.releases and not installed.gaps:
        reports = world.of(ReportFacts).values()
        nodes = sorted({each.node for each in reports})
        of_former = (
            f", but drivers of an earlier one have reports on {shortened(nodes)}: pods with their "
            f"devices can neither start nor terminate"
        )
        findings.append(
            Finding(
                object="Release",
                what=f"no release of drakit is installed{of_former if nodes else ''}",
                fix="if this cluster should have one, follow https://drakit.github.io/drakit/dev/"
                "admin/install/",
                problem=bool(nodes),
            )
        )
    findings += _left(installed, world)
    for each in installed.releases:
        findings += [
            *_images(each),
            *_unselected(each, len(world.of(NodeFacts))),
            *_pods(each),
            *_restarted(each),
            *_versions(each),
            *_kubernetes(each, found),
            *_gates(each, found),
            *_policies(each, found),
            *(() if found.lacks_all(SLICES) else _unpublished(each, rows)),
        ]
    return [
        *findings,
        *_permissions(denied),
        *_conflicts(installed),
        *_kubelets(installed),
        *_taints(installed, world),
    ]


def _subject(each: Workload) -> str:
    return f"{each.kind} {each.namespace}/{each.name}"


def _of(release: Release) -> str:
    return f"Release {release.namespace}/{release.name}"


def _upgrade(release: Release, *options: str) -> str:
    """Return instructions for changing a release: the command, or the values if Helm did not
    install it."""
    if release.helm:
        command = (
            f"helm upgrade {release.name} charts/drakit -n {release.namespace} "
            "--reset-then-reuse-values"
        )
        return " ".join([command, *options])
    again = "apply the chart again with the tool that installed it, which is not Helm"
    return f"{again}, and {' '.join(options)}" if options else again


def _left(installed: Releases, world: World) -> Iterator[Finding]:
    """Find nodes on which drakit's drivers have run, but on which a node plugin is no longer
    running."""
    plugins = {pod.node for each in installed.releases for pod in each.pods}
    of_reports = {each.node for each in world.of(ReportFacts).values()}
    left = sorted(node for node in of_reports - plugins if world.node(node) is not None)
    if left and installed.releases and not installed.gaps:
        workloads = [each.workload(NODEPLUGIN) for each in installed.releases]
        selected = sum(each.desired for each in workloads if each is not None)
        nodes = len(world.of(NodeFacts))
        yield Finding(
            object=f"Node {left[0]}",
            what=f"no node plugin runs on {shortened(left)}, where drivers of drakit have reports "
            f"(the DaemonSets select {selected} of {plural(nodes, 'node')}): pods with their "
            f"devices there can neither start nor terminate",
            fix="correct the labels or taints of the node, or the values nodeplugin.nodeSelector "
            "and nodeplugin.tolerations; if drakit is to leave the node, delete its pods with "
            "devices first",
        )


def _unselected(release: Release, nodes: int) -> Iterator[Finding]:
    """Find node plugins that do not run on any node."""
    for each in release.workloads:
        if each.component == NODEPLUGIN and not each.desired and nodes:
            yield Finding(
                object=_subject(each),
                what=f"{_subject(each)} selects 0 of {plural(nodes, 'node')}, so no driver runs",
                fix="compare the labels of the nodes (kubectl get nodes --show-labels) with "
                f"kubectl -n {each.namespace} get {each.ref} -o "
                f"jsonpath='{{.spec.template.spec.nodeSelector}}'. Label a node, or "
                f"change the values nodeplugin.nodeSelector and nodeplugin.tolerations",
            )


def _pods(release: Release) -> Iterator[Finding]:
    unready = sorted({pod.node or "none" for pod in release.pods if not pod.ready})
    for each in release.workloads:
        if each.ready < each.desired:
            where, hint = "", ""
            if each.component == NODEPLUGIN:
                where = f"; not ready on {shortened(unready)}" if unready else ""
                hint = (
                    '. If it reports "the kubelet has not registered the driver", set '
                    "nodeplugin.kubeletRoot to the --root-dir of the kubelet"
                )
            yield Finding(
                object=_subject(each),
                what=f"{_subject(each)}: {each.ready} of {plural(each.desired, 'pod')} "
                f"ready{where}",
                fix=f"kubectl -n {each.namespace} describe {each.ref}, and read the log: kubectl "
                f"-n {each.namespace} logs {each.ref}{hint}",
            )


MAX_MESSAGE = 300
"""Maximum length of a registry's message in a finding."""


_PULL_REASONS = (
    *("ErrImageNeverPull", "ErrImagePull", "ImageInspectError"),
    *("ImagePullBackOff", "InvalidImageName"),
)
"""The kubelet's reasons for a container that is waiting for its image."""


def _images(release: Release) -> Iterator[Finding]:
    """Find images that nodes cannot pull. Return one finding per image."""
    pods: dict[str, list[Container]] = {}
    for each in release.containers:
        if each.reason in _PULL_REASONS:
            pods.setdefault(each.image, []).append(each)
    for image, waiting in sorted(pods.items()):
        first = waiting[0]
        names = sorted(each.pod for each in waiting)
        answer = f": {first.message[:MAX_MESSAGE]}" if first.message else ""
        yield Finding(
            object=f"Pod {release.namespace}/{first.pod}",
            what=f"{plural(len(names), 'pod')} in namespace {release.namespace} cannot pull image "
            f"{image} ({shortened(names)}): {first.reason}{answer}",
            fix="check that the image exists, that the nodes can reach the registry, and that "
            "imagePullSecrets has the registry's credentials. To use another image: "
            + _upgrade(release, "--set image.repository=REPOSITORY", "--set image.tag=TAG")
            + ". If helm install still waits, stop it first with Ctrl+C",
        )


def _restarted(release: Release) -> Iterator[Finding]:
    """Report containers that were restarted, even if they are running now."""
    for each in release.containers:
        if not (each.restarts and each.ended):
            continue
        where = f"container {each.name} of pod {each.pod} on node {each.node}"
        times = "once" if each.restarts == 1 else f"{each.restarts} times"
        yield note(
            object=f"Pod {release.namespace}/{each.pod}",
            what=f"{where} was restarted {times}; its last exit: {each.ended[:MAX_MESSAGE]}",
            fix=f"kubectl -n {release.namespace} logs {each.pod} -c {each.name} --previous: "
            "report the error, or for OOMKilled raise the memory limit; without an error, the "
            "liveness probe may have failed, or the node was rebooted",
        )


def _versions(release: Release) -> Iterator[Finding]:
    versions = sorted({each.version for each in release.workloads})
    if len(versions) > 1:
        yield Finding(
            object=_of(release),
            what=f"release {release.name} in namespace {release.namespace} has components of "
            f"versions {', '.join(versions)}",
            fix=f"complete the upgrade: {_upgrade(release)}",
        )


def _kubernetes(release: Release, found: Gathered) -> Iterator[Finding]:
    if found.minor is not None and found.minor < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        yield Finding(
            object=_of(release),
            what=f"release {release.name} in namespace {release.namespace} needs Kubernetes "
            f"{oldest}, but the API server is {found.kubernetes}",
            fix=f"upgrade the cluster to Kubernetes {oldest} or newer",
        )


def _gates(release: Release, found: Gathered) -> Iterator[Finding]:
    for gate in _GATES:
        if is_enabled(gate.name, found) is False and gate.needed(release):
            how = "is disabled" if gate.name in found.gates_of_devices else "is disabled by default"
            instead = f", or {_upgrade(release, gate.option)}" if gate.option else ""
            yield note(
                object=_of(release),
                what=f"release {release.name} in namespace {release.namespace} uses the feature "
                f"gate {gate.name}, which {how}: {gate.without}",
                fix=f"start API server, scheduler, controller manager and kubelets with "
                f"--feature-gates={gate.name}=true{instead}",
            )


def is_enabled(gate: str, found: Gathered) -> bool | None:
    """Return whether a feature gate of the API server is enabled, or None if that is unknown."""
    known = found.gates_of_devices.get(gate)
    if known is None and found.minor is not None:
        # Use the release's default: the user may not be allowed to read gates, or the API server
        # may not have this gate.
        known = is_default(gate, found.minor[1])
    return known


_TAKES_PART = {
    SCHEDULER: "pods that use its feature can stay Pending",
    CONTROLLERS: "its feature works only partially",
    KUBELET: "pods on these nodes cannot use its feature",
}


def check_components(components: Components, found: Gathered) -> Iterator[Finding]:
    """Find components in which a gate is disabled even though the API server enables it."""
    for name, gate in GATES.items():
        for kind in gate.components if is_enabled(name, found) else ():
            if lacking := components.without(name, kind):
                where = "on node" if kind == KUBELET else "in pod"
                yield note(
                    object=f"Feature gate {name}",
                    what=f"the feature gate {name} is enabled in the API server, but not in "
                    f"{kind} ({where}{'s' if len(lacking) > 1 else ''} {shortened(lacking)}): "
                    f"{_TAKES_PART[kind]}",
                    fix=f"start {kind} with --feature-gates={name}=true",
                )


def _unpublished(release: Release, rows: Sequence[PoolRow]) -> Iterator[Finding]:
    """Find nodes that have a ready node plugin, but no pools of its drivers."""
    published = {(row.identity.driver, row.node) for row in rows}
    drivers = release.values.drivers
    plugin = release.workload(NODEPLUGIN)
    for pod in release.pods:
        if not pod.ready or plugin is None or pod.configuration != plugin.configuration:
            continue  # during an update, a pod can have different drivers
        log = f"kubectl -n {pod.namespace} logs {pod.name}"
        missing = [driver for driver in sorted(drivers) if (driver, pod.node) not in published]
        for driver in missing:
            yield Finding(
                object=f"Node {pod.node}",
                what=f"the node plugin of release {release.name} is ready on node {pod.node}, but "
                f"driver {driver} publishes no ResourceSlice there",
                fix=log,
            )
        if not drivers and pod.node not in {node for _, node in published}:
            yield note(
                object=f"Node {pod.node}",
                what=f"node {pod.node} has a node plugin, but no ResourceSlice is published for "
                f"the node",
                fix=f"if the node has devices: {log}",
            )


def _policies(release: Release, found: Gathered) -> Iterator[Finding]:
    """Find policies that a release's operator does not reconcile."""
    operator = release.workload(OPERATOR)
    if operator is None or "hostdev.drakit.dev" not in release.values.claimed:
        return
    if POLICIES.plural in found.absent:
        yield Finding(
            object=f"CustomResourceDefinition {POLICIES}",
            what=f"the CustomResourceDefinition {POLICIES} is missing, so hostdev publishes no "
            "device, and the DeviceClasses of policies are gone",
            fix=f"install it and the policies again: {_upgrade(release)}",
        )
    if names := sorted(one.name for one in found.world.of(PolicyFacts).values() if not one.status):
        yield Finding(
            object=f"HostDevicePolicy {names[0]}",
            what=f"the operator has not written the status of {shortened(names)}, so the "
            "DeviceClass may be missing or outdated",
            fix=f"kubectl -n {release.namespace} logs {operator.ref}: if it has no error, wait a "
            "minute, and run the command again",
        )


def _permissions(denied: Iterable[Denied]) -> Iterator[Finding]:
    for each in denied:
        for essential in (True, False):
            missing = [one for one in each.permissions if one.essential is essential]
            if missing:
                yield _missing(each, missing, essential=essential)


def _missing(denied: Denied, permissions: Sequence[Permission], *, essential: bool) -> Finding:
    release, workload = denied.release, denied.workload
    names = [str(permission) for permission in permissions]
    return Finding(
        object=_subject(workload),
        what=f"the service account {workload.namespace}/{workload.service_account} of the "
        f"{workload.component} is not allowed to {shortened(names, most=8)}",
        # Force conflicts, because by default, Helm does not overwrite fields that another client
        # has changed.
        fix="restore the chart's roles: "
        + _upgrade(release, *(["--force-conflicts"] if release.helm else [])),
        problem=essential,
    )


def _taints(installed: Releases, world: World) -> Iterator[Finding]:
    """Find drivers whose devices must be tainted, but that no operator taints."""
    operators = [each for each in installed.releases if each.lease]
    names = sorted(
        each.name for each in world.of(DriverFacts).values() if each.taint_after_seconds is not None
    )
    if names and operators and not any(each.driver_taints for each in operators):
        yield note(
            object=f"DeviceDriver {names[0]}",
            what="the operator taints no devices, but taintAfterSeconds is set in the "
            f"DeviceDrivers {shortened(names)}",
            fix=_upgrade(operators[0], "--set operator.driverTaints.enabled=true"),
        )


_UNSET = {"hostdev": "false", "backends": "null"}
"""How to disable a driver that cannot be renamed, keyed by the section of its value."""


def _conflicts(installed: Releases) -> Iterator[Finding]:
    """Find releases that conflict with each other."""
    for one, other in combinations(installed.releases, 2):
        names = f"releases {one.namespace}/{one.name} and {other.namespace}/{other.name}"
        if one.workload(OPERATOR) and other.workload(OPERATOR):
            yield note(
                object=_of(other),
                what=f"{names} both run an operator, so Events are written twice",
                fix=_upgrade(other, "--set operator.enabled=false"),
            )
        if not (shared := sorted(one.nodes & other.nodes)):
            continue
        on = f"node{'s' if len(shared) > 1 else ''} {shortened(shared)}"
        changed = one if other.workload(OPERATOR) and not one.workload(OPERATOR) else other
        for name, value in sorted(changed.values.claimed.items()):
            if name in one.values.claimed and name in other.values.claimed:
                yield Finding(
                    object=_of(other),
                    what=f"{names} both run driver {name} on {on}: only one of them can serve it",
                    fix=_disable(name, value, changed),
                )
        for path, value in sorted(other.values.directories.items()):
            if path in one.values.directories:
                yield Finding(
                    object=_of(other),
                    what=f"{names} both use the directory {path} on {on}",
                    fix=_upgrade(other, f"--set {value}=DIRECTORY"),
                )


def _disable(driver: str, value: str, release: Release) -> str:
    """Return instructions for removing a driver from a release. Helm cannot install a release
    without drivers."""
    values = release.values
    if value == "hostdev.enabled" and {*values.claimed} == {driver} and not values.directories:
        where = f"{release.name} -n {release.namespace}"
        return f"uninstall the second release, which has no other driver: helm uninstall {where}"
    if value == "nodeplugin.drivers" and release.helm:
        return (
            f"rename or remove it in nodeplugin.drivers of one of them: helm get values "
            f"{release.name} -n {release.namespace} > values.yaml, edit the file, and "
            f"{_upgrade(release, '--values values.yaml')}"
        )
    setting = f"--set {value}={_UNSET.get(value.partition('.')[0], 'NAME')}"
    return f"disable or rename it in one of them: {_upgrade(release, setting)}"


def _kubelets(installed: Releases) -> Iterator[Finding]:
    """Compare the node plugin's setting for the kubelet's root directory with that of other
    plugins."""
    others: dict[str, list[str]] = {}
    for each in installed.others:
        others.setdefault(each.kubelet_root, []).append(_subject(each))
    for release in installed.releases:
        plugin = release.workload(NODEPLUGIN)
        if plugin is None or not plugin.kubelet_root or not others:
            continue
        if plugin.kubelet_root not in others:
            root, names = next(iter(sorted(others.items())))
            yield note(
                object=_of(release),
                what=f"release {release.name} in namespace {release.namespace} uses the kubelet "
                f"directory {plugin.kubelet_root}, but {shortened(names)} "
                f"{'uses' if len(names) == 1 else 'use'} {root}",
                fix="if that is the --root-dir of the kubelet: "
                + _upgrade(release, f"--set nodeplugin.kubeletRoot={root}"),
            )
