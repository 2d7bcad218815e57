"""
The release `foreign`: devices of other vendors' programs, on the first node.

It contains Kubernetes' sample device plugin and NVIDIA's, as in their manifests; our own device
plugin that reports the content of a file; the example backend; and one simulated device of the
daemon itself.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.api import Cluster
from e2e.images import deviceplugins
from e2e.images.backend import IMAGE as BACKEND_IMAGE
from e2e.kit import (
    Space,
    plugin_log,
    plugin_pod,
    ready,
    restarts,
    signal_pod,
    slice_generations,
    slices,
    taints,
    wait_for,
)
from e2e.nvidia import GPU, GPU_IDS, NVIDIA_SET, nvidia_objects
from e2e.release import Release, install

FOREIGN = Release(name="foreign", namespace="foreign-system")

PLUGINS = "deviceplugin.drakit.dev"
"""The driver of all device plugins."""

BLINKERS = "blinkers.example.com"
"""The driver of the example backend."""

LOCAL = "local.test.drakit.dev"
"""The driver in the daemon's own process."""

SAMPLE, SAMPLE_CLASS = "example.com/resource", "resource.example.com"
FUSE = "nodes.test/fuse"
MOVED = "nodes.test/moved"
"""A resource with a class, but without a program until a test starts one."""

GREEDY = "nodes.test/greedy"
"""A resource with a class, whose device plugin requests more than its entry allows."""

CLASH = "nodes.test/clash"
"""A resource that two components try to serve."""

COUNT, COUNT_CLASS = "nodes.test/count", "count.nodes.test"
"""A resource whose ten devices share one device node."""

THIEF = "nodes.test/thief"
"""The only allowed resource of a device plugin that registers another one."""

THIEF_BACKEND = "thief.example.com"
"""The only allowed driver of a backend that announces another one."""

APART = "apart.example.com"
"""The driver of a Python class in its own container, which a test starts."""

BLINKER_CLASS = "blinkers.example.com"
LOCAL_CLASS = f"gpu.{LOCAL}"

SAMPLE_SET, NODES_SET, BACKEND_SET = "sample-device-plugin", "nodes", "blinkers"
PROGRAMS = {
    SAMPLE_SET: "sample-device-plugin",
    NVIDIA_SET: "nvidia-device-plugin",
    NODES_SET: "/nodes",
    BACKEND_SET: "/blinkers",
}
NAMESPACES = {BACKEND_SET: "blinkers"}
"""Namespaces of programs that are not in the release's namespace."""

STOP_GRACE_SECONDS = 12
START_GRACE_SECONDS = 20
RECOVERY_SECONDS = 2
DEVICE_TIMES = {
    "endpointStopGracePeriod": f"{STOP_GRACE_SECONDS}s",
    # Kubernetes' stub waits for 10 s before it registers again.
    "startGracePeriod": f"{START_GRACE_SECONDS}s",
    "health": {"recoveryPeriod": f"{RECOVERY_SECONDS}s"},
}

OURS = "/var/lib/kubelet/plugins/drakit.dev/device-plugins"
"""The parent of the directories of device plugins."""
KUBELETS = "/var/lib/kubelet/device-plugins"
PLANS = "/var/lib/kubelet/nodes.test"
BLINKERS_DIRECTORY = "/var/lib/blinkers"
BLINKERS_STATE = "/run/blinkers"
BACKENDS = "/var/lib/kubelet/plugins/drakit.dev/backends"
"""The parent of the directories of backends."""

EXAMPLES = Path(__file__).parents[1] / "examples"

FUSE_DEVICES = {
    f"fuse:{number}": {
        "node": "/dev/fuse",
        "numa": number,
        "env": {f"FUSE_{number}": "here"},
        "annotations": {"nodes.test/fuse": "taken"},
    }
    for number in range(2)
}
"""Devices with IDs that are not DNS labels."""


