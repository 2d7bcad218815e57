"""
The interface of clusters for tests, the same for all providers.

Tests use only :class:`Cluster`. `capabilities` lists what a provider can do; for anything else, it
raises :class:`UnsupportedError`.
"""

import json
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from .gates import gates_of_tests, runtime_config_of_tests

ResultT = TypeVar("ResultT")


class ClusterError(Exception):
    """A part of the cluster failed. The message is a sentence for the user of make."""


class UnsupportedError(ClusterError):
    """This provider does not support that."""

    def __init__(self, provider: str, action: str) -> None:
        super().__init__(f"the provider {provider} cannot {action}; CLUSTER=local can")


class CommandError(ClusterError):
    """A program ended with an error."""

    def __init__(self, argv: Sequence[str], *, code: int, output: str) -> None:
        super().__init__(
            f"{' '.join(argv)} ended with code {code}: {output.strip() or 'no output'}"
        )
        self.code, self.output = code, output


class Capability(StrEnum):
    """Capabilities that not every provider has."""

    CONTROL_PLANE_ALONE = "control-plane-alone"
    AUDIT = "audit"
    COMPACTION = "compaction"
    CUT = "cut"
    DISK = "disk"
    FREEZE = "freeze"
    REBOOT = "reboot"
    STOP_API_SERVER = "stop-api-server"
    UPGRADE = "upgrade"


class Component(StrEnum):
    """The programs of a cluster that can be killed and frozen."""

    ETCD = "etcd"
    API_SERVER = "kube-apiserver"
    CONTROLLER_MANAGER = "kube-controller-manager"
    SCHEDULER = "kube-scheduler"
    CONTAINERD = "containerd"
    KUBELET = "kubelet"
    KUBE_PROXY = "kube-proxy"


CONTROL_PLANE = "control-plane"
"""Replaces a node's name for components that do not run on a node."""

SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for starting a cluster."""

    nodes: int = 1
    """Number of nodes. With 0, there is only the control plane."""

    gates: Mapping[str, bool] | None = None
    """Feature gates for every component. By default, those in :mod:`.gates` for the release."""

    runtime_config: Mapping[str, bool] | None = None
    """API versions that the API server serves in addition to its defaults, or does not serve. Nodes
    need ``resource.k8s.io/v1``; without it, there is only the control plane. By default, those in
    :mod:`.gates` for the release."""

    kubelet: str | None = None
    """The minor release of the nodes' kubelets, such as 1.36, if it differs from the cluster's."""

    kept: bool = False
    """Whether the cluster outlives the process that started it. If not, and if that process has
    died, the next start removes the cluster."""

    images: Sequence[Path] = ()
    """docker-archive tars that every node gets before its kubelet starts."""

    def gates_for(self, minor: str) -> dict[str, bool]:
        """Return the feature gates of a cluster of a minor release, such as 1.36."""
        return gates_of_tests(minor) if self.gates is None else dict(self.gates)

    def runtime_config_for(self, minor: str) -> dict[str, bool]:
        """Return the API versions that are served in addition to the defaults of a minor
        release."""
        if self.runtime_config is None:
            return runtime_config_of_tests(minor)
        return dict(self.runtime_config)


class Cluster(ABC):
    """A cluster that is running or can be started. Nodes are identified by their names in
    Kubernetes."""

    provider: str
    capabilities: frozenset[Capability]

    def __init__(self, name: str) -> None:
        self.name = name

    # -- life cycle

    @abstractmethod
    def is_up(self) -> bool:
        """Whether the cluster runs as recorded, without missing parts."""

    @abstractmethod
    def prepare(self) -> None:
        """Build the missing prerequisites of `start`. On a new machine, this takes minutes, which
        are not part of any test's time limit."""

    @abstractmethod
    def start(self, options: Options) -> None:
        """Start the cluster and wait until its nodes are ready. If it is already up, start missing
        nodes."""

    @abstractmethod
    def stop(self) -> None:
        """Stop and remove the cluster. Does nothing if there is none."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Return a sentence for each leftover of a stopped cluster on this machine."""

    # -- use

    @property
    @abstractmethod
    def minor(self) -> str:
        """The minor release of Kubernetes that runs, such as 1.36, or otherwise the next one to
        start."""

    @property
    @abstractmethod
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""

    @property
    @abstractmethod
    def nodes(self) -> list[str]:
        """The names of the nodes, in order."""

    @property
    @abstractmethod
    def gates(self) -> Mapping[str, bool]:
        """The feature gates that the cluster was started with."""

    @property
    @abstractmethod
    def logs(self) -> Path:
        """The folder of the components' logs."""

    @abstractmethod
    def program(self, name: str) -> str:
        """The path of `kubectl` or `helm`."""

    @abstractmethod
    def load_image(self, archive: Path) -> None:
        """Load the images of a docker-archive tar on every node."""

    def run(
        self,
        argv: Sequence[str],
        *,
        input: str | None = None,
        timeout_seconds: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this machine against the cluster (KUBECONFIG is set)."""
        return run(
            argv,
            input=input,
            timeout_seconds=timeout_seconds,
            check=check,
            env={"KUBECONFIG": str(self.kubeconfig)},
        )

    def kubectl(
        self, *args: str, input: str | None = None, timeout: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl. A failure raises :class:`CommandError` unless `check` is false."""
        argv = [self.program("kubectl"), *args]
        return self.run(argv, input=input, timeout_seconds=timeout, check=check)

    def helm(self, *args: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        """Run helm. A failure raises :class:`CommandError`."""
        return self.run([self.program("helm"), *args], timeout_seconds=timeout)

    def get(self, *args: str) -> dict[str, Any]:
        """Return the parsed output of `kubectl get ARGS`."""
        parsed: dict[str, Any] = json.loads(self.kubectl("get", *args, "-o", "json").stdout)
        return parsed

    def apply(self, manifest: str) -> None:
        """Run `kubectl apply` on YAML or JSON."""
        self.kubectl("apply", "-f", "-", input=manifest)

    def audit(self) -> list[dict[str, Any]]:
        """Return the API server's audit records so far: DRA's resources, and all writes."""
        raise UnsupportedError(self.provider, "show audit records")

    # -- faults

    @abstractmethod
    def exec_on_node(
        self, node: str, argv: Sequence[str], *, timeout: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a node, outside every container."""

    def node_path(self, node: str, path: str) -> Path:
        """Return the path at which this machine sees a file or folder of the node."""
        raise UnsupportedError(self.provider, "look into a node's file system from outside")

    @abstractmethod
    def kill(self, node: str, component: Component, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to a component of a node (or of CONTROL_PLANE)."""

    @abstractmethod
    def start_component(self, node: str, component: Component) -> None:
        """Start a component that was killed. Does nothing if it restarts automatically."""

    def freeze(self, node: str, component: Component) -> None:
        """Freeze a component. Its sockets remain open, but it does not respond."""
        self.kill(node, component, signal.SIGSTOP)

    def thaw(self, node: str, component: Component) -> None:
        """Resume a frozen component."""
        self.kill(node, component, signal.SIGCONT)

    @abstractmethod
    def stop_kubelet(self, node: str) -> None:
        """Stop the kubelet of a node, like its service manager does. Containers continue."""

    @abstractmethod
    def start_kubelet(self, node: str) -> None:
        """Start the kubelet again, and wait until it responds to its health check."""

    def restart_kubelet(self, node: str) -> None:
        """Restart the kubelet, and wait until it responds to its health check."""
        self.stop_kubelet(node)
        self.start_kubelet(node)

    def stop_api_server(self) -> None:
        """Stop the API server. etcd keeps all objects."""
        raise UnsupportedError(self.provider, "stop the API server")

    def start_api_server(
        self,
        *,
        gates: Mapping[str, bool] | None = None,
        runtime_config: Mapping[str, bool] | None = None,
    ) -> None:
        """
        Start the API server again, and wait until it is ready.

        :param gates: its feature gates from now on, as after an upgrade; other components keep
            theirs until they restart.
        :param runtime_config: the API versions that it serves from now on, as in :class:`Options`.
        """
        raise UnsupportedError(self.provider, "start the API server")

    def cut_node(self, node: str) -> None:
        """Drop all packets between a node (including its pods) and the API server."""
        raise UnsupportedError(self.provider, "cut a node from the API server")

    def heal_node(self, node: str) -> None:
        """Undo :meth:`cut_node`."""
        raise UnsupportedError(self.provider, "cut a node from the API server")

    def cut_pod(self, node: str, pod_ip: str) -> None:
        """Drop all packets between one pod and the API server. The kubelet and other pods are not
        affected."""
        raise UnsupportedError(self.provider, "cut a pod from the API server")

    def heal_pod(self, node: str, pod_ip: str) -> None:
        """Undo :meth:`cut_pod`."""
        raise UnsupportedError(self.provider, "cut a pod from the API server")

    def cut_kubelet(self, node: str) -> None:
        """Drop all packets between the API server and the node's own processes: the kubelet and
        kube-proxy. Pods on the pod network still reach the API server."""
        raise UnsupportedError(self.provider, "cut a kubelet from the API server")

    def heal_kubelet(self, node: str) -> None:
        """Undo :meth:`cut_kubelet`."""
        raise UnsupportedError(self.provider, "cut a kubelet from the API server")

    def power_off(self, node: str) -> AbstractContextManager[None]:
        """End everything on a node at once, as in a power failure. At the end of the block, start
        the node again with an empty /run and a different boot ID, and wait until its kubelet
        responds."""
        raise UnsupportedError(self.provider, "power off a node")

    def reboot_node(self, node: str) -> None:
        """Power off a node, and start it again immediately."""
        with self.power_off(node):
            pass

    def upgrade_control_plane(self, minor: str) -> None:
        """Replace the control plane with that of another minor release, such as 1.37. Nodes are not
        changed."""
        raise UnsupportedError(self.provider, "upgrade the control plane")

    def upgrade_node(self, node: str) -> None:
        """Replace the kubelet of a node with that of the control plane's release. Its pods
        continue."""
        raise UnsupportedError(self.provider, "upgrade a node")

    def give_disk(self, node: str, path: str, *, mib: int) -> None:
        """Put a folder of a node on a file system of this size, now and after each reboot. The
        previous content of the folder is hidden."""
        raise UnsupportedError(self.provider, "give a node a disk")

    def compact(self) -> None:
        """Delete the history of all objects, so that an earlier watch must list again."""
        raise UnsupportedError(self.provider, "forget the history of objects")

    def boot_id_file(self) -> str:
        """The file on a node that contains its boot ID."""
        return "/proc/sys/kernel/random/boot_id"

    def wait_for_nodes(self, *, timeout_seconds: float = 90) -> None:
        """Wait until every node is Ready."""
        expected = set(self.nodes)
        wait_until(
            f"the nodes {', '.join(sorted(expected))} are Ready",
            lambda: expected <= set(self._ready_nodes()),
            timeout_seconds=timeout_seconds,
        )

    def _ready_nodes(self) -> list[str]:
        found = self.kubectl("get", "nodes", "-o", "json", check=False)
        if found.returncode != 0:
            return []
        return [
            node["metadata"]["name"]
            for node in json.loads(found.stdout)["items"]
            for condition in node["status"].get("conditions", ())
            if condition["type"] == "Ready" and condition["status"] == "True"
        ]


def wait_until(
    what: str,
    condition: Callable[[], ResultT],
    *,
    timeout_seconds: float,
    interval_seconds: float = 0.2,
) -> ResultT:
    """Wait until a condition returns a true value, and return it. `what` describes the condition in
    the error."""
    deadline = time.monotonic() + timeout_seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout_seconds:g} s, but not: {what} (last: {result!r})")
        time.sleep(interval_seconds)
    return result


def run(
    argv: Sequence[str],
    *,
    input: str | None = None,
    timeout_seconds: float = 60,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with its output as a string. `env` is added to our environment."""
    try:
        done = subprocess.run(
            argv,
            input=input,
            stdin=None if input is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            # After `su` without `-`, root's PATH does not contain /usr/sbin.
            env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SBIN}", **(env or {})},
            cwd=cwd,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(argv)} did not end within {timeout_seconds:g} s") from error
    except FileNotFoundError as error:
        raise ClusterError(f"the program {argv[0]} is missing; run `make deps` as root") from error
    if check and done.returncode != 0:
        raise CommandError(argv, code=done.returncode, output=done.stderr or done.stdout)
    return done
