"""
The provider `kind`: Kubernetes in Docker, through pytest-kind's KindCluster.

It is for machines whose Docker engine answers, and takes `kind`, `kubectl` and `helm` from the
PATH. It was written on a machine without Docker and was never seen running: where it fails, its
error names CLUSTER=local. `capabilities` says what it can do of what :mod:`..local` can.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..api import (
    CONTROL_PLANE,
    Capability,
    Cluster,
    ClusterError,
    Component,
    Options,
    UnsupportedError,
    run,
)
from ..local.binaries import cache_folder

CONTAINERD_PATCH = """\
[plugins."io.containerd.cri.v1.runtime"]
  enable_cdi = true
[plugins."io.containerd.grpc.v1.cri"]
  enable_cdi = true
"""
"""CDI is off in containerd 1.7; the section's name changed in 2.0, which ignores the old one."""

MANIFEST = "/etc/kubernetes/manifests/kube-apiserver.yaml"
PARKED_MANIFEST = "/etc/kubernetes/kube-apiserver.yaml"

COMM_LENGTH = 15
"""As much of a program's name as the kernel keeps."""


class KindProvider(Cluster):
    """A cluster of kind's, known by its name."""

    provider = "kind"
    capabilities = frozenset({Capability.FREEZE, Capability.STOP_API_SERVER})

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._folder = cache_folder() / "kind" / name

    # -- life

    def is_up(self) -> bool:
        return self.name in self._kind("get", "clusters").splitlines()

    def start(self, options: Options) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with _names_the_other_provider():
            if self.is_up():
                self._kind("export", "kubeconfig", "--kubeconfig", str(self.kubeconfig))
                self._check(options)
            else:
                config = self._folder / "kind.yaml"
                config.write_text(yaml.safe_dump(kind_config(options)))
                (self._folder / "gates.json").write_text(json.dumps(dict(options.gates)))
                self._cluster().create(config_file=config)
            for archive in options.images:
                self.load_image(archive)
            self.wait_for_nodes(timeout_seconds=180)

    def stop(self) -> None:
        with _names_the_other_provider():
            if self.is_up():
                self._cluster().delete()
        shutil.rmtree(self._folder, ignore_errors=True)

    def leftovers(self) -> list[str]:
        return [f"the kind cluster {self.name} exists"] if self.is_up() else []

    # -- use

    @property
    def kubeconfig(self) -> Path:
        return self._folder / "kubeconfig"

    @property
    def nodes(self) -> list[str]:
        """The workers; where there is none, the control plane's node takes pods."""
        found = sorted(self._kind("get", "nodes", "--name", self.name).split())
        return [name for name in found if "control-plane" not in name] or found

    @property
    def gates(self) -> Mapping[str, bool]:
        gates: dict[str, bool] = json.loads((self._folder / "gates.json").read_text())
        return gates

    @property
    def logs(self) -> Path:
        folder = self._folder / "logs"
        self._kind("export", "logs", str(folder), "--name", self.name)
        return folder

    def program(self, name: str) -> str:
        return _program(name)

    def load_image(self, archive: Path) -> None:
        self._kind("load", "image-archive", str(archive), "--name", self.name)

    # -- faults

    def exec_on_node(
        self, node: str, argv: Sequence[str], *, timeout: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        command = ["docker", "exec", self._container(node), *argv]
        return run(command, timeout_seconds=timeout, check=check)

    def kill(self, node: str, component: Component, signal_number: int = signal.SIGKILL) -> None:
        # Only the container's own processes are seen from inside.
        name = component.value[:COMM_LENGTH]
        self.exec_on_node(node, ["pkill", f"-{int(signal_number)}", "-x", name])

    def start_component(self, node: str, component: Component) -> None:
        """Nothing to do: systemd and the kubelet start again what was killed."""

    def stop_kubelet(self, node: str) -> None:
        self.exec_on_node(node, ["systemctl", "stop", "kubelet"])

    def start_kubelet(self, node: str) -> None:
        probe = "until curl -fs http://127.0.0.1:10248/healthz; do sleep 0.2; done"
        self.exec_on_node(node, ["systemctl", "start", "kubelet"])
        self.exec_on_node(node, ["timeout", "60", "sh", "-c", probe], timeout=70)

    def stop_api_server(self) -> None:
        # The kubelet ends what has no manifest any more.
        self.exec_on_node(CONTROL_PLANE, ["mv", MANIFEST, PARKED_MANIFEST])
        gone = "while pgrep -x kube-apiserver; do sleep 0.5; done"
        self.exec_on_node(CONTROL_PLANE, ["timeout", "90", "sh", "-c", gone], timeout=100)

    def start_api_server(
        self,
        *,
        gates: Mapping[str, bool] | None = None,
        runtime_config: Mapping[str, bool] | None = None,
    ) -> None:
        if gates is not None or runtime_config is not None:
            raise UnsupportedError(self.provider, "start the API server with other gates")
        self.exec_on_node(CONTROL_PLANE, ["mv", PARKED_MANIFEST, MANIFEST])
        self.wait_for_nodes(timeout_seconds=120)

    # -- parts

    def _container(self, node: str) -> str:
        return f"{self.name}-control-plane" if node == CONTROL_PLANE else node

    def _check(self, options: Options) -> None:
        if not (self._folder / "gates.json").exists() or dict(self.gates) != dict(options.gates):
            raise ClusterError(
                f"cluster {self.name} is up, but was started with other gates: `make cluster-down`"
            )
        if len(self.nodes) < options.nodes:
            raise ClusterError(
                f"cluster {self.name} is up with {len(self.nodes)} nodes, and kind adds none: "
                "`make cluster-down`"
            )

    def _kind(self, *arguments: str) -> str:
        return run([_program("kind"), *arguments], timeout_seconds=300).stdout

    def _cluster(self) -> Any:
        with warnings.catch_warnings(), contextlib.chdir(self._folder):
            # It imports an old client, which warns; and it makes a folder where we stand.
            warnings.simplefilter("ignore")
            from pytest_kind import KindCluster

            return KindCluster(
                self.name,
                kubeconfig=self.kubeconfig,
                image=os.environ.get("KIND_NODE_IMAGE"),
                kind_path=Path(_program("kind")),
                kubectl_path=Path(_program("kubectl")),
            )


def kind_config(options: Options) -> dict[str, Any]:
    """kind's configuration: CDI on, gates and API versions as in a local cluster."""
    workers = options.nodes if options.nodes > 1 else 0
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "featureGates": dict(options.gates),
        "runtimeConfig": {name: str(on).lower() for name, on in options.runtime_config.items()},
        "containerdConfigPatches": [CONTAINERD_PATCH],
        "nodes": [{"role": "control-plane"}, *({"role": "worker"} for _ in range(workers))],
    }


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ClusterError(
            f"{name} is not on the PATH: install it, or use CLUSTER=local (root, no Docker)"
        )
    return found


@contextlib.contextmanager
def _names_the_other_provider() -> Generator[None]:
    try:
        yield
    except (ClusterError, subprocess.CalledProcessError, OSError) as error:
        text = str(error)
        if "CLUSTER=local" not in text:
            text += "; as root on Linux, CLUSTER=local needs no Docker"
        raise ClusterError(text) from error
