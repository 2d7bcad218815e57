"""
The provider `kind`: Kubernetes in Docker, through pytest-kind's KindCluster.

It uses the available Docker engine: the machine's, or the private one of :mod:`.engine`.
:mod:`.config` generates the input of kind. `capabilities` lists the supported capabilities, which
are a subset of those of :mod:`e2e.cluster.local`.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import cached_property
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
    wait_until,
)
from ..local import binaries
from ..local.configs import audit_policy
from ..local.node import inside
from . import engine, image
from .config import (
    AUDIT_LOG,
    BOOT_ID,
    CUT_CHAINS,
    Facts,
    cut_rules,
    iptables,
    kind_config,
    write_files,
)

DOCKER = ("docker",)

MANIFEST = "/etc/kubernetes/manifests/kube-apiserver.yaml"
PARKED_MANIFEST = "/etc/kubernetes/kube-apiserver.yaml"

COMM_LENGTH = 15
"""The length at which the kernel truncates a program's name."""

CREATE_SECONDS = 180

BUILD = "build"
"""The value of KIND_NODE_IMAGE for an image that is built here."""


class KindProvider(Cluster):
    """A kind cluster, identified by its name."""

    provider = "kind"
    capabilities = frozenset(Capability) - {
        Capability.COMPACTION,
        Capability.CONTROL_PLANE_ALONE,
        Capability.DISK,
        Capability.UPGRADE,
    }

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._folder = binaries.cache_folder() / "kind" / name
        self._engine = engine.use()

    # -- life cycle

    def is_up(self) -> bool:
        return self.name in self._kind("get", "clusters").splitlines()

    def prepare(self) -> None:
        for name in ("kind", "kubectl", "helm"):
            self.program(name)
        self._image()

    def start(self, options: Options) -> None:
        if options.nodes == 0:
            raise UnsupportedError(self.provider, "run a control plane alone")
        self._folder.mkdir(parents=True, exist_ok=True)
        with _names_the_other_provider():
            if self.is_up():
                self._kind(
                    *("export", "kubeconfig", "--name", self.name),
                    *("--kubeconfig", str(self.kubeconfig)),
                )
                self._check(options)
                self._revive()
            else:
                self._create(options)
            for archive in options.images:
                self.load_image(archive)
            self.wait_for_nodes(timeout_seconds=CREATE_SECONDS)
            self._wait_service_account()

    def stop(self) -> None:
        with _names_the_other_provider():
            if self.is_up():
                self._cluster(None).delete()
        shutil.rmtree(self._folder, ignore_errors=True)

    def leftovers(self) -> list[str]:
        return [f"the kind cluster {self.name} exists"] if self.is_up() else []

    # -- use

    @property
    def minor(self) -> str:
        return binaries.DEFAULT_MINOR

    @property
    def kubeconfig(self) -> Path:
        return self._folder / "kubeconfig"

    @property
    def nodes(self) -> list[str]:
        """The workers. If there are none, the control plane's node runs pods."""
        found = self._all_nodes()
        return [name for name in found if not _is_control_plane(name)] or found

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
        return _program(name, own=self._engine is not None)

    def load_image(self, archive: Path) -> None:
        nodes = ",".join(self.nodes)
        self._kind("load", "image-archive", str(archive), "--name", self.name, "--nodes", nodes)

    def audit(self) -> list[dict[str, Any]]:
        text = self.exec_on_node(CONTROL_PLANE, ["cat", AUDIT_LOG]).stdout
        # The last line may be half written.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    # -- faults

    def exec_on_node(
        self, node: str, argv: Sequence[str], *, timeout: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        command = [*DOCKER, "exec", self._container(node), *argv]
        return run(command, timeout_seconds=timeout, check=check)

    def node_path(self, node: str, path: str) -> Path:
        container = self._inspect(node, "{{.Id}}")
        pid = init_of(container, _processes())
        if pid is None or os.geteuid() != 0:
            raise ClusterError(
                f"the file system of node {node} cannot be seen from here: that needs root, and a "
                "Docker engine on this machine"
            )
        return inside(Path(f"/proc/{pid}/root"), path)

    def kill(self, node: str, component: Component, signal_number: int = signal.SIGKILL) -> None:
        # Inside the container, only its own processes are visible.
        name = component.value[:COMM_LENGTH]
        self.exec_on_node(node, ["pkill", f"-{int(signal_number)}", "-x", name])

    def start_component(self, node: str, component: Component) -> None:
        """Do nothing: systemd and the kubelet restart killed components."""

    def stop_kubelet(self, node: str) -> None:
        self.exec_on_node(node, ["systemctl", "stop", "kubelet"])

    def start_kubelet(self, node: str) -> None:
        self.exec_on_node(node, ["systemctl", "start", "kubelet"])
        self._wait_kubelet(node)

    def stop_api_server(self) -> None:
        # The kubelet stops pods whose manifest is gone.
        self.exec_on_node(CONTROL_PLANE, ["mv", MANIFEST, PARKED_MANIFEST])
        self.exec_on_node(CONTROL_PLANE, ["timeout", "90", "sh", "-c", _STOPPED], timeout=100)

    def start_api_server(
        self,
        *,
        gates: Mapping[str, bool] | None = None,
        runtime_config: Mapping[str, bool] | None = None,
    ) -> None:
        if gates is not None or runtime_config is not None:
            raise UnsupportedError(self.provider, "start the API server with other gates")
        self.exec_on_node(CONTROL_PLANE, ["mv", PARKED_MANIFEST, MANIFEST])
        self._wait_api_server()
        self.wait_for_nodes(timeout_seconds=120)

    def cut_node(self, node: str) -> None:
        self._cut(node, None)

    def heal_node(self, node: str) -> None:
        self._heal(node, None)

    def cut_pod(self, node: str, pod_ip: str) -> None:
        self._cut(node, pod_ip)

    def heal_pod(self, node: str, pod_ip: str) -> None:
        self._heal(node, pod_ip)

    def cut_kubelet(self, node: str) -> None:
        self._cut(node, self._addresses(node)[0])

    def heal_kubelet(self, node: str) -> None:
        self._heal(node, self._addresses(node)[0])

    @contextlib.contextmanager
    def power_off(self, node: str) -> Generator[None]:
        container = self._container(node)
        run([*DOCKER, "kill", container])
        run([*DOCKER, "wait", container])
        try:
            yield
        finally:
            run([*DOCKER, "start", container], timeout_seconds=120)
            self._wait_kubelet(node)

    def boot_id_file(self) -> str:
        return BOOT_ID

    # -- internals

    def _create(self, options: Options) -> None:
        chosen = self._image()
        facts = Facts(
            cgroup_v1=_docker_info("{{.CgroupVersion}}") == "1",
            own_image=chosen is not None and chosen.startswith(f"{image.NAME}:"),
            address=str(engine.ADDRESS) if self._engine is not None else None,
            udev=Path("/run/udev").is_dir(),
        )
        write_files(self._folder, audit_policy=audit_policy())
        config = self._folder / "kind.yaml"
        content = kind_config(
            options, name=self.name, minor=self.minor, folder=self._folder, facts=facts
        )
        config.write_text(yaml.safe_dump(content))
        (self._folder / "gates.json").write_text(json.dumps(options.gates_for(self.minor)))
        started = time.monotonic()
        try:
            self._cluster(chosen).create(config_file=config)
        except BaseException as error:
            self._kind("delete", "cluster", "--name", self.name)
            if chosen is None and isinstance(error, subprocess.CalledProcessError):
                raise ClusterError(
                    f"{error}; KIND_NODE_IMAGE=build builds a node image that needs no registry"
                ) from error
            raise
        print(f"kind created the cluster in {time.monotonic() - started:.1f} s", flush=True)

    def _image(self) -> str | None:
        """Return the node image. None is kind's public image, which a private engine cannot
        pull."""
        given = os.environ.get("KIND_NODE_IMAGE") or (BUILD if self._engine is not None else None)
        return image.ensure(DOCKER) if given == BUILD else given

    def _all_nodes(self) -> list[str]:
        return sorted(self._kind("get", "nodes", "--name", self.name).split())

    def _container(self, node: str) -> str:
        return f"{self.name}-control-plane" if node == CONTROL_PLANE else node

    def _inspect(self, node: str, template: str) -> str:
        return run([*DOCKER, "inspect", "--format", template, self._container(node)]).stdout.strip()

    def _addresses(self, node: str) -> list[str]:
        """Return the node's addresses in kind's network: IPv4 and, if Docker assigns one, IPv6."""
        template = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{.GlobalIPv6Address}}{{end}}"
        return self._inspect(node, template).split()

    def _cut_rules(self, node: str, address: str | None) -> list[tuple[list[str], list[str]]]:
        if _is_control_plane(self._container(node)):
            raise UnsupportedError(self.provider, "cut the API server's own node from it")
        servers = self._addresses(CONTROL_PLANE)
        return cut_rules(servers=servers, own=self._addresses(node), address=address)

    def _cut(self, node: str, address: str | None) -> None:
        for program, rule in self._cut_rules(node, address):
            if self.exec_on_node(node, [*program, "-C", *rule], check=False).returncode != 0:
                self.exec_on_node(node, [*program, "-I", *rule])

    def _heal(self, node: str, address: str | None) -> None:
        for program, rule in self._cut_rules(node, address):
            self.exec_on_node(node, [*program, "-D", *rule], check=False)

    def _revive(self) -> None:
        """Undo the effects of a failed test: killed, stopped, frozen or cut-off components."""
        for node in self._all_nodes():
            run([*DOCKER, "start", node], timeout_seconds=120)
            for chain in CUT_CHAINS:
                for ipv6 in (False, True):
                    argv = [*iptables(ipv6=ipv6), "-F", chain]
                    self.exec_on_node(node, argv, check=False)
            for component in Component:
                argv = ["pkill", "-CONT", "-x", component.value[:COMM_LENGTH]]
                self.exec_on_node(node, argv, check=False)
            self.start_kubelet(node)
        parked = ["test", "-e", PARKED_MANIFEST]
        if self.exec_on_node(CONTROL_PLANE, parked, check=False).returncode == 0:
            self.start_api_server()

    def _wait_kubelet(self, node: str) -> None:
        probe = "until curl -fs http://127.0.0.1:10248/healthz; do sleep 0.2; done"
        wait_until(
            f"the kubelet of {node} answers",
            lambda: (
                self.exec_on_node(
                    node, ["timeout", "10", "sh", "-c", probe], check=False
                ).returncode
                == 0
            ),
            timeout_seconds=90,
        )

    def _wait_api_server(self) -> None:
        argv = ("get", "--raw", "/readyz", "--request-timeout=5s")
        wait_until(
            "the API server is ready",
            lambda: self.kubectl(*argv, check=False).returncode == 0,
            timeout_seconds=120,
        )

    def _wait_service_account(self) -> None:
        # Until it exists, every pod of the namespace is rejected.
        argv = ("get", "serviceaccount", "default", "-n", "default")
        wait_until(
            "the controller manager made the default ServiceAccount",
            lambda: self.kubectl(*argv, check=False).returncode == 0,
            timeout_seconds=60,
        )

    def _check(self, options: Options) -> None:
        gates = options.gates_for(self.minor)
        if not (self._folder / "gates.json").exists() or dict(self.gates) != gates:
            raise ClusterError(
                f"cluster {self.name} is up, but was started with other gates: `make cluster-down`"
            )
        if len(self.nodes) < options.nodes:
            raise ClusterError(
                f"cluster {self.name} is up with {len(self.nodes)} nodes, and kind adds none: "
                "`make cluster-down`"
            )

    @cached_property
    def _kind_program(self) -> str:
        return _program("kind", own=self._engine is not None)

    def _kind(self, *arguments: str) -> str:
        return run([self._kind_program, *arguments], timeout_seconds=300).stdout

    def _cluster(self, chosen: str | None) -> Any:
        with warnings.catch_warnings(), contextlib.chdir(self._folder):
            # It imports an old client, which emits warnings, and it creates a folder in the working
            # directory.
            warnings.simplefilter("ignore")
            from pytest_kind import KindCluster

            return KindCluster(
                self.name,
                kubeconfig=self.kubeconfig,
                image=chosen,
                kind_path=Path(self._kind_program),
                kubectl_path=Path(self.program("kubectl")),
            )


