"""
``drakit setup remove``: prepares to uninstall a release. The chart runs it in a hook before Helm
deletes the release.

1. The command fails while pods use devices of the release's drivers, or claims are still prepared,
   because only a running node plugin can unprepare claims. An annotation on the DaemonSet overrides
   this.
2. It deletes the release's policies.
3. It stops the node plugins, waits for every node, and deletes the objects that they published. If
   some nodes do not respond, it prints their names and continues.

Only nodes with a node plugin of the release are affected, because another release can run the same
driver on other nodes. Does not depend on the files of a node, which remain for a later
installation.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from drakit.text import plural
from drakit_cli.answers import CommandError
from drakit_cli.connection import fetch_checked
from drakit_cli.setup import Owner, apply_policies
from drakit_daemon.kube import ApiError, NotFoundError, Session, resource_path
from drakit_formats.crds import API_VERSION, MAINTENANCES, REPORTS
from drakit_formats.resource.nodes import node_of_pool
from drakit_formats.resource.objects import GROUP, VERSIONS, Object, child, children

Kept = TypeVar("Kept")

FORCE_ANNOTATION = "drakit.dev/force-uninstall"
"""If the DaemonSet has this annotation with the value "true", the release can be uninstalled even
if claims are prepared."""

RELEASED_SECONDS = 45.0
"""How long to wait, after pods no longer use claims, until the reports no longer list prepared
claims. Node plugins write a changed report within 10 s."""

STOP_SECONDS = 30.0
"""Maximum time from the end of its grace period until a node plugin's pod ends, if its kubelet is
running."""

MAX_STOP_SECONDS = 150.0
"""How long to wait for node plugins at most. The Job's deadline is 300 s."""

POLL_SECONDS = 2.0
"""How long to wait between two lists of all pods or reports, because a large cluster has
thousands."""

MAX_LISTED = 50
"""Maximum number of pods or nodes to list in a message. The others are only counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """The objects that the command removes from a release."""

    owner: Owner
    daemonset: str
    drivers: Collection[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlugin:
    """A pod of the node plugin's DaemonSet."""

    node: str
    ready: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The fields of a NodeDeviceReport that the command reads."""

    name: str
    node: str
    driver: str
    held: int
    """The number of claims in the driver's checkpoint."""


def remove(options: argparse.Namespace) -> int:
    """Prepare to uninstall a release. Return 1 if Helm must not proceed."""
    removal = Removal(
        owner=Owner.parse(options.release),
        daemonset=options.daemonset,
        drivers=frozenset(options.driver or ()),
    )
    if options.unnamed_drivers:
        print(
            "nodeplugin.drivers has entries without a name: pods that use the devices of these "
            "drivers are not checked, and the kubelet deletes their ResourceSlices after 30 s"
        )
    return fetch_checked(options, lambda session: remove_release(session, removal))


async def remove_release(session: Session, removal: Removal) -> int:
    """Prepare to uninstall a release. Return 1 if Helm must not proceed. Raises ApiError."""
    path = resource_path(
        "apps/v1", "daemonsets", namespace=removal.owner.namespace, name=removal.daemonset
    )
    daemonset: Object | None = None
    with suppress(NotFoundError):
        daemonset = await session.get(path)
    if daemonset is None:
        print(
            f"daemonset {removal.daemonset}: does not exist, so its node plugins cannot be queried"
        )
    elif problems := await _problems(session, removal, daemonset):
        forced = child(daemonset["metadata"], "annotations").get(FORCE_ANNOTATION) == "true"
        _print_problems(removal, problems, forced=forced)
        if not forced:
            return 1
    await apply_policies(session, removal.owner, {})
    await name_maintenances(session)
    if daemonset is not None:
        await _stop_node_plugins(session, removal, daemonset, path=path)
    return 0


# ------------------------------------------------------------ devices in use


async def _problems(session: Session, removal: Removal, daemonset: Object) -> Sequence[str]:
    """Return a message for each pod that uses a device. If there are none, return a message for
    each node with prepared claims."""
    plugins = await _node_plugins(session, removal, daemonset)
    if used := await _uses(session, removal, {each.node for each in plugins}):
        return used
    answering = {each.node for each in plugins if each.ready}
    held: Sequence[str] = ()

    async def released() -> bool:
        nonlocal held
        held = await _held(session, removal, answering)
        return not held

    await _until(released, seconds=RELEASED_SECONDS)
    return held


async def _uses(session: Session, removal: Removal, nodes: Collection[str]) -> list[str]:
    _, listed = await _list_resources(
        session, "resourceclaims", lambda claim: _uses_of(claim, removal.drivers, nodes)
    )
    return sorted(use for uses in listed for use in uses)


async def _list_resources(
    session: Session, plural: str, keep: Callable[[Object], Kept]
) -> tuple[str, Sequence[Kept]]:
    """Return the newest API version that the cluster serves, and the fields that the command reads
    from each object."""
    for version in VERSIONS:
        with suppress(NotFoundError):
            api_version = f"{GROUP}/{version}"
            listed = await session.read_list(resource_path(api_version, plural), keep)
            return api_version, listed.items
    raise CommandError(f"the cluster serves no {plural}.{GROUP}")


