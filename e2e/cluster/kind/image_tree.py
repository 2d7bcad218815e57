"""
What kind's node image and the images in it hold, as tars: pure functions of files that are there.

The node is a Debian with systemd, kind's own files, and our programs. kind builds its base image by
a Dockerfile, from a registry; :data:`DROPPED`, :data:`ENABLED` and :data:`MASKED` do to Debian what
that Dockerfile does. How the file systems and programs are made is not known here.
"""

import fnmatch
import json
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ...archive import Content, Image, add_file
from ..api import ClusterError
from ..local.binaries import KUBERNETES_PROGRAMS

SUITE = "bookworm"
"""The Debian release of both file systems: the systemd of later ones refuses cgroup v1."""

NODE_PACKAGES = (
    *("systemd", "mount", "util-linux", "kmod", "procps", "hostname", "libseccomp2", "runc"),
    *("conntrack", "iptables", "nftables", "iproute2", "ethtool", "socat", "iputils-ping"),
    *("bash", "ca-certificates", "curl", "jq", "pigz", "e2fsprogs"),
)
"""What kind's base image installs, less storage over a network, and runc and ping from Debian."""

INNER_PACKAGES = ("iptables", "nftables", "conntrack", "iproute2", "kmod")
"""What kube-proxy and the pod network run; the rest of the inner images is static programs."""

CNI_IMAGE = "localhost/kind-cni:1"
"""The pod network of `node/default-cni.yaml`; kind's own is in no Go module."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

DROPPED = (
    # Of the machine where Debian was unpacked.
    *("dev/*", "etc/hostname", "etc/resolv.conf"),
    # Services that a container has no use for, as kind's Dockerfile removes them.
    *("etc/systemd/system/*.wants/*", "usr/lib/systemd/system/multi-user.target.wants/*"),
    "usr/lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service",
    *("usr/lib/systemd/system/local-fs.target.wants/*",),
    *("usr/lib/systemd/system/basic.target.wants/*",),
    *(f"usr/lib/systemd/system/sockets.target.wants/*{kind}*" for kind in ("udev", "initctl")),
    # These change the machine's kernel (fs.protected_*, kernel.pid_max), not the container's.
    "usr/lib/sysctl.d/*",
)
"""Paths of Debian's file system that the node does not get."""

ENABLED = ("kubelet.service", "containerd.service", "undo-mount-hacks.service")

MASKED = (
    # It registers formats in the machine's kernel.
    "systemd-binfmt.service",
    # A node may have the machine's /dev: these would leave things in it, or change its owners.
    *("dev-hugepages.mount", "dev-mqueue.mount", "systemd-journald-dev-log.socket"),
    "systemd-tmpfiles-setup-dev.service",
)

NODE_PROGRAMS = ("kubeadm", "kubelet", "kubectl")
CNI_PLUGINS = ("host-local", "loopback", "portmap", "ptp")


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Folders of programs: those of every cluster, and those of kind's alone."""

    common: Path
    kind: Path


@dataclass(frozen=True)
class File:
    content: Content
    mode: int = 0o644


@dataclass(frozen=True)
class Link:
    target: str


@dataclass(frozen=True)
class Folder:
    source: Path | None = None
    """The folder whose content it has, with owners and modes; None: it is empty."""


Entry = File | Link | Folder
Tree = Mapping[str, Entry]
"""Path without a leading slash -> what is there. Links of Debian's are no part of a path: /sbin is
called usr/sbin."""


def inner_images(names: Iterable[str], *, containerd_config: str) -> list[Image]:
    """
    Return the images that a node has before it starts: they differ in entry points alone.

    :param names: what `kubeadm config images list` prints.
    """
    found = sandbox_image(containerd_config)
    groups: dict[str, list[str]] = {"pause": [found], "coredns": [], "": [CNI_IMAGE]}
    for name in names:
        program = name.rpartition("/")[2].partition(":")[0]
        group = groups[program if program in groups else ""]
        if name not in group:
            group.append(name)
    env = {"PATH": PATH}
    return [
        Image(
            names=groups["pause"], entrypoint=["/usr/local/bin/pause"], env=env, user="65535:65535"
        ),
        Image(names=groups["coredns"], entrypoint=["/usr/local/bin/coredns"], env=env),
        Image(names=groups[""], env=env),
    ]


def inner_tree(programs: Programs, *, node_files: Path) -> dict[str, Entry]:
    """What the inner images hold beside Debian."""
    folder = "usr/local/bin"
    return {
        f"{folder}/kubernetes": File(programs.common / "kubernetes", 0o755),
        **{f"{folder}/{name}": Link("kubernetes") for name in KUBERNETES_PROGRAMS},
        **{f"{folder}/{name}": File(programs.common / name, 0o755) for name in ("etcd", "pause")},
        f"{folder}/coredns": File(programs.kind / "coredns", 0o755),
        f"{folder}/cni.sh": File(node_files / "cni.sh", 0o755),
    }


