"""
Finds drakit's releases in a cluster: their workloads, the node plugin's pods, and their values,
which are read from the configuration files that the chart renders.

Does not depend on the doctor's checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import yaml

from drakit_cli.kubectl.gather import Gap
from drakit_daemon.kube import ApiError, ForbiddenError, Session, resource_path
from drakit_formats.resource.objects import Object, child, children, text

# ---------------------------------------------------------------- values

_DRIVERS = {
    "hostdev": ("hostdev.drakit.dev", "hostdev.enabled"),
    "simulated": ("simulated.drakit.dev", "simulated.config.driverName"),
}
"""The default names of the drivers that ship with drakit, each with the value that renames or
disables the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """The node plugin's values that the doctor checks."""

    drivers: Mapping[str, str] = field(default_factory=dict[str, str])
    """The drivers that always publish devices, each with the value that names or disables it."""

    plugin_driver: str = ""
    """The driver for device plugins, which publishes devices when a device plugin registers. Empty
    if the driver is disabled."""

    backends: Mapping[str, str] = field(default_factory=dict[str, str])
    """The drivers of backends, each with its value. Such a driver publishes devices when its
    backend registers."""

    directories: Mapping[str, str] = field(default_factory=dict[str, str])
    """The parent directories of backends and device plugins, each with the value that sets it."""

    partitions: bool = False
    shares: bool = False
    lists: bool = False
    """Whether the driver ``simulated`` publishes devices with list attributes. The fields above are
    the same for partitions and shareable devices."""

    claim_status: bool = False
    """Whether the node plugin writes the status of claims."""

    maintenance: bool = False
    """Whether the release acts on DeviceMaintenances."""

    @property
    def claimed(self) -> Mapping[str, str]:
        """The names of all drivers that can have claims on a node, each with the value that names
        or disables it."""
        own = {self.plugin_driver: "devicePlugins.driverName"} if self.plugin_driver else {}
        return {**self.drivers, **self.backends, **own}


def nodeplugin_values(content: Object) -> Values:
    """Parse the node plugin's configuration. Raises AttributeError or TypeError if it is
    malformed."""
    entries = children(content, "drivers")
    simulated = [child(each, "config") for each in entries if each.get("driver") == "simulated"]
    plugins = child(content, "devicePlugins")
    sections = {key: child(content, key) for key in ("backends", "devicePlugins")}
    return Values(
        maintenance=content.get("deviceMaintenance") is True,
        claim_status=child(content, "claimStatus").get("enabled") is True,
        drivers=dict(pair for each in entries if (pair := _driver(each))[0]),
        plugin_driver=text(plugins, "driverName") if plugins.get("enabled") else "",
        backends={
            text(child(sections["backends"], "allowed", entry), "driver"): (
                f"backends.allowed.{entry}"
            )
            for entry in child(sections["backends"], "allowed")
            if sections["backends"].get("enabled")
        },
        directories={
            text(section, "directory"): f"{key}.directory"
            for key, section in sections.items()
            if section.get("enabled")
        },
        partitions=any(child(each, "gpu").get("partitions") for each in simulated),
        shares=any(child(each, "nic").get("count") or _shares_cpus(each) for each in simulated),
        lists=any(child(each, "nic").get("listAttributes") for each in simulated),
    )


def _shares_cpus(config: Object) -> bool:
    cpu = child(config, "cpu")
    return bool(cpu.get("count")) and cpu.get("grouping") == "capacity"


def _driver(entry: Object) -> tuple[str, str]:
    name, value = _DRIVERS.get(text(entry, "driver"), ("", "nodeplugin.drivers"))
    if own := text(entry, "name"):
        return own, "nodeplugin.drivers"
    return text(entry, "config", "driverName") or name, value


# ---------------------------------------------------------------- releases

PART_OF = ("app.kubernetes.io/part-of", "drakit")
SELECTOR = "=".join(PART_OF)
NODEPLUGIN = "nodeplugin"
OPERATOR = "operator"

REGISTRY = "/plugins_registry"
"""The directory for plugin registration, relative to the kubelet's root directory."""

_CHECKSUM = "checksum/config"
"""The pod annotation that makes the chart restart pods when their configuration changes."""

_HELM = "meta.helm.sh/release-name"
"""The annotation on all objects in a Helm release."""

