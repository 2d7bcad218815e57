"""
The input of kind: a cluster's configuration, and the files that its nodes mount.

Pure functions of the options and of the engine's properties. :mod:`.provider` calls kind.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..api import Options

BOOT_ID = "/run/boot_id"
"""A separate boot ID for each node. The kernel's is that of the machine, and outlives a node's
container."""

DROP_IN = f"""\
[Service]
ExecStartPre=/bin/mkdir -p /etc/cdi /run/cdi
ExecStartPre=/bin/sh -c '[ -s {BOOT_ID} ] || cat /proc/sys/kernel/random/uuid > {BOOT_ID}'
"""
"""Part of containerd's unit. When the node's container starts, /run is empty, and containerd starts
before any pod. If only containerd restarts, nothing changes."""

AUDIT_POLICY = "/etc/kubernetes/drakit-audit-policy.json"
AUDIT_FOLDER = "/var/log/kubernetes/audit"
AUDIT_LOG = f"{AUDIT_FOLDER}/audit.json"

CONTAINERD_PATCH = """\
[plugins."io.containerd.cri.v1.runtime"]
  enable_cdi = true
[plugins."io.containerd.grpc.v1.cri"]
  enable_cdi = true
"""
"""CDI is disabled in containerd 1.7. The section's name changed in 2.0, which ignores the old
one."""

OOM_SCORE_PATCH = """\
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
"""
"""Without CAP_SYS_RESOURCE, a sandbox cannot lower its score, and would not start."""

FIRST_PORT, PORTS = 20000, 12000
"""Below the ports that the kernel assigns to clients."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Inputs of the configuration in addition to the options."""

    cgroup_v1: bool = False
    own_image: bool = False
    """Whether the node image was built here, so that its version of Kubernetes is known."""
    address: str | None = None
    """The address at which a private engine publishes ports."""
    udev: bool = False
    """Whether the machine has udev's database, which nodes then share."""


def kind_config(
    options: Options, *, name: str, minor: str, folder: Path, facts: Facts
) -> dict[str, Any]:
    """
    Return kind's configuration.

    :param minor: the minor release of Kubernetes in the node image, such as 1.36.
    :param folder: the folder that :func:`write_files` has filled.
    """
    gates, served = options.gates_for(minor), options.runtime_config_for(minor)
    workers = options.nodes if options.nodes > 1 else 0
    mounts = _mounts(folder, facts)
    policy = _mount(folder / "audit-policy.json", AUDIT_POLICY, read_only=True)
    control_plane = {"role": "control-plane", "extraMounts": [*mounts, policy]}
    config: dict[str, Any] = {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "featureGates": gates,
        "runtimeConfig": {name: str(on).lower() for name, on in served.items()},
        "containerdConfigPatches": [
            CONTAINERD_PATCH,
            *([OOM_SCORE_PATCH] if facts.address else []),
        ],
        "kubeadmConfigPatches": [yaml.safe_dump(_kubelet(facts))],
        "kubeadmConfigPatchesJSON6902": _kubeadm_patches(gates=bool(gates)),
        "nodes": [
            control_plane,
            *({"role": "worker", "extraMounts": mounts} for _ in range(workers)),
        ],
    }
    if facts.address is not None:
        # kind looks for a free port in its own network namespace, which is not the engine's.
        config["networking"] = {
            "apiServerAddress": facts.address,
            "apiServerPort": api_server_port(name),
        }
    return config


def write_files(folder: Path, *, audit_policy: str) -> None:
    """Write the files that nodes mount."""
    (folder / "node.conf").write_text(DROP_IN)
    (folder / "audit-policy.json").write_text(audit_policy)


def api_server_port(name: str) -> int:
    """Return the port of a cluster's API server in a private engine."""
    return FIRST_PORT + int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % PORTS


def cut_rules(
    *, servers: Sequence[str], own: Sequence[str], address: str | None
) -> list[tuple[list[str], list[str]]]:
    """
    Return the rules that drop packets between a node and the API server, each with its program.

    kind's network has both IPv4 and IPv6, and the kubelet uses either.

    :param servers: the addresses of the API server's node.
    :param own: the addresses of the node.
    :param address: the address of the node's processes, or of a pod. If None, the whole node is cut
        off.
    """
    found: list[tuple[list[str], list[str]]] = []
    for server in servers:
        program = iptables(ipv6=":" in server)
        if address is None:
            ends = [["POSTROUTING", "-d", server], ["PREROUTING", "-s", server]]
        elif address in own:
            # Packets of pods leave with the node's address, but get it only after this table.
            # Responses to them are forwarded, so they are not input.
            sources = [source for source in own if (":" in source) == (":" in server)]
            ends = [["POSTROUTING", "-s", source, "-d", server] for source in sources]
            ends.append(["INPUT", "-s", server])
        elif (":" in address) == (":" in server):
            # Here, the translations of the service's address and the pod's address are not visible.
            ends = [["FORWARD", *pair] for pair in _both_ways(address, server)]
        else:
            continue
        drop = ["-m", "comment", "--comment", "drakit-cut", "-j", "DROP"]
        found += [(program, [*end, *drop]) for end in ends]
    return found


