"""
Helpers of the tests on a real cluster: objects to apply, conditions to wait for, block devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from e2e.cluster.api import Cluster, ClusterError, run, wait_until
from e2e.release import DRAKIT, Release
from e2e.release import NAMESPACE as NAMESPACE

DRIVER = "hostdev.drakit.dev"
TEST_IMAGE = "localhost/drakit-test:dev"

ResultT = TypeVar("ResultT")


def wait_for(
    what: str, look: Callable[[], ResultT], *, seconds: float = 60, period: float = 0.2
) -> ResultT:
    """Poll until `look` returns a true value, and return it. On a timeout, fail with the sentence
    `what`."""
    return wait_until(what, look, timeout_seconds=seconds, interval_seconds=period)


def holds_for(what: str, look: Callable[[], object], *, seconds: float) -> None:
    """Poll until the time is over. Fail as soon as a result is false."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert look(), what
        time.sleep(0.3)


# ------------------------------------------------------------ objects


def device_class(name: str, driver: str, *selectors: str, **spec: Any) -> dict[str, Any]:
    """Return a class for a driver's devices, all or those selected. `spec` contains further
    fields."""
    expression = " && ".join([f'device.driver == "{driver}"', *selectors])
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": expression}}], **spec},
    }


Request = tuple[str, str] | tuple[str, str, str] | dict[str, Any]
"""(request, class), (request, class, CEL selector), or a request in the API's form."""