Fact = TypeVar("Fact")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A Deployment or DaemonSet."""

    kind: str
    namespace: str
    name: str
    release: str
    """The name of the release. Empty if drakit's chart did not create the workload."""

    component: str
    version: str
    desired: int
    ready: int
    service_account: str = "default"
    kubelet_root: str = ""
    """The kubelet's root directory in the workload's mounts. Empty if the workload does not
    register plugins."""

    configuration: str = ""
    """The checksum of the current configuration file."""

    helm: bool = False
    """Whether Helm installed the workload, so that `helm upgrade` can change it."""

    @property
    def ref(self) -> str:
        return f"{self.kind.lower()}/{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """A container in one of drakit's pods."""

    pod: str
    node: str
    name: str
    image: str
    reason: str
    """The reason why the container is waiting. Empty if it is not waiting."""

    message: str
    """The kubelet's message about the reason."""

    restarts: int
    ended: str
    """How and when the container last ended. Empty if it has not ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A pod of a release. A node plugin's pod is ready when the kubelet has registered all of its
    drivers."""

    namespace: str
    name: str
    release: str
    component: str
    node: str
    ready: bool
    containers: tuple[Container, ...] = ()
    configuration: str = ""
    """The checksum of the configuration file when the pod was created."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """The known facts about a release."""

    namespace: str
    name: str
    workloads: tuple[Workload, ...] = ()
    all_pods: tuple[Pod, ...] = ()
    values: Values = field(default_factory=Values)
    """The node plugin's values. Empty if they are unknown."""

    lease: str = ""
    """The name of the operator's Lease. Empty if unknown."""

    driver_taints: bool = False
    """Whether the operator taints the devices of unavailable drivers."""

    @property
    def pods(self) -> tuple[Pod, ...]:
        """The pods of the release's node plugin."""
        return tuple(each for each in self.all_pods if each.component == NODEPLUGIN)

    @property
    def containers(self) -> tuple[Container, ...]:
        return tuple(container for each in self.all_pods for container in each.containers)

    def workload(self, component: str) -> Workload | None:
        """Return the workload of the given component."""
        return next((each for each in self.workloads if each.component == component), None)

    @property
    def helm(self) -> bool:
        """Whether Helm installed the release."""
        return any(each.helm for each in self.workloads)

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes on which the release's node plugin has a pod."""
        return frozenset(pod.node for pod in self.pods)


@dataclass(frozen=True, kw_only=True, slots=True)
class Releases:
    """The installed releases that the user is allowed to read."""

    releases: tuple[Release, ...] = ()
    others: tuple[Workload, ...] = ()
    """DaemonSets of other projects that register plugins with the kubelet, such as CSI drivers."""

    gaps: tuple[Gap, ...] = ()

    @property
    def workloads(self) -> tuple[Workload, ...]:
        return tuple(each for release in self.releases for each in release.workloads)

    @property
    def pods(self) -> tuple[Pod, ...]:
        return tuple(each for release in self.releases for each in release.pods)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Configuration:
    namespace: str
    release: str
    values: Values = field(default_factory=Values)
    lease: str = ""
    driver_taints: bool = False


Part = TypeVar("Part", Workload, Pod, _Configuration)


async def find_releases(session: Session, namespace: str) -> Releases:
    """List the objects of drakit's releases. If the user is not allowed to list all of them, list
    those in one namespace."""
    gaps: list[Gap] = []

    async def read(
        api: str, plural: str, keep: Callable[[Object], Fact], *, selector: str = SELECTOR
    ) -> list[Fact]:
        params = {"labelSelector": selector} if selector else {}
        for where in (None, namespace):
            path = resource_path(api, plural, namespace=where)
            try:
                found = await session.read_list(path, keep, params=params)
            except ForbiddenError:
                continue
            except ApiError as error:
                gaps.append(Gap(kind=plural, what=str(error), effect="they are not checked"))
                return []
            if where is not None:
                gaps.append(_gap(api, plural, f" in namespaces other than {where}"))
            return found.items
        gaps.append(_gap(api, plural, ""))
        return []

    deployments, daemons, pods, configurations = await asyncio.gather(
        read("apps/v1", "deployments", _deployment),
        # Don't use a selector, because the DaemonSets of other projects show where the kubelet
        # registers plugins.
        read("apps/v1", "daemonsets", _daemon_set, selector=""),
        read("v1", "pods", _pod),
        read("v1", "configmaps", _configuration),
    )
    ours = [*deployments, *(each for each in daemons if each is not None and each.release)]
    return Releases(
        releases=tuple(_releases(ours, pods, [each for each in configurations if each])),
        others=tuple(each for each in daemons if each is not None and not each.release),
        gaps=tuple(gaps),
    )


def _releases(
    workloads: Iterable[Workload], pods: Iterable[Pod], configurations: Iterable[_Configuration]
) -> Iterable[Release]:
    of_pods, files = _grouped(pods), _grouped(configurations)
    for (namespace, name), mine in sorted(_grouped(workloads).items()):
        known, own = files.get((namespace, name), []), of_pods.get((namespace, name), [])
        yield Release(
            namespace=namespace,
            name=name,
            workloads=tuple(sorted(mine, key=lambda each: each.name)),
            all_pods=tuple(sorted(own, key=lambda pod: (pod.node, pod.name))),
            values=next((each.values for each in known if each.values != Values()), Values()),
            lease=next((each.lease for each in known if each.lease), ""),
            driver_taints=any(each.driver_taints for each in known),
        )


