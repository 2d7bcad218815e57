"""
The configuration files of a local cluster's programs, as strings. Pure functions of its names.

Each setting has a comment with its reason. The programs read the JSON files as YAML.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .names import Names

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"

# The DNS configuration of a node. The cluster runs no DNS; pods reach services by address.
RESOLV_CONF = "# the local cluster runs no DNS\n"


def containerd(*, folder: Path, programs: Path, runc: str, sandbox_image: str) -> str:
    """Return the configuration of containerd 1.7, which 2.x also supports."""
    return f"""\
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
# NRI would make folders below /opt, which is the machine's; nothing here uses it.
disabled_plugins = ["io.containerd.nri.v1.nri"]

[grpc]
  address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/containerd-opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{sandbox_image}"
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  # Without CAP_SYS_RESOURCE a sandbox cannot lower its score, and would not start.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{programs}"
    conf_dir = "{folder}/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "{runc}"
      SystemdCgroup = false
"""


def network(names: Names, node: int) -> str:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        # Every address that a pod may reach has a route back to the pod.
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": str(names.node_pods(node))}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return json.dumps({"cniVersion": "1.0.0", "name": "drakit", "plugins": [bridge]})


def kubelet(names: Names, node: int, *, folder: Path, gates: Mapping[str, bool]) -> str:
    pki = names.folder / "pki"
    name = names.node(node)
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{names.cgroup(node)}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "tlsCertFile": f"{pki}/kubelet-{name}.crt",
        "tlsPrivateKeyFile": f"{pki}/kubelet-{name}.key",
        "resolvConf": f"{folder}/resolv.conf",
        # There is no DNS server. An empty list would cause an Event (MissingClusterDNS) for every
        # pod. At this address, lookups in a pod fail immediately.
        "clusterDNS": ["127.0.0.1"],
        "clusterDomain": "cluster.local",
        # The default folder is below /usr, which belongs to the machine.
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        # Images cannot be pulled again: never collect them, however full the disk is.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "localStorageCapacityIsolation": False,
        # A program that a test kills must restart immediately, however often other tests have
        # killed it.
        "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
        "nodeStatusUpdateFrequency": "5s",
        "syncFrequency": "10s",
        # Kubelets before 1.35 need the gate for `crashLoopBackOff`.
        "featureGates": {**gates, "KubeletCrashLoopBackOffMax": True},
    }
    return json.dumps(config, indent=1)


def kube_proxy(names: Names, node: int, *, folder: Path) -> str:
    config: dict[str, Any] = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{folder}/kube-proxy.kubeconfig"},
        "clusterCIDR": str(names.pod_subnet),
        "mode": "iptables",
        "hostnameOverride": names.node(node),
        # The sysctls of connection tracking belong to the machine.
        "conntrack": {"maxPerCore": 0},
    }
    return json.dumps(config, indent=1)


def audit_policy() -> str:
    """Return a policy that records all writes with their users, and every use of DRA's resources,
    because tests count them."""
    writes = ["create", "update", "patch", "delete", "deletecollection"]
    policy: dict[str, Any] = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "Metadata", "resources": [{"group": "resource.k8s.io"}]},
            {"level": "Metadata", "verbs": writes},
            {"level": "None"},
        ],
    }
    return json.dumps(policy, indent=1)


def switches_flag(switches: Mapping[str, bool]) -> str:
    """Return the value of `--feature-gates` or `--runtime-config`."""
    return ",".join(f"{name}={str(on).lower()}" for name, on in sorted(switches.items()))