def claim_spec(*requests: Request, config: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return a claim's spec with requests, and with opaque parameters in the API's form."""
    bodies: list[dict[str, Any]] = []
    for request in requests:
        if isinstance(request, dict):
            bodies.append(request)
            continue
        exactly: dict[str, Any] = {"deviceClassName": request[1]}
        if len(request) == 3:
            exactly["selectors"] = [{"cel": {"expression": request[2]}}]
        bodies.append({"name": request[0], "exactly": exactly})
    devices: dict[str, Any] = {"requests": bodies}
    if config:
        devices["config"] = list(config)
    return {"devices": devices}


def claim(name: str, *requests: Request, config: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": claim_spec(*requests, config=config),
    }


def template(
    name: str, *requests: Request, config: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": claim_spec(*requests, config=config)},
    }


def container(
    name: str,
    *claims: str | tuple[str, str],
    command: Sequence[str] = ("sleep", "3600"),
    resources: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a container that uses claims of its pod, or single requests of them: (claim,
    request)."""
    uses = [
        {"name": used} if isinstance(used, str) else {"name": used[0], "request": used[1]}
        for used in claims
    ]
    return {
        "name": name,
        "image": TEST_IMAGE,
        "imagePullPolicy": "Never",
        "command": list(command),
        "resources": {"claims": uses, **(resources or {})},
    }


def pod(
    name: str,
    *claims: tuple[str, dict[str, str]],
    command: Sequence[str] = ("sleep", "3600"),
    containers: Sequence[dict[str, Any]] = (),
    inits: Sequence[dict[str, Any]] = (),
    node: str | None = None,
    restart: str = "Never",
    grace: int = 1,
) -> dict[str, Any]:
    """Return a pod with claims, each (name, source). By default, one container uses all of them."""
    names = [claim_name for claim_name, _ in claims]
    spec: dict[str, Any] = {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": grace,
        "containers": list(containers) or [container("main", *names, command=command)],
        "initContainers": list(inits),
        "resourceClaims": [{"name": claim_name, **source} for claim_name, source in claims],
    }
    if node is not None:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def from_template(name: str) -> dict[str, str]:
    return {"resourceClaimTemplateName": name}


def from_claim(name: str) -> dict[str, str]:
    return {"resourceClaimName": name}


# ------------------------------------------------------------ the namespace of a test


@dataclass
class Space:
    """A namespace, and the operations of tests in it."""

    cluster: Cluster
    name: str

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", self.name, *arguments, **options).stdout

    def apply(self, *bodies: dict[str, Any]) -> None:
        listing = {"apiVersion": "v1", "kind": "List", "items": list(bodies)}
        self.kubectl("apply", "-f", "-", input=json.dumps(listing))

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        text = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def items(self, kind: str) -> list[dict[str, Any]]:
        return json.loads(self.kubectl("get", kind, "-o", "json"))["items"]

    def phase(self, name: str) -> str:
        body = self.get("pod", name)
        return body["status"].get("phase", "") if body else "Gone"

    def eviction(self, name: str) -> str | None:
        """Return the reason of a pod's condition DisruptionTarget, if it has one."""
        body = self.get("pod", name)
        conditions = body["status"].get("conditions", []) if body else []
        return next((c["reason"] for c in conditions if c["type"] == "DisruptionTarget"), None)

    def wait_phase(self, name: str, *phases: str, seconds: float = 60) -> str:
        def matching() -> str | None:
            phase = self.phase(name)
            return phase if phase in phases else None

        try:
            return wait_for(f"pod {name} to be {' or '.join(phases)}", matching, seconds=seconds)
        except ClusterError as error:
            described = self.kubectl("describe", "pod", name)
            raise AssertionError(f"{error}\n{described}") from None

    def delete(self, kind: str, name: str, *, force: bool = False, wait: bool = True) -> None:
        options = ["--grace-period=0", "--force"] if force else []
        self.kubectl("delete", kind, name, f"--wait={str(wait).lower()}", *options)

    def logs(self, name: str, container: str | None = None) -> str:
        return self.kubectl("logs", name, *([f"--container={container}"] if container else []))

    def nudge(self, name: str) -> None:
        """Change a pod, so that the kubelet syncs it immediately rather than in its next period.

        A pod that is being deleted can be gone already.
        """
        stamp = f"e2e.drakit.dev/nudge={time.monotonic_ns()}"
        self.kubectl("annotate", "pod", name, "--overwrite", stamp, check=False)

    def wait_gone(self, name: str, *, seconds: float = 60) -> None:
        wait_for(f"pod {name} to be gone", lambda: self.phase(name) == "Gone", seconds=seconds)

    def event(self, name: str, *words: str, seconds: float = 60) -> str:
        """Wait for an Event about a pod that contains all these words, and return its message."""

        def matching() -> str | None:
            texts = [event.get("message") or "" for event in self.events(name)]
            return next((t for t in reversed(texts) if all(w in t for w in words)), None)

        try:
            return wait_for(f"an event about {name} with {words}", matching, seconds=seconds)
        except ClusterError as error:
            raise AssertionError(f"{error}\n{self.kubectl('get', 'events')}") from None

    def refused(self, name: str) -> str:
        """Wait until the scheduler reports that no node fits a pod, and return its message."""
        return self.event(name, "nodes are available")

    def device_health(self, name: str) -> list[tuple[str, str]]:
        """Return health and message of each device in a pod's status."""
        body = self.get("pod", name)
        assert body is not None
        return [
            (resource["health"], resource.get("message", ""))
            for container in body["status"].get("containerStatuses", [])
            for status in container.get("allocatedResourcesStatus", [])
            for resource in status["resources"]
        ]

    def claim_of(self, pod_name: str, claim_name: str) -> dict[str, Any]:
        """Return the claim that a pod uses under its own name for it."""
        body = self.get("pod", pod_name)
        assert body is not None
        made = body["status"].get("resourceClaimStatuses", [])
        for entry in [*made, *body["spec"]["resourceClaims"]]:
            if entry["name"] == claim_name:
                found = self.get("resourceclaim", entry["resourceClaimName"])
                assert found is not None
                return found
        raise AssertionError(f"pod {pod_name} has no claim {claim_name}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the Events about an object, newest last."""
        text = self.kubectl(
            "get", "events", "-o", "json", f"--field-selector=involvedObject.name={name}"
        )
        return json.loads(text)["items"]


def devices_of(claim_body: dict[str, Any]) -> list[str]:
    """Return the devices that are allocated to a claim."""
    allocation = claim_body.get("status", {}).get("allocation") or {}
    return [result["device"] for result in allocation.get("devices", {}).get("results", [])]


# ------------------------------------------------------------ the node plugin and its traces


def slices(
    cluster: Cluster, node: str | None = None, *, driver: str = DRIVER
) -> list[dict[str, Any]]:
    """Return a driver's ResourceSlices, of one node or of all nodes."""
    items = cluster.get("resourceslices")["items"]
    return [
        item
        for item in items
        if item["spec"]["driver"] == driver and node in (None, item["spec"].get("nodeName"))
    ]


def devices(
    cluster: Cluster, node: str | None = None, *, driver: str = DRIVER
) -> dict[str, dict[str, Any]]:
    """Return a driver's published devices, keyed by name."""
    return {
        device["name"]: device
        for item in slices(cluster, node, driver=driver)
        for device in item["spec"].get("devices") or []
    }


def published(cluster: Cluster, node: str | None = None) -> set[str]:
    """Return the names of the devices that hostdev publishes."""
    return set(devices(cluster, node))


def slice_versions(cluster: Cluster, *drivers: str) -> dict[str, str]:
    """Return the resource versions of the drivers' slices. Any write changes one."""
    bodies = [body for driver in drivers for body in slices(cluster, driver=driver)]
    return {body["metadata"]["name"]: body["metadata"]["resourceVersion"] for body in bodies}


def slice_generations(cluster: Cluster, driver: str) -> dict[str, tuple[str, int]]:
    """Return a driver's slices, each with its UID and its pool's generation."""
    return {
        body["metadata"]["name"]: (body["metadata"]["uid"], body["spec"]["pool"]["generation"])
        for body in slices(cluster, driver=driver)
    }


def taints(cluster: Cluster, driver: str) -> dict[str, dict[str, str]]:
    """Return the taints of a driver's devices: device -> ``key:effect`` -> time when it was
    added."""
    return {
        name: {f"{taint['key']}:{taint['effect']}": taint["timeAdded"] for taint in body["taints"]}
        for name, body in devices(cluster, driver=driver).items()
        if body.get("taints")
    }


def cdi_files(cluster: Cluster, node: str, *, driver: str = DRIVER) -> set[str]:
    """Return the CDI files of a driver's claims on a node."""
    folder = cluster.node_path(node, "/var/run/cdi")
    return {path.name for path in folder.glob(f"{driver}-claim_*")} if folder.exists() else set()


def plugin_pod(cluster: Cluster, node: str, *, release: Release = DRAKIT) -> dict[str, Any] | None:
    """Return the pod of a release's node plugin on a node, unless it is terminating."""
    for item in plugin_pods(cluster, node, release=release):
        if "deletionTimestamp" not in item["metadata"]:
            return item
    return None


def token_of(cluster: Cluster, node: str) -> str:
    """Return a token that is bound to the plugin's pod on a node, like the one that the kubelet
    mounts."""
    body = plugin_pod(cluster, node)
    assert body is not None
    name, uid = body["metadata"]["name"], body["metadata"]["uid"]
    return cluster.kubectl(
        *("-n", NAMESPACE, "create", "token", "drakit-nodeplugin", "--bound-object-kind=Pod"),
        *(f"--bound-object-name={name}", f"--bound-object-uid={uid}"),
    ).stdout.strip()


def admin_config(cluster: Cluster) -> dict[str, Any]:
    """Return the administrator's kubeconfig."""
    flags = ("--raw", "--minify", "--flatten", "-o", "json")
    return json.loads(cluster.kubectl("config", "view", *flags).stdout)


def write_kubeconfig(cluster: Cluster, path: Path, *, token: str) -> None:
    """Write a kubeconfig with a token, readable only by its owner."""
    config = admin_config(cluster)
    config["users"] = [{"name": "account", "user": {"token": token}}]
    config["contexts"][0]["context"]["user"] = "account"
    path.touch(mode=0o600)
    path.write_text(json.dumps(config))


def plugin_pods(cluster: Cluster, node: str, *, release: Release = DRAKIT) -> list[dict[str, Any]]:
    """Return all pods of a release's node plugin on a node, because a terminating pod still serves
    claims."""
    selector = "app.kubernetes.io/component=nodeplugin"
    items = cluster.get("pods", "-n", release.namespace, "-l", selector)["items"]
    return [item for item in items if item["spec"].get("nodeName") == node]


def plugin_log(cluster: Cluster, node: str, *, release: Release = DRAKIT) -> list[dict[str, Any]]:
    """Return the log of a release's node plugin, one dictionary per line."""
    found = plugin_pod(cluster, node, release=release)
    assert found is not None
    text = cluster.kubectl("-n", release.namespace, "logs", found["metadata"]["name"]).stdout
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def signal_pod(
    cluster: Cluster, body: dict[str, Any], program: str, signal: str = "KILL"
) -> list[str]:
    """Send a signal to the processes of a pod whose command line contains `program`. Return their
    IDs. A cgroup's name contains the pod's UID, which systemd's cgroup driver writes with
    underscores."""
    uid = body["metadata"]["uid"]
    marks = f"-e {uid} -e {uid.replace('-', '_')}"
    script = (
        f"for p in $(grep -ls {marks} /proc/[0-9]*/cgroup | cut -d/ -f3); do "
        f"tr '\\0' ' ' < /proc/$p/cmdline | grep -q -- {shlex.quote(program)} "
        f"&& kill -{signal} $p && echo $p; done; true"
    )
    return cluster.exec_on_node(body["spec"]["nodeName"], ["sh", "-c", script]).stdout.split()


def restarts(body: dict[str, Any] | None) -> int:
    """Return the number of restarts of a pod's containers."""
    statuses = (body or {}).get("status", {}).get("containerStatuses", [])
    return sum(status["restartCount"] for status in statuses)


def ready(body: dict[str, Any] | None) -> bool:
    """Return whether a pod is ready."""
    conditions = (body or {}).get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


# ------------------------------------------------------------ the operator

OPERATOR = "app.kubernetes.io/component=operator"
LEASE = "drakit-operator"


def lease_holder(cluster: Cluster) -> str:
    """Return the operator's leader (its pod and an ID), or an empty string."""
    return cluster.kubectl(
        *("-n", NAMESPACE, "get", "lease", LEASE, "-o", "jsonpath={.spec.holderIdentity}"),
        check=False,
    ).stdout


def operator_metric(cluster: Cluster, series: str) -> float:
    """Return a metric of the leading operator, or 0 if it has no such series."""
    leader = lease_holder(cluster).split("_")[0]
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{leader}:8080/proxy/metrics"
    lines = cluster.kubectl("get", "--raw", path).stdout.splitlines()
    found = (line.removeprefix(f"{series} ") for line in lines if line.startswith(f"{series} "))
    return sum(map(float, found))


# ------------------------------------------------------------ zram: real block devices for pods

ZRAM_CONTROL = Path("/sys/class/zram-control")
ZRAM_BYTES = 16 * 1024 * 1024


@contextlib.contextmanager
def zram_devices(count: int) -> Iterator[list[str]]:
    """Create zram devices on the host (all nodes see them) and yield their names."""
    numbers = [int((ZRAM_CONTROL / "hot_add").read_text()) for _ in range(count)]
    try:
        for number in numbers:
            Path(f"/sys/block/zram{number}/disksize").write_text(str(ZRAM_BYTES))
        yield [f"zram{number}" for number in numbers]
    finally:
        for number in numbers:
            with contextlib.suppress(OSError):
                (ZRAM_CONTROL / "hot_remove").write_text(str(number))


# ------------------------------------------------------------ loop devices: plugged in, or disks


@contextlib.contextmanager
def loop_devices(files: Sequence[Path]) -> Iterator[list[str]]:
    """Set up loop devices on the host (all nodes see them) and yield their names."""
    devices: list[str] = []
    try:
        for file in files:
            argv = ["losetup", "--find", "--show", str(file)]
            devices.append(run(argv, timeout_seconds=10).stdout.strip())
        yield [device.removeprefix("/dev/") for device in devices]
    finally:
        for device in devices:
            run(["losetup", "--detach", device], timeout_seconds=10, check=False)


_LOOP_ADD, _LOOP_REMOVE = 0x4C80, 0x4C81


@contextlib.contextmanager
def hotplugged_loop(number: int) -> Iterator[str]:
    """Create a loop device with this number, which is not set up, and yield its name."""
    with Path("/dev/loop-control").open("rb") as control:
        fcntl.ioctl(control, _LOOP_ADD, number)
        try:
            yield f"loop{number}"
        finally:
            fcntl.ioctl(control, _LOOP_REMOVE, number)