def _grouped(objects: Iterable[Part]) -> dict[tuple[str, str], list[Part]]:
    """Group parts by the namespace and name of their release."""
    found: dict[tuple[str, str], list[Part]] = {}
    for each in objects:
        found.setdefault((each.namespace, each.release), []).append(each)
    return found


def _gap(api: str, plural: str, where: str) -> Gap:
    effect = "releases of drakit may be missing in this result"
    if plural == "configmaps":
        which = " in these namespaces" if where else ""
        effect = f"the values of releases{which} are not checked"
    return Gap(
        kind=plural,
        group=api.rpartition("/")[0],
        where=where,
        what=f"no permission to list {plural}{where}",
        effect=effect,
        forbidden=True,
    )


def _deployment(body: Object) -> Workload:
    desired = child(body, "spec").get("replicas")
    return _workload(
        body,
        "Deployment",
        desired=1 if desired is None else int(desired),
        ready=int(child(body, "status").get("readyReplicas") or 0),
    )


def _daemon_set(body: Object) -> Workload | None:
    status = child(body, "status")
    found = _workload(
        body,
        "DaemonSet",
        desired=int(status.get("desiredNumberScheduled") or 0),
        ready=int(status.get("numberReady") or 0),
    )
    return found if found.release or found.kubelet_root else None


def _workload(body: Object, kind: str, *, desired: int, ready: int) -> Workload:
    metadata, pod = child(body, "metadata"), child(body, "spec", "template", "spec")
    key, value = PART_OF
    labels = child(metadata, "labels")
    if labels.get(key) != value:
        labels = child({})  # ignore the labels, because they are not those of a drakit release
    return Workload(
        kind=kind,
        namespace=text(metadata, "namespace"),
        name=text(metadata, "name"),
        release=text(labels, "app.kubernetes.io/instance"),
        component=text(labels, "app.kubernetes.io/component"),
        version=text(labels, "app.kubernetes.io/version"),
        desired=desired,
        ready=ready,
        service_account=text(pod, "serviceAccountName") or "default",
        kubelet_root=_kubelet_root(pod),
        configuration=text(body, "spec", "template", "metadata", "annotations", _CHECKSUM),
        helm=bool(text(metadata, "annotations", _HELM)),
    )


def _kubelet_root(pod: Object) -> str:
    for volume in children(pod, "volumes"):
        path = text(volume, "hostPath", "path").rstrip("/")
        if path.endswith(REGISTRY):
            return path.removesuffix(REGISTRY)
    return ""


def _pod(body: Object) -> Pod:
    metadata = child(body, "metadata")
    name, node = text(metadata, "name"), text(body, "spec", "nodeName")
    labels, statuses = child(metadata, "labels"), children(body, "status", "containerStatuses")
    conditions = {each.get("type"): each for each in children(body, "status", "conditions")}
    return Pod(
        namespace=text(metadata, "namespace"),
        name=name,
        release=text(labels, "app.kubernetes.io/instance"),
        component=text(labels, "app.kubernetes.io/component"),
        node=node,
        ready=text(conditions.get("Ready", {}), "status") == "True",
        containers=tuple(_container(name, node, each) for each in statuses),
        configuration=text(metadata, "annotations", _CHECKSUM),
    )


def _container(pod: str, node: str, status: Object) -> Container:
    waiting, last = child(status, "state", "waiting"), child(status, "lastState", "terminated")
    return Container(
        pod=pod,
        node=node,
        name=text(status, "name"),
        image=text(status, "image"),
        reason=text(waiting, "reason"),
        message=" ".join(text(waiting, "message").split()),
        restarts=int(status.get("restartCount") or 0),
        ended=_ended(last) if last else "",
    )


def _ended(state: Object) -> str:
    lines = text(state, "message").strip().splitlines()
    ended = f"{text(state, 'reason')}, exit code {state.get('exitCode')}"
    at = f" at {finished}" if (finished := text(state, "finishedAt")) else ""
    return f"{ended}{at}" + (f": {lines[-1]}" if lines else "")


def _configuration(body: Object) -> _Configuration | None:
    metadata = child(body, "metadata")
    component = text(metadata, "labels", "app.kubernetes.io/component")
    known = _Configuration(
        namespace=text(metadata, "namespace"),
        release=text(metadata, "labels", "app.kubernetes.io/instance"),
    )
    try:
        content: Any = yaml.safe_load(text(body, "data", f"{component}.yaml"))
        if component == OPERATOR:
            taints = content.get("driverTaints") is True
            return replace(
                known, lease=text(content, "election", "leaseName"), driver_taints=taints
            )
        return replace(known, values=nodeplugin_values(content))
    except (yaml.YAMLError, ValueError, AttributeError, TypeError, RecursionError):
        # The daemon cannot parse its configuration either, so its pods are not ready, which is
        # reported.
        return None