def _uses_of(claim: Object, drivers: Collection[str], nodes: Collection[str]) -> list[str]:
    status = child(claim, "status")
    results = children(status, "allocation", "devices", "results")
    names = sorted(
        {
            each["driver"]
            for each in results
            if each["driver"] in drivers and node_of_pool(each["pool"]) in nodes
        }
    )
    if not names:
        return []
    namespace, name = claim["metadata"]["namespace"], claim["metadata"]["name"]
    return [
        f"{'pod' if user['resource'] == 'pods' else user['resource']} {namespace}/{user['name']}: "
        f"uses claim {name} of {', '.join(names)}"
        for user in children(status, "reservedFor")
    ]


async def _held(session: Session, removal: Removal, nodes: Collection[str]) -> list[str]:
    return [
        f"node {report.node} has {plural(report.held, 'prepared claim')} of {report.driver} "
        "without a pod; run 'drakit node checkpoint show' in its node plugin"
        for report in await _reports(session, removal, nodes)
        if report.held
    ]


async def _reports(session: Session, removal: Removal, nodes: Collection[str]) -> Sequence[Report]:
    try:
        listed = await session.read_list(resource_path(API_VERSION, REPORTS), _report)
    except NotFoundError:  # the CustomResourceDefinitions are not installed
        return []
    return [each for each in listed.items if each.driver in removal.drivers and each.node in nodes]


def _report(body: Object) -> Report:
    claims = child(body, "status", "claims")
    return Report(
        name=body["metadata"]["name"],
        node=body["spec"]["nodeName"],
        driver=body["spec"]["driver"],
        held=sum(claims.get(state, 0) for state in ("prepared", "preparing", "unpreparing")),
    )


def _print_problems(removal: Removal, problems: Sequence[str], *, forced: bool) -> None:
    state = "is uninstalled although" if forced else "is not uninstalled, because"
    print(f"release {removal.owner} {state} its devices are in use:")
    _print_first(problems)
    if forced:
        print("Pods stay in Terminating when you delete them, until drakit is installed again")
        return
    print(
        "Run 'helm uninstall' again when nothing uses them. To uninstall anyway: kubectl -n "
        f"{removal.owner.namespace} annotate daemonset {removal.daemonset} {FORCE_ANNOTATION}=true"
    )


def _print_first(lines: Sequence[str]) -> None:
    print("\n".join(lines[:MAX_LISTED]))
    if (more := len(lines) - MAX_LISTED) > 0:
        print(f"... and {more} more")


# ------------------------------------------------------------ nodes


async def _stop_node_plugins(
    session: Session, removal: Removal, daemonset: Object, *, path: str
) -> None:
    """Stop all node plugins while they still have their permissions, and delete what they
    published."""
    nodes = {each.node for each in await _node_plugins(session, removal, daemonset)}
    with suppress(NotFoundError):
        await session.delete(path, uid=daemonset["metadata"]["uid"])
    silent: set[str] = set()

    async def stopped() -> bool:
        nonlocal silent
        silent = {each.node for each in await _node_plugins(session, removal, daemonset)}
        return not silent

    grace = daemonset["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", 30)
    seconds = min(grace + STOP_SECONDS, MAX_STOP_SECONDS)
    await _until(stopped, seconds=seconds)
    gone = nodes - silent
    api, slices = await _list_resources(
        session, "resourceslices", lambda body: _name_of_slice(body, removal.drivers, gone)
    )
    places = [
        *((api, "resourceslices", name) for name in slices if name),
        *((API_VERSION, REPORTS, report.name) for report in await _reports(session, removal, gone)),
    ]
    for api_version, resource, name in places:
        with suppress(NotFoundError):
            await session.delete(resource_path(api_version, resource, name=name))
    print(f"node plugins: stopped on {_count(gone)}")
    if silent:
        print(
            f"These nodes did not respond within {seconds:g} s, and keep files and ResourceSlices:"
        )
        _print_first([f"node {node}" for node in sorted(silent)])


def _name_of_slice(body: Object, drivers: Collection[str], nodes: Collection[str]) -> str:
    spec = body["spec"]
    ours = spec["driver"] in drivers and spec.get("nodeName") in nodes
    return body["metadata"]["name"] if ours else ""


def _count(nodes: Collection[str]) -> str:
    return "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"


async def _node_plugins(session: Session, removal: Removal, daemonset: Object) -> list[NodePlugin]:
    """List the DaemonSet's pods that have a node."""
    labels: Mapping[str, str] = daemonset["spec"]["selector"]["matchLabels"]
    listed = await session.read_list(
        resource_path("v1", "pods", namespace=removal.owner.namespace),
        lambda body: NodePlugin(node=body["spec"].get("nodeName", ""), ready=_ready(body)),
        params={"labelSelector": ",".join(f"{key}={value}" for key, value in labels.items())},
    )
    return [each for each in listed.items if each.node]


def _ready(body: Object) -> bool:
    conditions = children(body, "status", "conditions")
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


async def _until(condition: Callable[[], Awaitable[bool]], *, seconds: float) -> None:
    """Wait until a condition is met, or until the timeout."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not await condition():
        if asyncio.get_running_loop().time() >= deadline:
            return
        await asyncio.sleep(POLL_SECONDS)


async def name_maintenances(session: Session) -> None:
    """Print the names of the DeviceMaintenances whose devices will stay out of service after the
    release is gone."""
    with suppress(ApiError):  # An error here must not prevent the uninstallation.
        listed = await session.list(resource_path(API_VERSION, MAINTENANCES))
        for body in listed.items:
            if child(body, "status").get("phase") != "Ended":
                name = body["metadata"]["name"]
                print(f"devicemaintenance {name}: its devices stay out of service")
