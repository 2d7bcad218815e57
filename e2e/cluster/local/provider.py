"""
The local cluster as a whole: start, stop and faults.

The provider combines the parts and decides their order. All changes to a cluster happen under the
cluster's lock, and the record is written before the recorded parts exist.
"""

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..api import (
    CONTROL_PLANE,
    Capability,
    Cluster,
    ClusterError,
    Component,
    Options,
    run,
    wait_until,
)
from ..gates import gates_of_tests, runtime_config_of_tests
from ..kind import engine
from . import binaries, cgroups, network, pause, records, requirements
from .boxes import Box, end_all
from .control_plane import STOP_SECONDS, ControlPlane
from .leftovers import leftovers
from .names import MAX_NODES, ROOT, Names, choose, cluster_id
from .node import Node
from .records import Process, Record
from .runtime import Runtime, runtime

LOCK_SECONDS = 300


class LocalCluster(Cluster):
    """A cluster on this machine, identified by its name."""

    provider = "local"
    capabilities = frozenset(Capability)

    def __init__(self, name: str, *, minor: str = binaries.DEFAULT_MINOR) -> None:
        super().__init__(name)
        self._minor = minor
        self._folders: dict[str, Path] = {}
        self._runtimes: dict[str, Runtime] = {}

    # -- life cycle

    def is_up(self) -> bool:
        record = records.find(self.name)
        return record is not None and _intact(record)

    def prepare(self) -> None:
        self._programs_of(self._minor)
        self._runtime(os.environ.get("RUNTIME", ""))

    def start(self, options: Options) -> None:
        requirements.check()
        if engine.find() is not None:
            raise ClusterError(
                "the Docker engine of `make kind-up` runs, and no local cluster runs beside it: "
                "use CLUSTER=kind, or `make kind-down` first"
            )
        if options.nodes > MAX_NODES:
            raise ClusterError(f"a local cluster has {MAX_NODES} nodes at most")
        self.prepare()  # before another process waits for the lock
        with records.lock(self.name, timeout_seconds=LOCK_SECONDS):
            _remove_remains(except_for=self.name)
            record = records.find(self.name)
            if record is not None and not _intact(record):
                print(f"removing the remains of cluster {self.name}", flush=True)
                _remove(record)
                record = None
            if record is None:
                record = self._start_anew(options)
            elif not record.kept and record.owner.pid != os.getpid():
                raise ClusterError(
                    f"process {record.owner.pid} uses cluster {self.name} and will stop it: wait "
                    "for its end, or choose another name (CLUSTER_NAME)"
                )
            elif record.version != binaries.kubernetes_version(self._minor):
                raise ClusterError(
                    f"cluster {self.name} is up with Kubernetes {record.version}: stop it first"
                )
            elif record.runtime != os.environ.get("RUNTIME", ""):
                raise ClusterError(
                    f"cluster {self.name} is up with another container runtime: stop it first"
                )
            elif dict(record.gates) != options.gates_for(self._minor):
                raise ClusterError(
                    f"cluster {self.name} is up with other feature gates: stop it first"
                )
            elif dict(record.runtime_config) != options.runtime_config_for(self._minor):
                raise ClusterError(
                    f"cluster {self.name} is up with other API versions: stop it first"
                )
            else:
                self._revive(record)
            self._add_nodes(record, options)

    def stop(self) -> None:
        requirements.check()
        with records.lock(self.name, timeout_seconds=LOCK_SECONDS):
            if (record := records.find(self.name)) is not None:
                _remove(record)
            else:
                # The starting process was killed before it wrote its record.
                shutil.rmtree(ROOT / cluster_id(self.name), ignore_errors=True)

    def leftovers(self) -> list[str]:
        return leftovers(self.name)

    # -- use

    @property
    def minor(self) -> str:
        record = records.find(self.name)
        return binaries.minor_of(record.version) if record else self._minor

    @property
    def kubeconfig(self) -> Path:
        return self._record.names.folder / "admin.kubeconfig"

    @property
    def nodes(self) -> list[str]:
        record = self._record
        return [record.names.node(number) for number in range(1, record.nodes + 1)]

    @property
    def gates(self) -> Mapping[str, bool]:
        return self._record.gates

    @property
    def logs(self) -> Path:
        return self._record.names.folder / "logs"

    def program(self, name: str) -> str:
        return str(self._programs / name)

    def load_image(self, archive: Path) -> None:
        for name in self.nodes:
            self._node(name).load_image(archive)

    def audit(self) -> list[dict[str, Any]]:
        text = (self.logs / "audit.json").read_text()
        # The last line may be half written.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    # -- faults

    def exec_on_node(
        self, node: str, argv: Sequence[str], *, timeout: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        box = self._node(node).box
        path = f"{self._programs}:/usr/sbin:/usr/bin:/sbin:/bin"
        return run([*box.enter(), *argv], timeout_seconds=timeout, check=check, env={"PATH": path})

    def node_path(self, node: str, path: str) -> Path:
        return self._node(node).path(path)

    def kill(self, node: str, component: Component, signal_number: int = signal.SIGKILL) -> None:
        process = self._box(node).component(component)
        if process is None or not process.signal(signal_number):
            raise ClusterError(f"{component} does not run on {node}")
        if signal_number == signal.SIGKILL:
            process.wait(10)

    def start_component(self, node: str, component: Component) -> None:
        process = self._box(node).component(component)
        if process is not None and process.alive:
            raise ClusterError(f"{component} runs on {node} already")
        if node == CONTROL_PLANE:
            self._control_plane(self._record).start_component(component)
        else:
            self._node(node).start(component)

    def stop_kubelet(self, node: str) -> None:
        self._node(node).stop_kubelet()

    def start_kubelet(self, node: str) -> None:
        self._node(node).start(Component.KUBELET)

    def stop_api_server(self) -> None:
        self._control_plane(self._record).stop_api_server()

    def start_api_server(
        self,
        *,
        gates: Mapping[str, bool] | None = None,
        runtime_config: Mapping[str, bool] | None = None,
    ) -> None:
        record = self._record
        if gates is not None:
            record = replace(record, gates=dict(gates))
        if runtime_config is not None:
            record = replace(record, runtime_config=dict(runtime_config))
        record.write()
        self._control_plane(record).start_component(Component.API_SERVER)

    def cut_node(self, node: str) -> None:
        network.cut(self._record.names, self._node(node).box)

    def heal_node(self, node: str) -> None:
        network.heal(self._record.names, self._node(node).box)

    def cut_pod(self, node: str, pod_ip: str) -> None:
        network.cut(self._record.names, self._node(node).box, address=pod_ip)

    def heal_pod(self, node: str, pod_ip: str) -> None:
        network.heal(self._record.names, self._node(node).box, address=pod_ip)

    def cut_kubelet(self, node: str) -> None:
        found = self._node(node)
        network.cut(found.names, found.box, address=str(found.names.node_ip(found.number)))

    def heal_kubelet(self, node: str) -> None:
        found = self._node(node)
        network.heal(found.names, found.box, address=str(found.names.node_ip(found.number)))

    @contextlib.contextmanager
    def power_off(self, node: str) -> Generator[None]:
        # Take the lock, because a cluster without one of its nodes would be removed as a remnant.
        with records.lock(self.name, timeout_seconds=LOCK_SECONDS):
            stopped = self._node(node)
            stopped.end()
            try:
                yield
            finally:
                others = [other for other in self._nodes(self._record) if other.name != node]
                stopped.boot(others=others)
                stopped.start_kubernetes()
                stopped.wait_kubelet()

    def upgrade_control_plane(self, minor: str) -> None:
        with records.lock(self.name, timeout_seconds=LOCK_SECONDS):
            old = self._record
            before = {node: binaries.minor_of(old.version) for node in self.nodes}
            record = replace(
                old,
                version=binaries.kubernetes_version(minor),
                gates=gates_of_tests(minor),
                runtime_config=runtime_config_of_tests(minor),
                kubelets={**before, **old.kubelets},
            )
            # Build them before the record names them.
            self._programs_of(minor)
            record.write()
            control_plane = self._control_plane(record)
            for component in control_plane.KUBERNETES:
                control_plane.box.stop(component, timeout_seconds=STOP_SECONDS)
                control_plane.start_component(component)

    def upgrade_node(self, node: str) -> None:
        with records.lock(self.name, timeout_seconds=LOCK_SECONDS):
            record = self._record
            others = {name: minor for name, minor in record.kubelets.items() if name != node}
            replace(record, kubelets=others).write()
            self._node(node).restart_kubernetes()

    def give_disk(self, node: str, path: str, *, mib: int) -> None:
        self._node(node).add_disk(path, mib=mib)

    def compact(self) -> None:
        self._control_plane(self._record).compact()

    def boot_id_file(self) -> str:
        return "/run/boot_id"

    # -- internals

    @property
    def _programs(self) -> Path:
        """The programs of the running release, or otherwise of the release that starts next."""
        return self._programs_of(self.minor)

    def _programs_of(self, minor: str) -> Path:
        if minor not in self._folders:
            self._folders[minor] = binaries.programs(minor=minor)
        return self._folders[minor]

    def _runtime(self, text: str) -> Runtime:
        if text not in self._runtimes:
            self._runtimes[text] = runtime(text)
        return self._runtimes[text]

    @property
    def _record(self) -> Record:
        record = records.find(self.name)
        if record is None:
            raise ClusterError(f"cluster {self.name} is not up: `make cluster-up` starts it")
        return record

    def _control_plane(self, record: Record) -> ControlPlane:
        return ControlPlane(
            record.names,
            programs=self._programs,
            gates=record.gates,
            runtime_config=record.runtime_config,
        )

    def _nodes(self, record: Record) -> list[Node]:
        return [self._node_of(record, number) for number in range(1, record.nodes + 1)]

    def _node_of(self, record: Record, number: int) -> Node:
        minor = record.kubelets.get(record.names.node(number))
        kubelet = binaries.KUBELETS.get(minor or "")
        whole = binaries.minor_of(record.version) if minor is None or kubelet else minor
        return Node(
            record.names,
            number,
            programs=self._programs_of(whole),
            kubelet=binaries.programs((kubelet,)) if kubelet else None,
            server=self._control_plane(record).server,
            # Another release may not have the gates of the cluster.
            gates=gates_of_tests(minor) if minor else record.gates,
            sandbox_image=pause.NAME,
            runtime=self._runtime(record.runtime),
        )

    def _node(self, name: str) -> Node:
        for node in self._nodes(self._record):
            if node.name == name:
                return node
        raise ClusterError(f"cluster {self.name} has no node {name}: {', '.join(self.nodes)}")

    def _box(self, node: str) -> Box:
        if node == CONTROL_PLANE:
            return self._control_plane(self._record).box
        return self._node(node).box

    # -- order of steps

    def _start_anew(self, options: Options) -> Record:
        record = self._claim(options)
        with _removed_on_failure(record):
            started = time.monotonic()
            network.make_bridge(record.names)
            self._control_plane(record).start()
            print(f"the API server is ready after {time.monotonic() - started:.1f} s", flush=True)
        return record

    def _claim(self, options: Options) -> Record:
        """Reserve the cluster's ports and subnet on this machine, and record them before other
        processes choose."""
        with records.lock("places", timeout_seconds=30):
            taken = [record.names for record in records.all_records()]
            ports = {names.port_place for names in taken}
            subnets = [*network.used_subnets(), *(names.subnet for names in taken)]
            base = Names(cluster=self.name, port_place=0, subnet_place=0)

            def subnet_free(subnet: ipaddress.IPv4Network) -> bool:
                return not any(subnet.overlaps(used) for used in subnets)

            def ports_free(wanted: range) -> bool:
                first = base.ports.api_server
                place = (wanted.start - first) // len(wanted)
                return place not in ports and network.ports_free(wanted)

            record = Record(
                names=choose(self.name, ports_free=ports_free, subnet_free=subnet_free),
                phase="starting",
                kept=options.kept,
                owner=Process.of(os.getpid()),
                nodes=0,
                gates=options.gates_for(self._minor),
                runtime_config=options.runtime_config_for(self._minor),
                version=binaries.kubernetes_version(self._minor),
                runtime=os.environ.get("RUNTIME", ""),
            )
            record.write()
        return record

    def _revive(self, record: Record) -> None:
        """Undo the effects of a failed test: killed, stopped, frozen or cut-off components."""
        control_plane, nodes = self._control_plane(record), self._nodes(record)
        for component in control_plane.COMPONENTS:
            if not control_plane.box.wake(component):
                control_plane.start_component(component)
        for node in nodes:
            network.heal_all(node.box)
            for component in node.COMPONENTS:
                if not node.box.wake(component):
                    node.start(component)

    def _add_nodes(self, record: Record, options: Options) -> None:
        """Start missing nodes, load the images on all nodes, and record that the cluster is up."""
        with _removed_on_failure(record):
            started = time.monotonic()
            names = [record.names.node(n) for n in range(record.nodes + 1, options.nodes + 1)]
            other = dict.fromkeys(names, options.kubelet) if options.kubelet else {}
            wanted = replace(
                record,
                nodes=max(record.nodes, options.nodes),
                kept=record.kept or options.kept,
                kubelets={**record.kubelets, **other},
            )
            replace(wanted, phase="starting", owner=Process.of(os.getpid())).write()
            nodes = self._nodes(wanted)
            new = nodes[record.nodes :]
            for node in new:
                node.boot(others=nodes[: node.number - 1])
            archives = [pause.archive(self._programs), *options.images]
            for node in new:
                for archive in archives:
                    node.load_image(archive)
                node.start_kubernetes()
            for node in new:
                node.wait_kubelet()
            if new:
                self.wait_for_nodes()
                seconds = time.monotonic() - started
                print(f"nodes are ready: {len(new)}, after {seconds:.1f} s more", flush=True)
            replace(wanted, phase="up").write()


def _intact(record: Record) -> bool:
    """Return whether a cluster is complete and owned, rather than half created, broken, or left by
    a dead owner."""
    if record.phase != "up" or not (record.kept or record.owner.alive):
        return False
    boxes = [CONTROL_PLANE, *(record.names.node(n) for n in range(1, record.nodes + 1))]
    return all(Box(record.names.folder, name, is_node=False).running for name in boxes)


def _remove_remains(*, except_for: str) -> None:
    """Remove the clusters of dead owners, whatever their names. Skips those that another process is
    using."""
    for record in records.all_records():
        if record.names.cluster == except_for or _intact(record):
            continue
        # Another process that starts, stops or reboots the cluster holds the lock.
        with (
            contextlib.suppress(ClusterError),
            records.lock(record.names.cluster, timeout_seconds=0),
        ):
            now = records.read(record.names.folder)
            if now is not None and not _intact(now):
                print(f"removing the remains of cluster {now.names.cluster}", flush=True)
                _remove(now)


def _remove(record: Record) -> None:
    """Remove everything of a cluster, whatever its state. Can be repeated."""
    names = record.names
    replace(record, phase="stopping").write()
    found = [path.stem for path in (names.folder / "boxes").glob("*.json")]
    end_all([Box(names.folder, name, is_node=name != CONTROL_PLANE) for name in found])
    network.remove_bridge(names)
    for group in {group.name for group in cgroups.found(names.cgroup_prefix)}:
        cgroups.remove(group)
    _remove_folder(names.folder)
    with contextlib.suppress(OSError):
        ROOT.rmdir()  # the last cluster also removes the directory


def _remove_folder(folder: Path) -> None:
    """Remove the cluster's folder, its record last."""

    def gone() -> bool:
        for path in folder.iterdir():
            if path.name == records.RECORD:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return {path.name for path in folder.iterdir()} <= {records.RECORD}

    # The mounts of a namespace disappear a moment after its last process.
    wait_until(f"{folder} can be removed", gone, timeout_seconds=20)
    shutil.rmtree(folder)


@contextlib.contextmanager
def _removed_on_failure(record: Record) -> Generator[None]:
    """Remove a cluster whose start fails. DRAKIT_LOGS names the folder in which its logs are
    kept."""
    try:
        yield
    except BaseException:
        if kept := os.environ.get("DRAKIT_LOGS"):
            logs = record.names.folder / "logs"
            shutil.copytree(logs, Path(kept, record.names.cluster), dirs_exist_ok=True)
        _remove(record)
        raise