def foreign_values(cluster: Cluster) -> dict[str, Any]:
    """The chart's values."""
    none = {"count": 0}
    local = {"driverName": LOCAL, "gpu": {"count": 1, "partitions": []}, "nic": none, "cpu": none}
    return {
        "hostdev": {"enabled": False},
        "operator": {"enabled": False},
        "simulated": {"enabled": True, "config": local},
        # These lists allow only the edits that the programs request in the tests.
        "backends": {
            "enabled": True,
            "allowed": {
                **_example_values("backend")["backends"]["allowed"],
                "thief": {"driver": THIEF_BACKEND},
                "apart": {"driver": APART, "devices": ["/dev/fuse"]},
            },
        },
        "devicePlugins": {
            "enabled": True,
            "metadataFiles": True,
            "plugins": {
                **_example_values("device-plugin")["devicePlugins"]["plugins"],
                "nvidia": {"resources": [GPU], "env": ["NVIDIA_*"]},
                NODES_SET: {"resources": [FUSE], "devices": ["/dev/fuse"], "env": ["FUSE_*"]},
                "moved": {"resources": [MOVED], "devices": ["/dev/fuse"]},
                "clash": {"resources": [CLASH], "devices": ["/dev/fuse"]},
                "count": {"resources": [COUNT], "devices": ["/dev/fuse"], "env": ["COUNT_*"]},
                "thief": {"resources": [THIEF], "devices": ["/dev/fuse"]},
                "greedy": {
                    "resources": [GREEDY],
                    "devices": ["/dev/fuse"],
                    "mounts": {BLINKERS_DIRECTORY: "ro"},
                },
            },
        },
        "nodeplugin": {
            "nodeSelector": {"kubernetes.io/hostname": cluster.nodes[0]},
            "devices": DEVICE_TIMES,
        },
    }


def _example_values(example: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / example / "values.yaml").read_text())


def sample_set() -> dict[str, Any]:
    """Return the sample's DaemonSet: the example's own, except for the image and the update
    strategy."""
    body: dict[str, Any] = yaml.safe_load((EXAMPLES / "device-plugin/daemonset.yaml").read_text())
    (container,) = body["spec"]["template"]["spec"]["containers"]
    container |= {"image": deviceplugins.IMAGE, "imagePullPolicy": "Never"}
    body["metadata"]["namespace"] = FOREIGN.namespace
    # Its pod is replaced when the program changes.
    body["spec"]["updateStrategy"] = {"type": "RollingUpdate"}
    return body


def daemon_set(
    name: str, image: str, command: Sequence[str], directories: dict[str, str]
) -> dict[str, Any]:
    """Return a DaemonSet with directories of the host: path in the container to path on the
    host."""
    paths = list(directories.items())
    container = {
        "name": name,
        "image": image,
        "imagePullPolicy": "Never",
        "command": list(command),
        "volumeMounts": [
            {"name": f"d{index}", "mountPath": inside} for index, (inside, _) in enumerate(paths)
        ],
    }
    volumes = [
        {"name": f"d{index}", "hostPath": {"path": outside, "type": "DirectoryOrCreate"}}
        for index, (_, outside) in enumerate(paths)
    ]
    spec = {
        "containers": [container],
        "volumes": volumes,
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 1,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": FOREIGN.namespace},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": spec},
        },
    }


def nodes_set(
    name: str = NODES_SET, *, directory: str | None = None, plan: str = "plan"
) -> dict[str, Any]:
    """Return the DaemonSet of our device plugin. It registers in the directory of the entry with
    its name, or in the given one."""
    return daemon_set(
        name,
        deviceplugins.IMAGE,
        ["/nodes", f"/plans/{plan}.json"],
        {KUBELETS: directory or f"{OURS}/{name}", "/plans": PLANS},
    )


def blinkers_set(name: str, *, driver: str, directory: str) -> dict[str, Any]:
    """Return the DaemonSet of another instance of the example backend, with the directory of the
    entry with its name. `directory` contains its blinkers."""
    state = f"/run/{name}"
    return daemon_set(
        name,
        BACKEND_IMAGE,
        [
            "/blinkers",
            f"-driver-name={driver}",
            f"-socket=/run/drakit/{name}.sock",
            f"-blinkers={directory}",
            f"-state={state}",
        ],
        {"/run/drakit": f"{BACKENDS}/{name}", directory: directory, state: state},
    )


def backend_objects() -> list[dict[str, Any]]:
    """Return namespace, DaemonSet and class of the example backend, unchanged except for the
    image."""
    bodies: list[dict[str, Any]] = list(
        yaml.safe_load_all((EXAMPLES / "backend/backend.yaml").read_text())
    )
    for body in bodies:
        if body["kind"] == "DaemonSet":
            (container,) = body["spec"]["template"]["spec"]["containers"]
            container |= {"image": BACKEND_IMAGE, "imagePullPolicy": "Never"}
    return bodies


def namespace_of_set(name: str) -> str:
    """Return the namespace of a DaemonSet."""
    return NAMESPACES.get(name, FOREIGN.namespace)