def iptables(*, ipv6: bool) -> list[str]:
    """Return the beginning of a command line for the table of cuts; an action follows."""
    return ["ip6tables" if ipv6 else "iptables", "-w", "5", "-t", "mangle"]


def _both_ways(one: str, other: str) -> list[list[str]]:
    return [["-s", one, "-d", other], ["-s", other, "-d", one]]


CUT_CHAINS = ("PREROUTING", "INPUT", "FORWARD", "POSTROUTING")
"""The chains that :func:`cut_rules` writes to; no other program has rules there."""


def _mounts(folder: Path, facts: Facts) -> list[dict[str, Any]]:
    drop_in = "/etc/systemd/system/containerd.service.d/10-drakit.conf"
    return [
        # Mount all of it, so that nodes see devices that are created later.
        _mount(Path("/dev"), "/dev"),
        _mount(folder / "node.conf", drop_in, read_only=True),
        *([_mount(Path("/run/udev"), "/run/udev")] if facts.udev else []),
    ]


def _mount(source: Path, target: str, *, read_only: bool = False) -> dict[str, Any]:
    mount: dict[str, Any] = {"hostPath": str(source), "containerPath": target}
    return {**mount, "readOnly": True} if read_only else mount


def _kubelet(facts: Facts) -> dict[str, Any]:
    """Return a patch of the kubelet's configuration, with the same values as in a local cluster."""
    patch: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "nodeStatusUpdateFrequency": "5s",
        "syncFrequency": "10s",
    }
    if facts.cgroup_v1:
        patch["failCgroupV1"] = False
    if facts.own_image:
        # Programs that a test kills must restart immediately. Older versions reject this field.
        patch["crashLoopBackOff"] = {"maxContainerRestartPeriod": "2s"}
    return patch


def _kubeadm_patches(*, gates: bool) -> list[dict[str, str]]:
    """
    Return patches of kubeadm's configuration: audit, and components without leader election.

    There is only one replica of each component. Without the API server, it would lose its lease and
    exit, and then wait for the lease of its own predecessor. kubeadm ignores a patch for another
    version.
    """
    flags = {"audit-policy-file": AUDIT_POLICY, "audit-log-path": AUDIT_LOG}
    volumes = [
        {
            "name": "drakit-audit-policy",
            "hostPath": AUDIT_POLICY,
            "mountPath": AUDIT_POLICY,
            "readOnly": True,
            "pathType": "File",
        },
        {
            "name": "drakit-audit",
            "hostPath": AUDIT_FOLDER,
            "mountPath": AUDIT_FOLDER,
            "pathType": "DirectoryOrCreate",
        },
    ]
    add_volumes = _add("/apiServer/extraVolumes", volumes)
    by_version: dict[str, Sequence[dict[str, Any]]] = {
        "v1beta3": [
            *(_add(f"/apiServer/extraArgs/{name}", value) for name, value in flags.items()),
            _add("/controllerManager/extraArgs/leader-elect", "false"),
            # kind passes no arguments to the scheduler except the gates.
            _add("/scheduler/extraArgs/leader-elect", "false")
            if gates
            else _add("/scheduler/extraArgs", {"leader-elect": "false"}),
        ],
        "v1beta4": [
            *(_add("/apiServer/extraArgs/-", _argument(*flag)) for flag in flags.items()),
            _add("/controllerManager/extraArgs/-", _argument("leader-elect", "false")),
            _add("/scheduler/extraArgs/-", _argument("leader-elect", "false"))
            if gates
            else _add("/scheduler/extraArgs", [_argument("leader-elect", "false")]),
        ],
    }
    return [
        {
            "group": "kubeadm.k8s.io",
            "version": version,
            "kind": "ClusterConfiguration",
            "patch": yaml.safe_dump([*operations, add_volumes]),
        }
        for version, operations in by_version.items()
    ]


def _argument(name: str, value: str) -> dict[str, str]:
    return {"name": name, "value": value}


def _add(path: str, value: Any) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}
