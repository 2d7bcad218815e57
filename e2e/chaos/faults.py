"""
The faults of a chaos run, and the seeded order in which they happen.

A fault begins, lasts, and ends. Its end undoes its beginning: it starts, resumes, heals or cleans
the target. Two faults with a common target never happen at the same time.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from e2e.chaos import workload
from e2e.chaos.leaks import HOME
from e2e.cluster.api import CONTROL_PLANE, Cluster, ClusterError, Component, Options
from e2e.kit import plugin_pod

ItemT = TypeVar("ItemT")

KINDS = (
    "kill", "hang", "cut", "full-disk", "delete", "force-delete", "clock", "no-history", "reboot",
    "upgrade",
)  # fmt: skip

API, CONTROLLERS = "api", "controllers"
"""Targets besides the names of nodes."""

MAX_SECONDS: Mapping[str, float] = {"kill": 8, "hang": 15, "cut": 15, "full-disk": 10, "clock": 15}
"""The maximum duration of a fault, by kind. Other faults last as long as their action."""

MAX_CLOCK_STEP = 1800
"""In seconds, forward and back. Certificates of a new cluster are valid since an hour ago."""

OWN = ("drakit-nodeplugin", "drakit-operator")
"""Programs that the kubelet restarts."""

_OF_CONTROL_PLANE = {
    Component.ETCD: API,
    Component.API_SERVER: API,
    Component.CONTROLLER_MANAGER: CONTROLLERS,
    Component.SCHEDULER: CONTROLLERS,
}
_OF_NODE = (Component.KUBELET, Component.CONTAINERD, Component.KUBE_PROXY)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of the sequence."""

    kind: str
    target: str
    """A node, or the affected part of the control plane."""

    what: str
    """A program, the part that is cut off, or the size of a step. Empty if the kind is
    sufficient."""

    seconds: float
    """The duration of the fault."""

    pause: float
    """The time from its beginning to the beginning of the next fault."""

    number: int
    """The number of earlier faults of the same kind."""

    @property
    def targets(self) -> frozenset[str]:
        """The targets that no other fault may affect at the same time."""
        needs_api = self.kind in {"delete", "force-delete", "upgrade"} or self.what == "pod"
        needs_controllers = self.kind == "upgrade"
        return frozenset(
            {self.target}
            | ({API} if needs_api else set())
            | ({CONTROLLERS} if needs_controllers else set())
        )

    def __str__(self) -> str:
        lasting = f"for {self.seconds:.1f} s" if self.seconds else ""
        words = [self.kind, self.what, f"on {self.target}", lasting]
        return " ".join(word for word in words if word)


def sequence(seed: int, nodes: Sequence[str]) -> Iterator[Fault]:
    """
    Yield the endless sequence of a seed.

    Each kind, and each program of a kind, occurs once before any of them occurs again.
    """
    chance = random.Random(seed)
    kinds = _deck(chance, KINDS)
    programs = [
        *((component.value, target) for component, target in _OF_CONTROL_PLANE.items()),
        *((component.value, node) for component in _OF_NODE for node in nodes),
        *((program, node) for program in OWN for node in nodes),
    ]
    options: Mapping[str, Sequence[tuple[str, str]]] = {
        "kill": programs,
        "hang": programs,
        "cut": [(what, node) for what in ("node", "pod", "kubelet") for node in nodes],
        "no-history": [("", API)],
        "delete": [("", API)],
        "force-delete": [("", API)],
        "upgrade": [("", API)],
    }
    on_nodes = [("", node) for node in nodes]
    decks = {kind: _deck(chance, options.get(kind, on_nodes)) for kind in KINDS}
    counts = dict.fromkeys(KINDS, 0)
    while True:
        kind = next(kinds)
        what, target = next(decks[kind])
        if kind == "clock":
            what = f"{chance.randint(-MAX_CLOCK_STEP, MAX_CLOCK_STEP):+d}"
        yield Fault(
            kind=kind,
            target=target,
            what=what,
            seconds=chance.uniform(0.5, most) if (most := MAX_SECONDS.get(kind, 0)) else 0,
            pause=chance.uniform(0, 5),
            number=counts[kind],
        )
        counts[kind] += 1


def _deck(chance: random.Random, items: Sequence[ItemT]) -> Iterator[ItemT]:
    while True:
        yield from chance.sample(items, len(items))


