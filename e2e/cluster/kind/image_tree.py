"""
The content of kind's node image and of the images in it, as tars.

The node is a Debian with systemd, kind's own files, and our programs. kind builds its base image
from a registry with a Dockerfile; :data:`DROPPED`, :data:`ENABLED` and :data:`MASKED` make the same
changes to Debian. This module only reads files that exist: :mod:`.image` provides them.
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
"""The Debian release of both file systems. Later ones have a systemd that does not support cgroup
v1."""

NODE_PACKAGES = (
    *("systemd", "mount", "util-linux", "kmod", "procps", "hostname", "libseccomp2", "runc"),
    *("conntrack", "iptables", "nftables", "iproute2", "ethtool", "socat", "iputils-ping"),
    *("bash", "ca-certificates", "curl", "jq", "pigz", "e2fsprogs"),
)
"""The packages of kind's base image, except network storage. runc also comes from Debian."""

INNER_PACKAGES = ("iptables", "nftables", "conntrack", "iproute2", "kmod")
"""Programs that kube-proxy and the pod network run. Other programs in the images are static."""

CNI_IMAGE = "localhost/kind-cni:1"
"""The image of the pod network in `node/default-cni.yaml`. kind's own image is not in a Go
module."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

UNITS = "usr/lib/systemd/system"
DROPPED = (
    # Files of the machine on which Debian was unpacked.
    *("dev/*", "etc/hostname", "etc/resolv.conf"),
    # Services that a container does not need; kind's Dockerfile removes the same ones.
    *("etc/systemd/system/*.wants/*", f"{UNITS}/multi-user.target.wants/*"),
    *(f"{UNITS}/local-fs.target.wants/*", f"{UNITS}/basic.target.wants/*"),
    f"{UNITS}/sysinit.target.wants/systemd-tmpfiles-setup.service",
    *(f"{UNITS}/sockets.target.wants/*{word}*" for word in ("udev", "initctl")),
    # Settings of the whole kernel (fs.protected_*, kernel.pid_max). kind's own settings affect only
    # the container.
    "usr/lib/sysctl.d/*",
)
"""Paths in Debian's file system that the node omits."""

ENABLED = ("kubelet.service", "containerd.service", "undo-mount-hacks.service")

MASKED = (
    # It would register binary formats in the machine's kernel.
    "systemd-binfmt.service",
    # A node may have the machine's /dev, in which these would create files and change owners and
    # modes.
    *("dev-hugepages.mount", "dev-mqueue.mount", "systemd-journald-dev-log.socket"),
    "systemd-tmpfiles-setup-dev.service",
)

NODE_PROGRAMS = ("kubeadm", "kubelet", "kubectl")
RUNTIME_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")
CNI_PLUGINS = ("host-local", "loopback", "portmap", "ptp")


@dataclass(frozen=True, kw_only=True)
class Programs:
    """The folders of the programs in `binaries.LOCAL` and in `binaries.KIND`."""

    local: Path
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
    """An empty folder."""


@dataclass(frozen=True)
class Copy:
    """A folder with all its content. Owners and modes are kept."""

    source: Path


Entry = File | Link | Folder | Copy

Tree = Mapping[str, Entry]
"""Path without a leading slash -> entry. A path must not contain a symbolic link of Debian:
`usr/sbin/init`, not `sbin/init`."""


def inner_images(required: Iterable[str], *, sandbox: str) -> list[Image]:
    """
    Return the images that a node has before it starts. They differ only in entry point and user.

    :param required: the names that `kubeadm config images list` prints.
    :param sandbox: the name of the sandbox's image in containerd's configuration.
    """
    names: dict[str, set[str]] = {"pause": {sandbox}, "coredns": set(), "others": {CNI_IMAGE}}
    for name in required:
        program = PurePosixPath(name).name.partition(":")[0]
        names[program if program in names else "others"].add(name)
    env = {"PATH": PATH}
    return [
        Image(
            names=sorted(names["pause"]),
            entrypoint=["/usr/local/bin/pause"],
            env=env,
            user="65535:65535",
        ),
        Image(names=sorted(names["coredns"]), entrypoint=["/usr/local/bin/coredns"], env=env),
        Image(names=sorted(names["others"]), env=env),
    ]


def inner_tree(programs: Programs, *, node_files: Path) -> dict[str, Entry]:
    """Return the files that the inner images add to Debian."""
    local = ("kubernetes", "etcd", "pause")
    tree: dict[str, Entry] = {
        "coredns": File(programs.kind / "coredns", 0o755),
        "cni.sh": File(node_files / "cni.sh", 0o755),
    }
    tree |= {name: File(programs.local / name, 0o755) for name in local}
    tree |= {name: Link("kubernetes") for name in KUBERNETES_PROGRAMS}
    return {f"usr/local/bin/{name}": entry for name, entry in tree.items()}


