"""
The control plane of a local cluster: etcd, API server, controller manager, scheduler, in one box.

The control plane shares this machine's network: the API server listens for the administrator on the
loopback address and for nodes and pods on the cluster's bridge.
"""

import ipaddress
import json
import shutil
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..api import CONTROL_PLANE, ClusterError, Component, run, wait_until
from . import configs
from .boxes import Box
from .names import SERVICE_SUBNET, Names
from .pki import Authority

LOOPBACK = ipaddress.IPv4Address("127.0.0.1")

STOP_SECONDS = 3
"""Grace period for an orderly stop. The API server would wait up to a minute for watches to
close."""


def discovery_cache(port: int) -> Path:
    """Return the folder in which kubectl caches, for six hours, the resources of the API server
    with this port."""
    return Path.home() / ".kube" / "cache" / "discovery" / f"{LOOPBACK}_{port}"


class ControlPlane:
    """The four programs, and their shared folder."""

    COMPONENTS = (
        Component.ETCD,
        Component.API_SERVER,
        Component.CONTROLLER_MANAGER,
        Component.SCHEDULER,
    )
    """The components in the order of their start."""

    KUBERNETES = COMPONENTS[1:]
    """The components of a Kubernetes release, in the order of its upgrade."""

    def __init__(
        self,
        names: Names,
        *,
        programs: Path,
        gates: Mapping[str, bool],
        runtime_config: Mapping[str, bool],
    ) -> None:
        self.names, self.programs = names, programs
        self.gates, self.runtime_config = gates, runtime_config
        self.box = Box(names.folder, CONTROL_PLANE, is_node=False)
        self.kubeconfig = names.folder / "admin.kubeconfig"
        self.audit_log = names.folder / "logs" / "audit.json"

    @property
    def server(self) -> str:
        """The address of the API server for nodes."""
        return f"https://{self.names.gateway}:{self.names.ports.api_server}"

    def start(self) -> None:
        """Start everything, and return when the API server is ready."""
        self._write_files()
        # An earlier cluster with this port may have served other API versions.
        shutil.rmtree(discovery_cache(self.names.ports.api_server), ignore_errors=True)
        self.box.start()
        self._spawn(Component.ETCD)
        self.start_component(Component.API_SERVER)
        self._spawn(Component.CONTROLLER_MANAGER)
        self._spawn(Component.SCHEDULER)
        self._wait_service_account()

    def stop_api_server(self) -> None:
        self.box.stop(Component.API_SERVER, timeout_seconds=STOP_SECONDS)

    def start_component(self, component: Component) -> None:
        """Start a stopped component. If it is the API server, wait until it is ready."""
        self._spawn(component)
        if component is Component.API_SERVER:
            self.wait_ready()

    def wait_ready(self, *, timeout_seconds: float = 90) -> None:
        """Wait until the API server is ready. If it ends, raise an error immediately."""

        def ready() -> bool:
            for component in (Component.ETCD, Component.API_SERVER):
                process = self.box.component(component)
                if process is None or not process.alive:
                    raise ClusterError(f"{component} ended: {self.box.tail(component)}")
            return self._kubectl("get", "--raw", "/readyz")

        wait_until("the API server is ready", ready, timeout_seconds=timeout_seconds)

    def compact(self) -> None:
        """Compact all revisions before the current one in etcd."""
        status = self._etcd_call("maintenance/status", {})
        revision = status["header"]["revision"]
        self._etcd_call("kv/compaction", {"revision": revision, "physical": True})

    def _etcd_call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Call etcd through its gateway for JSON."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.names.ports.etcd}/v3/{path}", data=json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def _wait_service_account(self) -> None:
        # Until it exists, every pod of the namespace is rejected.
        wait_until(
            "the controller manager made the default ServiceAccount",
            lambda: self._kubectl("get", "serviceaccount", "default", "-n", "default"),
            timeout_seconds=60,
        )

    def _kubectl(self, *args: str) -> bool:
        argv = [str(self.programs / "kubectl"), "--kubeconfig", str(self.kubeconfig), *args]
        return run([*argv, "--request-timeout=5s"], check=False).returncode == 0

    def _spawn(self, component: Component) -> None:
        commands = {
            Component.ETCD: self._etcd,
            Component.API_SERVER: self._api_server,
            Component.CONTROLLER_MANAGER: self._controller_manager,
            Component.SCHEDULER: self._scheduler,
        }
        if component not in commands:
            raise ClusterError(f"{component} is not a component of the control plane")
        name, *flags = commands[component]()
        env = {"PATH": f"{self.programs}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        self.box.spawn(component, [str(self.programs / name), *flags], env=env)

    def _write_files(self) -> None:
        names, folder = self.names, self.names.folder
        authority = Authority.create(folder / "pki")
        service = "kubernetes.default.svc"
        authority.issue(
            "apiserver",
            common_name="kube-apiserver",
            dns=["localhost", "kubernetes", "kubernetes.default", service],
            addresses=[LOOPBACK, SERVICE_SUBNET[1], names.gateway],
        )
        admins = "system:masters"
        authority.issue("admin", common_name="drakit-admin", organization=admins)
        authority.issue("apiserver-kubelet", common_name="apiserver", organization=admins)
        authority.issue("front-proxy", common_name="front-proxy")
        local = f"https://127.0.0.1:{names.ports.api_server}"
        authority.kubeconfig(self.kubeconfig, server=local, file="admin")
        for component in (Component.CONTROLLER_MANAGER, Component.SCHEDULER):
            authority.issue(component, common_name=f"system:{component}")
            path = folder / f"{component}.kubeconfig"
            authority.kubeconfig(path, server=local, file=component)
        (folder / "audit-policy.json").write_text(configs.audit_policy())

    def _etcd(self) -> list[str]:
        client = f"http://127.0.0.1:{self.names.ports.etcd}"
        peer = f"http://127.0.0.1:{self.names.ports.etcd_peer}"
        return [
            "etcd",
            f"--data-dir={self.names.folder}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            # The data need not survive the machine.
            "--unsafe-no-fsync",
        ]

    def _api_server(self) -> list[str]:
        pki = self.names.folder / "pki"
        return [
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self.names.ports.etcd}",
            f"--secure-port={self.names.ports.api_server}",
            f"--advertise-address={self.names.gateway}",
            f"--service-cluster-ip-range={SERVICE_SUBNET}",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki}/service-accounts.pub",
            f"--service-account-signing-key-file={pki}/service-accounts.key",
            f"--authorization-mode={self._authorizers()}",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--kubelet-client-certificate={pki}/apiserver-kubelet.crt",
            f"--kubelet-client-key={pki}/apiserver-kubelet.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            # Node names are not DNS names here.
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={pki}/ca.crt",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki}/front-proxy.crt",
            f"--proxy-client-key-file={pki}/front-proxy.key",
            # The API server is not in a pod, so service addresses are not reachable from here, but
            # endpoints are.
            "--enable-aggregator-routing=true",
            f"--audit-policy-file={self.names.folder}/audit-policy.json",
            f"--audit-log-path={self.audit_log}",
            f"--feature-gates={configs.switches_flag(self.gates)}",
            f"--runtime-config={configs.switches_flag(self.runtime_config)}",
        ]

    def _authorizers(self) -> str:
        # The Node authorizer watches v1 of DRA. Without it, the server would never be ready.
        return "Node,RBAC" if self.runtime_config.get("resource.k8s.io/v1", True) else "RBAC"

    def _controller_manager(self) -> list[str]:
        folder = self.names.folder
        return [
            "kube-controller-manager",
            *self._client_flags(Component.CONTROLLER_MANAGER),
            f"--secure-port={self.names.ports.controller_manager}",
            f"--root-ca-file={folder}/pki/ca.crt",
            f"--service-account-private-key-file={folder}/pki/service-accounts.key",
            "--use-service-account-credentials=true",
            f"--cluster-signing-cert-file={folder}/pki/ca.crt",
            f"--cluster-signing-key-file={folder}/pki/ca.key",
            f"--flex-volume-plugin-dir={folder}/volume-plugins",
        ]

    def _scheduler(self) -> list[str]:
        return [
            "kube-scheduler",
            *self._client_flags(Component.SCHEDULER),
            f"--secure-port={self.names.ports.scheduler}",
        ]

    def _client_flags(self, component: Component) -> list[str]:
        path = self.names.folder / f"{component}.kubeconfig"
        return [
            f"--kubeconfig={path}",
            f"--authentication-kubeconfig={path}",
            f"--authorization-kubeconfig={path}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
            f"--feature-gates={configs.switches_flag(self.gates)}",
        ]
