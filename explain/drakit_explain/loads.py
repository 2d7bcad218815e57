"""
Sums up the requests of each node's pods, and computes the resources that are left for one more pod.

The requests of a pod are added up according to the scheduler's rules (KEP-753, KEP-2837). Only
native resources are included: cpu, memory, ephemeral-storage, hugepages and the number of pods.
Extended resources are not, because a DeviceClass may provide one that nodes do not list.

For each pod, only its node, its priority and one sum are stored, because a cluster has thousands of
pods.

Does not depend on clients or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from sys import intern
from typing import NamedTuple

from drakit.quantity import quantity_units
from drakit_explain.model import NodeFacts
from drakit_formats.resource.objects import Object, child, children, text

Requests = tuple[tuple[str, int], ...]
"""The requested amounts in billionths, as pairs of resource and amount."""

MAX_RESOURCES = 32
"""Maximum number of a pod's native resources. A node has only a few huge page sizes, but anyone can
create a pod with thousands, on a node that does not exist."""

_ONE = 10**9
_PER_POD = ("cpu", "memory", "hugepages-")
"""Resources for which the pod as a whole can have a request (API: ``spec.resources``)."""


class Load(NamedTuple):
    """The requests of one pod on a node."""

    uid: str
    node: str
    priority: int
    requests: Requests


def load_of_pod(body: Object) -> Load:
    """Project a Pod that has a node. A pod with too many resources cannot run, so it is treated as
    not using any."""
    spec = child(body, "spec")
    requests = requests_of_pod(spec)
    return Load(
        uid=child(body, "metadata")["uid"],
        node=intern(text(spec, "nodeName")),
        priority=int(spec.get("priority") or 0),
        requests=requests if len(requests) <= MAX_RESOURCES else (),
    )


def requests_of_pod(spec: Object) -> Requests:
    """
    Return the requests of a pod.

    During a resize, a pod may hold more than it requests. The node then has less left than is
    computed here, so a reported shortage is still correct.
    """
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in children(spec, "initContainers"):
        amounts = _requests(container)
        if container.get("restartPolicy") == "Always":
            _add(sidecars, amounts)
            amounts = {}
        # An init container runs alongside the sidecars that were started before it.
        during = dict(sidecars)
        _add(during, amounts)
        peak = {name: max(peak.get(name, 0), during.get(name, 0)) for name in peak | during}
    total = dict(sidecars)
    for container in children(spec, "containers"):
        _add(total, _requests(container))
    total = {name: max(total.get(name, 0), peak.get(name, 0)) for name in total | peak}
    of_pod = _requests(spec)
    total |= {name: of_pod[name] for name in of_pod if name.startswith(_PER_POD)}
    _add(total, _native(child(spec, "overhead")))
    requests = (("pods", _ONE), *sorted(total.items()))
    return _shared(requests) if len(requests) <= MAX_RESOURCES else requests


class _Free(NamedTuple):
    """The free resources of a node, keyed by pod priority."""

    node: NodeFacts
    by_priority: dict[int, Mapping[str, int]]


class Loads:
    """The sums of the pods' requests for each node. Not thread-safe."""

    def __init__(
        self,
        is_current: Callable[[], bool] = lambda: True,
        *,
        nodes: Collection[str] | None = None,
    ) -> None:
        """
        Create the sums without any pods.

        :param is_current: returns whether the loads are reliable now.
        :param nodes: the nodes whose pods are known. None means all nodes.
        """
        self._is_current = is_current
        self._nodes = nodes
        self._pods: dict[str, Load] = {}
        self._used: dict[str, dict[int, dict[str, int]]] = {}
        self._free: dict[str, _Free] = {}
        self._revision = 0

    @property
    def revision(self) -> int | None:
        """A number that increases with each change. None while the loads are unknown."""
        return self._revision if self._is_current() else None

    def knows(self, node: str) -> bool:
        """Return whether the pods of a node are known."""
        return self._nodes is None or node in self._nodes

    def apply(self, load: Load) -> None:
        """Add or update a pod."""
        old = self._pods.get(load.uid)
        if old == load:
            return
        if old is not None:
            self._count(old, -1)
        self._pods[load.uid] = load
        self._count(load, 1)

    def remove(self, uid: str) -> None:
        """Remove a pod that has ended."""
        old = self._pods.pop(uid, None)
        if old is not None:
            self._count(old, -1)

    def replace(self, loads: Iterable[Load]) -> Iterator[None]:
        """Process a complete list. Yield after each pod. Until the iteration ends, the old sums
        remain in effect."""
        new = Loads()
        for load in loads:
            new.apply(load)
            yield
        self._pods, self._used = new._pods, new._used
        self._free.clear()
        self._revision += 1

    def free(self, node: NodeFacts, *, priority: int) -> Mapping[str, int]:
        """
        Return the free resources of a node for a pod with a priority, in billionths.

        Pods with a lower priority are ignored, because the scheduler can preempt them. The result
        is cached until a pod on the node changes, because each explanation needs it for all nodes.
        """
        known = self._free.get(node.name)
        if known is None or known.node is not node:
            known = self._free[node.name] = _Free(node, {})
        if priority not in known.by_priority:
            known.by_priority[priority] = self._left(node, priority)
        return known.by_priority[priority]

    def _left(self, node: NodeFacts, priority: int) -> dict[str, int]:
        free = {each.name: quantity_units(each.quantity) for each in node.allocatable}
        for of, used in self._used.get(node.name, {}).items():
            if of >= priority:
                for name, amount in used.items():
                    if name in free:
                        free[name] -= amount
        return free

    def _count(self, load: Load, sign: int) -> None:
        self._revision += 1
        self._free.pop(load.node, None)
        by_priority = self._used.setdefault(load.node, {})
        used = by_priority.setdefault(load.priority, {})
        for name, amount in load.requests:
            used[name] = used.get(name, 0) + sign * amount
        if not any(used.values()):
            del by_priority[load.priority]
            if not by_priority:
                del self._used[load.node]


def _requests(body: Object) -> dict[str, int]:
    return _native(child(body, "resources", "requests"))


def _native(amounts: Object) -> dict[str, int]:
    return {
        intern(str(name)): quantity_units(str(amount))
        for name, amount in amounts.items()
        if "/" not in name
    }


def _add(total: dict[str, int], amounts: Mapping[str, int]) -> None:
    for name, amount in amounts.items():
        total[name] = total.get(name, 0) + amount


@lru_cache(maxsize=4096)
def _shared(requests: Requests) -> Requests:
    """Return the cached requests that equal these, so that the pods of a Deployment share one
    object."""
    return requests
