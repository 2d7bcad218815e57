"""
The releases of drakit in a cluster: their workloads, and the node plugin's pods.

It must not know what is right or wrong with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from drakit.cli.kubectl.gather import Gap
from drakit.kube import ApiError, ForbiddenError, Session, resource_path
from drakit.resource.raw import Object, child, children, text

__all__ = ("PluginPod", "Releases", "Workload", "find_releases")

SELECTOR = "app.kubernetes.io/part-of=drakit"
PLUGIN = "nodeplugin"

Fact = TypeVar("Fact")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A Deployment or DaemonSet of a release."""

    kind: str
    namespace: str
    name: str
    release: str
    component: str
    version: str
    desired: int
    ready: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginPod:
    """A pod of a node plugin."""

    namespace: str
    name: str
    node: str
    ready: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Releases:
    """What is installed, as far as the user may see it."""

    workloads: tuple[Workload, ...]
    pods: tuple[PluginPod, ...]
    gaps: tuple[Gap, ...]


async def find_releases(session: Session, namespace: str) -> Releases:
    """List the workloads of drakit, in one namespace where the user may not list all."""
    gaps: list[Gap] = []

    async def read(
        api: str, plural: str, selector: str, keep: Callable[[Object], Fact]
    ) -> list[Fact]:
        for where in (None, namespace):
            try:
                found = await session.read_list(
                    resource_path(api, plural, namespace=where),
                    keep,
                    params={"labelSelector": selector},
                )
            except ForbiddenError:
                continue
            except ApiError as error:
                gaps.append(Gap(kind=plural, what=str(error), effect="they are not checked"))
                return []
            if where is not None:
                gaps.append(_gap(plural, f" of namespaces other than {where}"))
            return found.items
        gaps.append(_gap(plural, ""))
        return []

    plugins = f"{SELECTOR},app.kubernetes.io/component={PLUGIN}"
    deployments, daemons, pods = await asyncio.gather(
        read("apps/v1", "deployments", SELECTOR, _deployment),
        read("apps/v1", "daemonsets", SELECTOR, _daemon_set),
        read("v1", "pods", plugins, _pod),
    )
    workloads = sorted(
        [*deployments, *daemons], key=lambda each: (each.namespace, each.release, each.name)
    )
    return Releases(workloads=tuple(workloads), pods=tuple(_sorted(pods)), gaps=tuple(gaps))


def _gap(plural: str, where: str) -> Gap:
    return Gap(
        kind=plural,
        where=where,
        what=f"{plural}{where} may not be listed",
        effect="releases of drakit may be missing in this answer",
        forbidden=True,
    )


def _sorted(pods: Iterable[PluginPod]) -> list[PluginPod]:
    return sorted(pods, key=lambda pod: (pod.node, pod.namespace, pod.name))


def _deployment(body: Object) -> Workload:
    desired = child(body, "spec").get("replicas")
    return _workload(
        body,
        "Deployment",
        desired=1 if desired is None else int(desired),
        ready=int(child(body, "status").get("readyReplicas") or 0),
    )


def _daemon_set(body: Object) -> Workload:
    status = child(body, "status")
    return _workload(
        body,
        "DaemonSet",
        desired=int(status.get("desiredNumberScheduled") or 0),
        ready=int(status.get("numberReady") or 0),
    )


def _workload(body: Object, kind: str, *, desired: int, ready: int) -> Workload:
    metadata = child(body, "metadata")
    labels = child(metadata, "labels")
    return Workload(
        kind=kind,
        namespace=text(metadata, "namespace"),
        name=text(metadata, "name"),
        release=text(labels, "app.kubernetes.io/instance"),
        component=text(labels, "app.kubernetes.io/component"),
        version=text(labels, "app.kubernetes.io/version"),
        desired=desired,
        ready=ready,
    )


def _pod(body: Object) -> PluginPod:
    metadata = child(body, "metadata")
    conditions = {each.get("type"): each for each in children(body, "status", "conditions")}
    return PluginPod(
        namespace=text(metadata, "namespace"),
        name=text(metadata, "name"),
        node=text(body, "spec", "nodeName"),
        ready=text(conditions.get("Ready", {}), "status") == "True",
    )