class Yard(Space):
    """A namespace of a test, and the foreign programs on the first node."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster, name)
        self.node = cluster.nodes[0]

    # ------------------------------------------------------------ published state

    def devices(self, driver: str = PLUGINS) -> dict[str, dict[str, Any]]:
        """Return a driver's published devices. Devices of device plugins have the plugins' IDs as
        keys."""
        found: dict[str, dict[str, Any]] = {}
        for body in slices(self.cluster, self.node, driver=driver):
            for device in body["spec"].get("devices") or []:
                given = device.get("attributes", {}).get("id", {}).get("string")
                found[given or device["name"]] = device
        return found

    def of(self, resource: str) -> dict[str, dict[str, Any]]:
        """Return the devices of one resource of a device plugin, by the plugin's IDs."""
        return {
            given: device
            for given, device in self.devices().items()
            if device["attributes"]["resource"]["string"] == resource
        }

    def tainted(self, driver: str = PLUGINS) -> set[str]:
        """Return all taints of a driver's devices."""
        return {key for found in taints(self.cluster, driver).values() for key in found}

    def published(self, driver: str = PLUGINS) -> dict[str, tuple[str, int]]:
        """Return the slices of a driver, each with its UID and its pool's generation."""
        return slice_generations(self.cluster, driver)

    def wait_untainted(self, driver: str = PLUGINS) -> None:
        wait_for(
            f"the devices of {driver} to be there without taints",
            lambda: self.devices(driver) and not self.tainted(driver),
        )

    def plugin(self) -> dict[str, Any] | None:
        return plugin_pod(self.cluster, self.node, release=FOREIGN)

    def log(self) -> list[dict[str, Any]]:
        """Return the log of the daemon, one dictionary per line."""
        return plugin_log(self.cluster, self.node, release=FOREIGN)

    def inside(self, pod: str, script: str) -> list[str]:
        """Return the lines that a shell prints in a pod's container."""
        return self.kubectl("exec", pod, "--", "sh", "-c", script).splitlines()

    def node_event(self, *words: str) -> str:
        """Wait for an Event of the node that contains all these words, and return its message."""

        def matching() -> str | None:
            events = self.cluster.get("events", "-A", "--field-selector=involvedObject.kind=Node")
            texts = [f"{event['reason']}: {event.get('message', '')}" for event in events["items"]]
            return next((text for text in texts if all(word in text for word in words)), None)

        return wait_for(f"an Event of the node with {words}", matching)

    # ------------------------------------------------------------ foreign programs

    def program(self, name: str) -> dict[str, Any] | None:
        """Return the pod of a DaemonSet that is not being deleted."""
        alive = [
            item
            for item in self.cluster.get("pods", "-n", namespace_of_set(name))["items"]
            for owner in item["metadata"].get("ownerReferences", [])
            if owner["name"] == name and "deletionTimestamp" not in item["metadata"]
        ]
        return alive[0] if alive else None

    def calls(self, name: str, call: str) -> int:
        """Return the number of calls in the log of a DaemonSet's current container."""
        return self.logged(name, f'"{call}"')

    def logged(self, name: str, words: str) -> int:
        """Return the number of lines with these words in the log of a DaemonSet's current
        container."""
        body = self.program(name)
        assert body is not None
        name = body["metadata"]["name"]
        done = self.cluster.kubectl("-n", body["metadata"]["namespace"], "logs", name)
        return sum(words in line for line in done.stdout.splitlines())

    def place(self, name: str, node: str | None = None) -> None:
        """Let a DaemonSet run on a node, by default the first one. Does not wait."""
        selector = {"kubernetes.io/hostname": node or self.node}
        patch = {"spec": {"template": {"spec": {"nodeSelector": selector}}}}
        self.cluster.kubectl(
            *("-n", namespace_of_set(name), "patch", "daemonset", name),
            *("--patch", json.dumps(patch)),
        )

    def remove(self, *names: str) -> None:
        """Remove programs, and wait until they are gone."""
        for name in names:
            self.place(name, "nowhere")
        for name in names:
            wait_for(f"{name} to be gone", lambda: self.program(name) is None)  # noqa: B023

    def kill(self, name: str) -> None:
        """Send SIGKILL to a program, and wait until the kubelet has restarted it."""
        body = self.program(name)
        assert body is not None
        before = restarts(body)
        assert signal_pod(self.cluster, body, PROGRAMS[name]), f"{name} has no process"
        wait_for(
            f"{name} to be started again", lambda: restarts(self.program(name)) > before, seconds=90
        )

    def kill_plugin(self) -> None:
        """Send SIGKILL to the daemon, and wait until the kubelet has restarted it."""
        body = self.plugin()
        assert body is not None
        before = restarts(body)
        assert signal_pod(self.cluster, body, "drakit-nodeplugin"), "the daemon has no process"
        wait_for(
            "the daemon to be started again",
            lambda: restarts(self.plugin()) > before and ready(self.plugin()),
            seconds=120,
        )

    # ------------------------------------------------------------ devices of the programs

    def plan(self, plan: dict[str, Any], name: str = "plan") -> None:
        """Set the devices of our device plugin."""
        write_plan(self.cluster, plan, name)

    def blinker(self, name: str) -> None:
        """Create a blinker."""
        path = self.cluster.node_path(self.node, BLINKERS_DIRECTORY) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def held(self) -> set[str]:
        """Return the blinkers that claims hold, according to the backend's state."""
        folder = self.cluster.node_path(self.node, BLINKERS_STATE)
        return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def write_plan(cluster: Cluster, plan: dict[str, Any], name: str = "plan") -> None:
    folder = cluster.node_path(cluster.nodes[0], PLANS)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{name}.part"
    partial.write_text(json.dumps(plan))
    partial.replace(folder / f"{name}.json")