# An orderly stop would wait half a minute for watches to close.
_STOPPED = """
for _ in 1 2 3 4 5 6; do pgrep -x kube-apiserver || exit 0; sleep 0.5; done
pkill -KILL -x kube-apiserver
while pgrep -x kube-apiserver; do sleep 0.5; done
"""


def init_of(container: str, processes: Iterable[tuple[int, str, str]]) -> int | None:
    """
    Return the process ID, in this machine's namespace, of process 1 of a container.

    The engine may run in a separate PID namespace, so it reports a different number.

    :param processes: ID, status and cgroups of every process, from /proc.
    """
    found: list[tuple[int, int]] = []
    for pid, status, groups in processes:
        if container not in groups:
            continue
        numbers = [line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")]
        # The first processes of containers on the node are nested more deeply.
        if numbers and numbers[0][-1] == "1":
            found.append((len(numbers[0]), pid))
    return min(found)[1] if found else None


def _processes() -> Generator[tuple[int, str, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended in the meantime
                groups = (entry / "cgroup").read_text()
                yield int(entry.name), (entry / "status").read_text(), groups


def _is_control_plane(node: str) -> bool:
    return node.endswith("-control-plane")


def _docker_info(template: str) -> str:
    return run([*DOCKER, "info", "--format", template]).stdout.strip()


def _program(name: str, *, own: bool) -> str:
    """
    Return the path of kind, kubectl or helm, from the PATH or from our build.

    :param own: always use our build, because a private engine needs our node image.
    """
    found = None if own else shutil.which(name)
    if found is not None:
        return found
    if shutil.which("go") is None:
        raise ClusterError(
            f"{name} is not on the PATH: install it, or use CLUSTER=local (root, no Docker)"
        )
    modules = binaries.KIND if name == "kind" else binaries.LOCAL
    return str(binaries.programs(modules) / name)


@contextlib.contextmanager
def _names_the_other_provider() -> Generator[None]:
    try:
        yield
    except (ClusterError, subprocess.CalledProcessError, OSError) as error:
        text = str(error)
        if "CLUSTER=local" not in text:
            text += "; as root on Linux, CLUSTER=local needs no Docker"
        raise ClusterError(text) from error