def node_tree(
    programs: Programs, *, kind_files: Path, node_files: Path, version: str, runtime_spec: str
) -> dict[str, Entry]:
    """
    What a node holds beside Debian and its images.

    :param kind_files: `images/base/files` of kind's module.
    :param version: Kubernetes', such as v1.36.3.
    :param runtime_spec: what `ctr oci spec` prints.
    """
    units = "etc/systemd/system"
    wants = f"{units}/multi-user.target.wants"
    tree: dict[str, Entry] = {
        **_files_of_kind(kind_files),
        "etc/containerd/config.toml": File(
            containerd_config((kind_files / "etc/containerd/config.toml").read_text()).encode()
        ),
        "etc/containerd/cri-base.json": File(base_spec(runtime_spec).encode()),
        "etc/kubernetes/manifests": Folder(),
        # The machine's kernel messages in the journal of each node would confuse.
        "etc/systemd/journald.conf.d/10-kind.conf": File(b"[Journal]\nReadKMsg=no\n"),
        "kind/version": File(version.encode()),
        "usr/sbin/init": Link("/usr/lib/systemd/systemd"),
        "usr/bin/kubernetes": File(programs.common / "kubernetes", 0o755),
        "usr/local/bin/crictl": File(programs.kind / "crictl", 0o755),
    }
    tree |= {f"{wants}/{unit}": Link(f"/{units}/{unit}") for unit in ENABLED}
    tree |= {f"{units}/{unit}": Link("/dev/null") for unit in MASKED}
    tree |= {f"usr/bin/{name}": Link("kubernetes") for name in NODE_PROGRAMS}
    for name in ("containerd", "containerd-shim-runc-v2", "ctr"):
        tree[f"usr/local/bin/{name}"] = File(programs.common / name, 0o755)
    for name in CNI_PLUGINS:
        tree[f"opt/cni/bin/{name}"] = File(programs.common / name, 0o755)
    for name in ("default-cni.yaml", "default-storage.yaml"):
        tree[f"kind/manifests/{name}"] = File(node_files / name)
    return tree


def _files_of_kind(folder: Path) -> dict[str, Entry]:
    """kind's own files, with the modes that its Dockerfile gives them."""
    tree: dict[str, Entry] = {}
    for source in sorted(path for path in folder.rglob("*") if path.is_file()):
        path = source.relative_to(folder).as_posix()
        is_script = PurePosixPath(path).parent.name == "bin"
        tree[path] = File(source, 0o755 if is_script else 0o644)
    if not tree:
        raise ClusterError(f"{folder} has none of the files of kind's base image")
    return tree


def containerd_config(text: str) -> str:
    """kind's configuration of containerd, for a machine whose root may lack CAP_SYS_RESOURCE."""
    # Without it a sandbox cannot lower its score, and would not start.
    changed = text.replace("restrict_oom_score_adj = false", "restrict_oom_score_adj = true")
    if changed == text:
        raise ClusterError("kind's containerd configuration does not set restrict_oom_score_adj")
    return changed


def sandbox_image(config: str) -> str:
    """The name of the sandbox's image in containerd's configuration."""
    found = re.search(r'sandbox_image\s*=\s*"([^"]+)"', config)
    if found is None:
        raise ClusterError("kind's containerd configuration names no sandbox_image")
    return found[1]


def base_spec(text: str) -> str:
    """What containers are started from: no limits of the machine's, and kind's hook."""
    spec: dict[str, Any] = json.loads(text)
    spec["process"].pop("rlimits", None)
    hooks = spec.setdefault("hooks", {}).setdefault("createContainer", [])
    hooks.append({"path": "/kind/bin/mount-product-files.sh"})
    return json.dumps(spec, indent=1)


def write_tree(path: Path, tree: Tree, *, root: Path, dropped: Sequence[str] = ("dev/*",)) -> None:
    """
    Write a file system as a tar: another one (`root`, a tar), changed.

    :param tree: what is added; it takes the place of what `root` has there.
    :param dropped: patterns of what `root` has and the result has not.
    """
    folders: set[str] = set()
    with tarfile.open(root) as old, tarfile.open(path, "w") as new:
        for member in old:
            name = _name(member)
            if name in tree or any(fnmatch.fnmatchcase(name, pattern) for pattern in dropped):
                continue
            if member.isdir():
                folders.add(name)
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
        for place, entry in sorted(tree.items()):
            for parent in reversed(PurePosixPath(place).parents[:-1]):
                if str(parent) not in folders:
                    _add_folder(new, str(parent))
                    folders.add(str(parent))
            _add(new, place, entry)


def _name(member: tarfile.TarInfo) -> str:
    return member.name.removeprefix("./").rstrip("/")


def _add(archive: tarfile.TarFile, place: str, entry: Entry) -> None:
    match entry:
        case File():
            add_file(archive, place, entry.content, mode=entry.mode)
        case Link():
            info = tarfile.TarInfo(place)
            info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.target, 0o777
            archive.addfile(info)
        case Folder(source=None):
            _add_folder(archive, place)
        case Folder(source=source):
            archive.add(source, place)


def _add_folder(archive: tarfile.TarFile, place: str) -> None:
    info = tarfile.TarInfo(place)
    info.type, info.mode = tarfile.DIRTYPE, 0o755
    archive.addfile(info)