def install_foreign(cluster: Cluster, *, build: str, programs: str) -> None:
    """
    Install the release and the programs, and wait until all devices are published.

    :param build: a name for the content of drakit's images.
    :param programs: a name for the content of the programs' image; if it changes, pods are
        replaced.
    """
    write_plan(cluster, {FUSE: {"preStart": True, "devices": FUSE_DEVICES}})
    # Start the programs first, because in real clusters, the order is not controlled, either.
    cluster.kubectl("create", "namespace", FOREIGN.namespace, check=False)
    bodies = [
        sample_set(),
        nodes_set(),
        *nvidia_objects(namespace=FOREIGN.namespace, directory=f"{OURS}/nvidia"),
        *backend_objects(),
    ]
    for body in bodies:
        if body["kind"] == "DaemonSet":
            pods = body["spec"]["template"]
            pods["spec"]["nodeSelector"] = {"kubernetes.io/hostname": cluster.nodes[0]}
            pods["metadata"]["annotations"] = {"drakit.dev/build": programs}
    cluster.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies}))
    install(cluster, FOREIGN, values=foreign_values(cluster), build=build)
    wait_foreign(cluster)


def remove_foreign(cluster: Cluster) -> None:
    """Remove everything that :func:`install_foreign` has created in addition to the release."""
    cluster.kubectl("delete", "deviceclass", BLINKER_CLASS)
    names = {FOREIGN.namespace, *NAMESPACES.values()}
    cluster.kubectl("delete", "namespace", *sorted(names), timeout=120)
    for device in ("Dev-1", "Dev-2"):
        cluster.exec_on_node(cluster.nodes[0], ["rm", "-f", f"/tmp/{device}"])


def wait_foreign(cluster: Cluster) -> None:
    """
    Wait until the daemon is ready and all devices are published without taints.

    Blinkers do not survive a reboot, so create them again.
    """
    yard = Yard(cluster, "default")
    for name in ("left", "right"):
        yard.blinker(name)
    wait_for("the foreign daemon to be ready", lambda: ready(yard.plugin()), seconds=120)
    # A program that found no socket exits, and restarts with increasing delays.
    for resource, count in ((SAMPLE, 2), (FUSE, len(FUSE_DEVICES)), (GPU, len(GPU_IDS))):
        wait_for(
            f"{count} devices of {resource} to be published",
            lambda: len(yard.of(resource)) == count,  # noqa: B023
            seconds=120,
        )
    wait_for("both blinkers to be published", lambda: len(yard.devices(BLINKERS)) == 2)
    for driver in (PLUGINS, BLINKERS, LOCAL):
        yard.wait_untainted(driver)


@contextmanager
def with_set(yard: Yard, body: dict[str, Any]) -> Generator[None]:
    """Run a DaemonSet on the first node during the block."""
    body["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": yard.node}
    yard.cluster.apply(json.dumps(body))
    try:
        yield
    finally:
        name = body["metadata"]["name"]
        yard.cluster.kubectl("-n", FOREIGN.namespace, "delete", "daemonset", name)
        wait_for(f"{name} to be gone", lambda: yard.program(name) is None)