class Injector:
    """Injects faults into a cluster."""

    def __init__(self, cluster: Cluster, *, build: str, seed: int) -> None:
        self._cluster, self._build, self._seed = cluster, build, seed

    def inflict(self, fault: Fault) -> None:
        """Begin a fault, wait, and end it. Raises ClusterError."""
        cluster, target = self._cluster, fault.target
        match fault.kind:
            case "kill":
                self._kill(fault)
            case "hang":
                self._signal(fault, signal.SIGSTOP)
                try:
                    time.sleep(fault.seconds)
                finally:
                    self._signal(fault, signal.SIGCONT)
            case "cut":
                self._cut(fault)
            case "full-disk":
                size = f"count={2 * workload.DISK_MIB}"
                fill = ["dd", "if=/dev/zero", f"of={HOME}/full", "bs=1M", size]
                if cluster.exec_on_node(target, fill, check=False).returncode == 0:
                    raise ClusterError(f"the disk of {target} is not small")
                time.sleep(fault.seconds)
                cluster.node_path(target, f"{HOME}/full").unlink()
            case "delete" | "force-delete":
                self._delete(fault)
            case "clock":
                workload.step_clock(cluster, target, seconds=int(fault.what))
                time.sleep(fault.seconds)
                workload.step_clock(cluster, target, seconds=0)
            case "no-history":
                cluster.stop_api_server()
                cluster.compact()
                cluster.start_component(CONTROL_PLANE, Component.API_SERVER)
            case "reboot":
                cluster.reboot_node(target)
            case _:
                # The pods are replaced during the faults that follow.
                number = fault.number + 1
                workload.upgrade(cluster, build=self._build, number=number, wait=False)

    def _kill(self, fault: Fault) -> None:
        self._signal(fault, signal.SIGKILL)
        if fault.what not in OWN:
            time.sleep(fault.seconds)
            self._cluster.start_component(_place(fault.target), Component(fault.what))

    def _signal(self, fault: Fault, number: signal.Signals) -> None:
        if fault.what not in OWN:
            self._cluster.kill(_place(fault.target), Component(fault.what), number)
            return
        argv = ["pkill", f"-{number.value}", "-f", "--", f"{fault.what} --config"]
        # A missing process is not an error, because the operator may run on the other node.
        self._cluster.exec_on_node(fault.target, argv, check=False)

    def _cut(self, fault: Fault) -> None:
        cluster, node = self._cluster, fault.target
        if fault.what == "node":
            cut, heal = partial(cluster.cut_node, node), partial(cluster.heal_node, node)
        elif fault.what == "kubelet":
            cut, heal = partial(cluster.cut_kubelet, node), partial(cluster.heal_kubelet, node)
        else:
            address = (plugin_pod(cluster, node) or {}).get("status", {}).get("podIP")
            if address is None:
                return
            cut, heal = (
                partial(each, node, address) for each in (cluster.cut_pod, cluster.heal_pod)
            )
        cut()
        try:
            time.sleep(fault.seconds)
        finally:
            heal()

    def _delete(self, fault: Fault) -> None:
        """Delete up to five pods, which the Deployments replace."""
        options = ["--force", "--grace-period=0"] if fault.kind == "force-delete" else []
        pods = self._cluster.get("pods", "-n", workload.SPACE)["items"]
        names = sorted(pod["metadata"]["name"] for pod in pods)
        chance = random.Random(f"{self._seed} {fault.kind} {fault.number}")
        if chosen := chance.sample(names, min(len(names), chance.randint(1, 5))):
            delete = ("-n", workload.SPACE, "delete", "pod", *chosen, "--wait=false", *options)
            self._cluster.kubectl(*delete, "--ignore-not-found")

    def recover(self) -> None:
        """Undo the faults that failed halfway. Raises ClusterError."""
        cluster = self._cluster
        # This resumes, starts and heals the cluster's components.
        cluster.start(Options(nodes=len(cluster.nodes)))
        for node in cluster.nodes:
            for program in OWN:
                argv = ["pkill", "-CONT", "-f", "--", f"{program} --config"]
                cluster.exec_on_node(node, argv, check=False)
            cluster.node_path(node, f"{HOME}/full").unlink(missing_ok=True)
            workload.step_clock(cluster, node, seconds=0)
        workload.upgrade(cluster, build=self._build, number=0)


def _place(target: str) -> str:
    """Return the location of a component: a node, or the control plane."""
    return CONTROL_PLANE if target in {API, CONTROLLERS} else target
