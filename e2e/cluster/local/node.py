"""
One node of a local cluster: containerd, kubelet and kube-proxy in a box with a separate file system
and network.

Data that survives a reboot (images, the kubelet's folder, /etc/cdi) is in the node's part of the
cluster's folder. Other data is in the box.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..api import ClusterError, Component, run, wait_until
from . import cgroups, configs, init, network
from .boxes import Box
from .names import Names
from .pki import Authority
from .runtime import Runtime

FOLDERS = (
    "kubelet", "cni", "net.d", "log", "lib", "run", "etc-upper/cdi", "etc-work", "containerd",
)  # fmt: skip

KUBELET_STOP_SECONDS = 10


class Node:
    """A node, identified by its number, from 1."""

    COMPONENTS = (Component.CONTAINERD, Component.KUBELET, Component.KUBE_PROXY)
    """The components in the order of their start."""

    def __init__(
        self,
        names: Names,
        number: int,
        *,
        programs: Path,
        kubelet: Path | None,
        server: str,
        gates: Mapping[str, bool],
        sandbox_image: str,
        runtime: Runtime,
    ) -> None:
        self.names, self.number, self.name = names, number, names.node(number)
        self.folder = names.folder / self.name
        self.box = Box(names.folder, self.name, is_node=True)
        self._programs, self._server, self._gates = programs, server, gates
        self._sandbox_image, self._runtime = sandbox_image, runtime
        self._folders = {Component.CONTAINERD: runtime.containerd, Component.KUBELET: kubelet}

    @property
    def _env(self) -> dict[str, str]:
        # Don't use the caller's environment, especially its proxies.
        folders = [folder for folder in (self._runtime.containerd, self._programs) if folder]
        path = ":".join([*map(str, folders), "/usr/sbin:/usr/bin:/sbin:/bin"])
        return {"PATH": path, "HOME": "/root"}

    def boot(self, *, others: Sequence["Node"]) -> None:
        """Create the box and its network, and start containerd."""
        self._write_files()
        cgroups.make(self.names.cgroup(self.number))
        self.box.start()
        neighbours = [(other.number, other.box) for other in others]
        network.join(self.names, self.number, self.box, others=neighbours)
        self.start(Component.CONTAINERD)

    def start_kubernetes(self) -> None:
        """Start kubelet and kube-proxy. The node joins the cluster soon after."""
        for component in (Component.KUBELET, Component.KUBE_PROXY):
            self._spawn(component)

    def start(self, component: Component) -> None:
        """Start a stopped component, and wait until it responds, if it can be checked."""
        self._spawn(component)
        if component is Component.CONTAINERD:
            wait_until(
                f"containerd answers on {self.name}",
                lambda: self._ctr("version", check=False).returncode == 0,
                timeout_seconds=30,
            )
        if component is Component.KUBELET:
            self.wait_kubelet()

    def end(self) -> None:
        """End everything on the node at once, as in a power failure."""
        self.box.end()
        cgroups.remove(self.names.cgroup(self.number))

    def _argv(self, component: Component) -> list[str]:
        if component is Component.CONTAINERD:
            return ["containerd", "--config", f"{self.folder}/containerd.toml"]
        if component is Component.KUBE_PROXY:
            return ["kube-proxy", f"--config={self.folder}/kube-proxy.json"]
        if component is not Component.KUBELET:
            raise ClusterError(f"{component} is not a component of a node")
        return [
            "kubelet",
            f"--config={self.folder}/kubelet.json",
            f"--kubeconfig={self.folder}/kubelet.kubeconfig",
            f"--hostname-override={self.name}",
            f"--node-ip={self.names.node_ip(self.number)}",
            "--root-dir=/var/lib/kubelet",
            "--v=2",
        ]

    def restart_kubernetes(self) -> None:
        """Restart kubelet and kube-proxy with these programs and new configurations. Containers
        continue."""
        for component in (Component.KUBELET, Component.KUBE_PROXY):
            self.box.stop(component, timeout_seconds=KUBELET_STOP_SECONDS)
        self._write_files()
        self.start_kubernetes()
        self.wait_kubelet()

    def stop_kubelet(self) -> None:
        self.box.stop(Component.KUBELET, timeout_seconds=KUBELET_STOP_SECONDS)

    def wait_kubelet(self) -> None:
        """Wait until the kubelet responds to its health check. If it ends, raise an error
        immediately."""

        def healthy() -> bool:
            process = self.box.component(Component.KUBELET)
            if process is None or not process.alive:
                raise ClusterError(f"the kubelet ended: {self.box.tail(Component.KUBELET)}")
            probe = (
                "import urllib.request as r; r.urlopen('http://127.0.0.1:10248/healthz', timeout=2)"
            )
            argv = [*self.box.enter(), sys.executable, "-I", "-S", "-c", probe]
            return run(argv, check=False, env=self._env).returncode == 0

        wait_until(f"the kubelet of {self.name} answers", healthy, timeout_seconds=60)

    def load_image(self, archive: Path) -> None:
        """Import a docker-archive through a pipe, because the node may not see the file's
        folder."""
        argv = [*self.box.enter(), "ctr", "--namespace", "k8s.io", "images", "import", "-"]
        with archive.open("rb") as stream:
            done = subprocess.run(
                argv, stdin=stream, capture_output=True, env=self._env, timeout=300, check=False
            )
        if done.returncode != 0:
            output = done.stderr.decode(errors="replace").strip()
            raise ClusterError(f"{archive} could not be imported on {self.name}: {output}")

    def add_disk(self, path: str, *, mib: int) -> None:
        """Mount a new file system at a path of the node. After reboots, :mod:`.init` mounts it."""
        disks = init.disks(self.folder)
        image = str(self.folder / f"disk-{len(disks)}.img")
        run(["mkfs.ext4", "-q", "-m", "0", image, f"{mib}M"])
        (self.folder / init.DISKS).write_text(json.dumps({**disks, path: image}))
        run([*self.box.enter(), "mkdir", "-p", path])
        run([*self.box.enter(), "mount", "-n", "-o", "loop", image, path])

    def path(self, path: str) -> Path:
        return inside(Path(f"/proc/{self.box.pid}/root"), path)

    def _ctr(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run([*self.box.enter(), "ctr", *args], check=check, env=self._env)

    def _spawn(self, component: Component) -> None:
        name, *flags = self._argv(component)
        argv = [str((self._folders.get(component) or self._programs) / name), *flags]
        self.box.spawn(component, argv, env=self._env)

    def _write_files(self) -> None:
        for folder in FOLDERS:
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        (self.folder / "is-node").touch()
        (self.folder / "containerd.toml").write_text(
            configs.containerd(
                folder=self.folder,
                programs=self._programs,
                runc=self._runtime.oci,
                sandbox_image=self._sandbox_image,
            )
        )
        (self.folder / "net.d" / "10-bridge.conflist").write_text(
            configs.network(self.names, self.number)
        )
        (self.folder / "kubelet.json").write_text(
            configs.kubelet(self.names, self.number, folder=self.folder, gates=self._gates)
        )
        (self.folder / "kube-proxy.json").write_text(
            configs.kube_proxy(self.names, self.number, folder=self.folder)
        )
        (self.folder / "resolv.conf").write_text(configs.RESOLV_CONF)
        self._write_credentials()

    def _write_credentials(self) -> None:
        authority = Authority.load(self.names.folder / "pki")
        kubelet = f"kubelet-{self.name}"
        authority.issue(
            kubelet,
            common_name=f"system:node:{self.name}",
            organization="system:nodes",
            dns=[self.name],
            addresses=[self.names.node_ip(self.number)],
        )
        authority.issue("kube-proxy", common_name="system:kube-proxy")
        for file, path in ((kubelet, "kubelet"), ("kube-proxy", "kube-proxy")):
            kubeconfig = self.folder / f"{path}.kubeconfig"
            authority.kubeconfig(kubeconfig, server=self._server, file=file)


def inside(root: Path, path: str) -> Path:
    """Resolve a path below a folder as if that folder was the root, so that absolute links remain
    below it."""
    found, left = root, [part for part in reversed(path.split("/")) if part]
    for _ in range(40):  # the same number of links as the kernel follows
        while left:
            part = left.pop()
            if part == "..":
                found = found if found == root else found.parent
                continue
            if (found / part).is_symlink():
                break
            found = found / part
        else:
            return found
        target = os.readlink(found / part)
        found = root if target.startswith("/") else found
        left += [word for word in reversed(target.split("/")) if word not in ("", ".")]
    raise ClusterError(f"{path} leads through too many links")
