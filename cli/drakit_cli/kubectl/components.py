"""
Reads the feature gates of kubelets, schedulers and controller managers.

A kubelet exports its gates as metrics, which the API server proxies for users who are allowed to
`get` `nodes/proxy`. The metrics of the other components have their own authentication. If these
components are pods, their gates are read from the pods' flags. Otherwise, the gates are not
checked.

Does not depend on findings.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from drakit.text import plural
from drakit_daemon.kube import ApiError, ForbiddenError, Session, resource_path
from drakit_explain.cel.gates import GatesUnknownError, read_all_gates
from drakit_formats.resource.objects import Object, children, text

SCHEDULER = "kube-scheduler"
CONTROLLERS = "kube-controller-manager"
KUBELET = "kubelet"

MAX_KUBELETS = 50
"""Maximum number of kubelets to check. The kubelets of a cluster normally have the same flags."""

_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """A feature gate related to device allocation (`docs/reference/feature-gates.md`)."""

    since: int | None
    """The first minor version (1.x) that enables the gate by default, or None."""

    components: Sequence[str] = (SCHEDULER, CONTROLLERS)
    """The components that need the gate, apart from the API server."""


GATES: Mapping[str, Gate] = {
    "DynamicResourceAllocation": Gate(since=34, components=(SCHEDULER, CONTROLLERS, KUBELET)),
    "DRAPrioritizedList": Gate(since=34),
    "DRAAdminAccess": Gate(since=34),
    "DRADeviceTaints": Gate(since=36),
    "DRADeviceTaintRules": Gate(since=37),
    "DRAPartitionableDevices": Gate(since=36, components=(SCHEDULER,)),
    "DRAConsumableCapacity": Gate(since=36, components=(SCHEDULER,)),
    "DRAListTypeAttributes": Gate(since=None, components=(SCHEDULER,)),
    "DRADeviceBindingConditions": Gate(since=36, components=(SCHEDULER,)),
    "DRAResourceClaimDeviceStatus": Gate(since=34, components=(SCHEDULER,)),
    "DRAResourceClaimGranularStatusAuthorization": Gate(since=36, components=()),
    "DRANodeAllocatableResources": Gate(since=None, components=(SCHEDULER, KUBELET)),
    "DRAFractionalCapacityRange": Gate(since=None, components=(SCHEDULER,)),
    "DRADeviceCompatibilityGroups": Gate(since=None, components=(SCHEDULER,)),
    "DRAPartitionableDevicesType": Gate(since=None, components=(CONTROLLERS,)),
    "DRAExtendedResource": Gate(since=36, components=(SCHEDULER, KUBELET, CONTROLLERS)),
    "ResourceHealthStatus": Gate(since=36, components=(KUBELET,)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """A Kubernetes component, with its known feature gates."""

    kind: str
    name: str
    """The name of the node for a kubelet, or of the pod for any other component."""

    gates: Mapping[str, bool] = field(default_factory=dict[str, bool])


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """The components whose gates were read, and messages about the other components."""

    checked: tuple[Component, ...] = ()
    unchecked: tuple[str, ...] = ()

    def without(self, gate: str, kind: str) -> list[str]:
        """Return the names of the components of the given kind that have a gate disabled."""
        return [
            each.name
            for each in self.checked
            if each.kind == kind and each.gates.get(gate) is False
        ]


def is_default(gate: str, minor: int | None) -> bool | None:
    """Return whether a minor version enables a gate by default, or None if the version is
    unknown."""
    since = GATES[gate].since
    return None if minor is None else since is not None and minor >= since


async def find_components(session: Session, nodes: Collection[str]) -> Components:
    """Read the gates of nodes' kubelets, and the flags of the control plane's pods."""
    (kubelets, silent), (pods, hidden) = await asyncio.gather(
        _kubelets(session, sorted(nodes)), _control_plane(session)
    )
    return Components(checked=(*kubelets, *pods), unchecked=(*silent, *hidden))


# ---------------------------------------------------------------- kubelets


async def _kubelets(session: Session, nodes: Sequence[str]) -> tuple[list[Component], list[str]]:
    limit = asyncio.Semaphore(_AT_ONCE)

    async def ask(node: str) -> Component | Exception:
        path = f"{resource_path('v1', 'nodes', name=node)}/proxy/metrics"
        try:
            async with limit:
                gates = await read_all_gates(session, path)
        except (ApiError, GatesUnknownError) as error:
            return error
        return Component(kind=KUBELET, name=node, gates=gates)

    asked = nodes[:MAX_KUBELETS]
    answers = await asyncio.gather(*map(ask, asked))
    found = [each for each in answers if isinstance(each, Component)]
    errors = {
        node: each for node, each in zip(asked, answers, strict=True) if isinstance(each, Exception)
    }
    silent: list[str] = []
    if any(isinstance(each, ForbiddenError) for each in errors.values()):
        silent.append("kubelets: you are not allowed to get nodes/proxy")
    elif errors:
        node, error = next(iter(errors.items()))
        silent.append(
            f"{plural(len(errors), 'kubelet')}: for example, that of node {node}: {error}"
        )
    if len(nodes) > len(asked):
        silent.append(
            f"{plural(len(nodes) - len(asked), 'more kubelet')}: {len(asked)} are checked"
        )
    return found, silent


# ---------------------------------------------------------------- the control plane

_FLAG = re.compile(r"--feature-gates[= ](\S+)")
_TAG = re.compile(r":v1\.(\d+)\.")


async def _control_plane(session: Session) -> tuple[list[Component], list[str]]:
    path = resource_path("v1", "pods", namespace="kube-system")
    try:
        labels = {"labelSelector": "tier=control-plane"}
        found = (await session.read_list(path, _component, params=labels)).items
    except ApiError as error:
        denied = isinstance(error, ForbiddenError)
        why = "you are not allowed to list pods in namespace kube-system" if denied else str(error)
        return [], [f"{SCHEDULER} and {CONTROLLERS}: {why}"]
    pods = [each for each in found if each is not None]
    missing = [kind for kind in (SCHEDULER, CONTROLLERS) if kind not in {one.kind for one in pods}]
    why = "not a pod in namespace kube-system with the label tier=control-plane"
    return pods, [f"{kind}: {why}" for kind in missing]


def _component(body: Object) -> Component | None:
    """Return the gates from a pod's flags, and the defaults of its image's version."""
    kind = text(body, "metadata", "labels", "component")
    if kind not in (SCHEDULER, CONTROLLERS):
        return None
    for container in children(body, "spec", "containers"):
        words = [*container.get("command", ()), *container.get("args", ())]
        if text(container, "name") == kind:
            tag = _TAG.search(text(container, "image"))
            minor = int(tag[1]) if tag else None
            gates = dict(_gates(" ".join(map(str, words)), minor))
            return Component(kind=kind, name=text(body, "metadata", "name"), gates=gates)
    return None


def _gates(line: str, minor: int | None) -> Iterator[tuple[str, bool]]:
    given: dict[str, str] = {}
    for flag in _FLAG.findall(line):
        given |= dict(part.partition("=")[::2] for part in flag.split(","))
    for name in GATES:
        if name in given:
            yield name, given[name].lower() == "true"
        elif not given.keys() & {"AllAlpha", "AllBeta"}:
            default = is_default(name, minor)
            if default is not None:
                yield name, default