def node_tree(
    programs: Programs, *, kind_files: Path, node_files: Path, version: str, runtime_spec: str
) -> dict[str, Entry]:
    """
    Return the files that a node adds to Debian, except the images.

    :param kind_files: the folder `images/base/files` of kind's module.
    :param version: the version of Kubernetes, such as v1.36.3.
    :param runtime_spec: the output of `ctr oci spec`.
    """
    units = "etc/systemd/system"
    config = kind_files / "etc/containerd/config.toml"
    tree: dict[str, Entry] = {
        **_kind_tree(kind_files),
        "etc/containerd/config.toml": File(containerd_config(config.read_text()).encode()),
        "etc/containerd/cri-base.json": File(base_spec(runtime_spec).encode()),
        "etc/kubernetes/manifests": Folder(),
        # Without this setting, each node's journal would repeat the kernel's messages.
        "etc/systemd/journald.conf.d/10-kind.conf": File(b"[Journal]\nReadKMsg=no\n"),
        "kind/version": File(version.encode()),
        "usr/sbin/init": Link("/usr/lib/systemd/systemd"),
        "usr/bin/kubernetes": File(programs.local / "kubernetes", 0o755),
        "usr/local/bin/crictl": File(programs.kind / "crictl", 0o755),
    }
    wants = f"{units}/multi-user.target.wants"
    tree |= {f"{wants}/{unit}": Link(f"/{units}/{unit}") for unit in ENABLED}
    tree |= {f"{units}/{unit}": Link("/dev/null") for unit in MASKED}
    tree |= {f"usr/bin/{name}": Link("kubernetes") for name in NODE_PROGRAMS}
    for folder, names in (("usr/local/bin", RUNTIME_PROGRAMS), ("opt/cni/bin", CNI_PLUGINS)):
        tree |= {f"{folder}/{name}": File(programs.local / name, 0o755) for name in names}
    for name in ("default-cni.yaml", "default-storage.yaml"):
        tree[f"kind/manifests/{name}"] = File(node_files / name)
    return tree


def _kind_tree(folder: Path) -> dict[str, Entry]:
    """Return kind's own files, with the modes that its Dockerfile gives them."""
    tree: dict[str, Entry] = {}
    for source in sorted(path for path in folder.rglob("*") if path.is_file()):
        mode = 0o755 if source.parent.name == "bin" else 0o644
        tree[source.relative_to(folder).as_posix()] = File(source, mode)
    return tree


def containerd_config(text: str) -> str:
    """Adapt kind's configuration of containerd to a root user without CAP_SYS_RESOURCE."""
    # Otherwise, every sandbox fails to start, because runc cannot lower its OOM score.
    changed = text.replace("restrict_oom_score_adj = false", "restrict_oom_score_adj = true")
    if changed == text:
        raise ClusterError("kind's containerd configuration does not set restrict_oom_score_adj")
    return changed


def sandbox_image(config: str) -> str:
    """Return the name of the sandbox's image in a configuration of containerd."""
    found = re.search(r'sandbox_image\s*=\s*"([^"]+)"', config)
    if found is None:
        raise ClusterError("kind's containerd configuration does not set sandbox_image")
    return found[1]


def base_spec(text: str) -> str:
    """Change containerd's default runtime spec like kind's Dockerfile: no limits, one hook."""
    spec: dict[str, Any] = json.loads(text)
    spec["process"].pop("rlimits", None)
    hooks = spec.setdefault("hooks", {}).setdefault("createContainer", [])
    hooks.append({"path": "/kind/bin/mount-product-files.sh"})
    return json.dumps(spec, indent=1)


def write_tree(path: Path, tree: Tree, *, root: Path, dropped: Sequence[str] = ("dev/*",)) -> None:
    """
    Write a file system as a tar: `root`, another tar, with changes.

    :param tree: the additions. An entry replaces the entry with the same path in `root`.
    :param dropped: patterns of the paths in `root` that are omitted.
    """
    folders: set[str] = set()
    with tarfile.open(root) as old, tarfile.open(path, "w") as new:
        for member in old:
            name = member.name.removeprefix("./")
            if name in tree or any(fnmatch.fnmatchcase(name, pattern) for pattern in dropped):
                continue
            if member.isdir():
                folders.add(name)
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
        for place, entry in sorted(tree.items()):
            for parent in reversed(PurePosixPath(place).parents[:-1]):
                if str(parent) not in folders:
                    _add(new, str(parent), Folder())
                    folders.add(str(parent))
            _add(new, place, entry)


def _add(archive: tarfile.TarFile, place: str, entry: Entry) -> None:
    info = tarfile.TarInfo(place)
    match entry:
        case File():
            add_file(archive, place, entry.content, mode=entry.mode)
        case Copy():
            archive.add(entry.source, place)
        case Link():
            info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.target, 0o777
            archive.addfile(info)
        case Folder():
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(info)
