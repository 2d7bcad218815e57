"""
The release `simulated`: simulated devices on the first node, and operations on them.

The daemon has two drivers: the chart's own, and one whose devices have list attributes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.api import Cluster
from e2e.kit import TEST_IMAGE, Space, devices, plugin_pod, pod, ready, wait_for
from e2e.release import Release, install

SIMULATED = Release(name="simulated", namespace="simulated-system")

DRIVER = "simulated.drakit.dev"
LISTS = "lists.simulated.test.drakit.dev"
DRIVERS = (DRIVER, LISTS)

GPU, PARTITION, NIC, CPU = (f"{kind}.{DRIVER}" for kind in ("gpu", "partition", "nic", "cpu"))
STAY = "trap exit TERM; sleep 3600 & wait"
"""The command of a container that runs until its pod is deleted, and then ends immediately."""

EXAMPLES = Path(__file__).parents[1] / "examples"


def simulated_values(cluster: Cluster) -> dict[str, Any]:
    """Return the chart's values. Those of the chart's own driver are the defaults."""
    none = {"count": 0}
    lists = {"driverName": LISTS, "gpu": none, "nic": {"listAttributes": True}, "cpu": none}
    return {
        "hostdev": {"enabled": False},
        "operator": {"enabled": False},
        "simulated": {"enabled": True},
        "nodeplugin": {
            "drivers": [{"driver": "simulated", "config": lists}],
            "nodeSelector": {"kubernetes.io/hostname": cluster.nodes[0]},
            "devices": {"health": {"recoveryPeriod": "2s"}},
        },
    }


def install_simulated(cluster: Cluster, *, build: str) -> None:
    """Install the release, and wait until all drivers have published their devices."""
    install(cluster, SIMULATED, values=simulated_values(cluster), build=build)
    wait_simulated(cluster)


def wait_simulated(cluster: Cluster) -> None:
    """Wait until the daemon is ready and all drivers have published their devices, all healthy."""
    node = cluster.nodes[0]
    wait_for(
        f"the simulated drivers on {node} to be ready",
        lambda: ready(plugin_pod(cluster, node, release=SIMULATED)),
        seconds=120,
    )
    for driver in DRIVERS:
        wait_for(
            f"the devices of {driver} to be published without taints",
            lambda: _well(devices(cluster, driver=driver)),  # noqa: B023
        )


def _well(devices: dict[str, dict[str, Any]]) -> bool:
    return bool(devices) and not any(device.get("taints") for device in devices.values())


def example(name: str) -> list[dict[str, Any]]:
    """Return an example's objects as in its file, but with an image that needs no pull, and pods
    that end immediately."""
    objects = list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))
    for body in objects:
        if body["kind"] == "Pod":
            body["spec"]["terminationGracePeriodSeconds"] = 1
            for container in body["spec"]["containers"]:
                container |= {"image": TEST_IMAGE, "imagePullPolicy": "Never"}
                *shell, script = container["command"]
                container["command"] = [*shell, script.replace("sleep 3600", f"{{ {STAY}; }}")]
    return objects


def user(name: str, *claims: tuple[str, dict[str, str]], **options: Any) -> dict[str, Any]:
    """Return a pod that uses claims until it is deleted."""
    return pod(name, *claims, command=["sh", "-c", STAY], **options)


def amount(request: str, class_name: str, **capacity: str) -> dict[str, Any]:
    """Return a request for an amount of a device that claims share."""
    return {
        "name": request,
        "exactly": {"deviceClassName": class_name, "capacity": {"requests": capacity}},
    }


def of_gpu(name: str) -> str:
    """Return a CEL selector for the partitions of one GPU."""
    return f'device.attributes["{DRIVER}"].parent == "{name}"'


def profile(size: str) -> str:
    """Return a CEL selector for the partitions of one size."""
    return f'device.attributes["{DRIVER}"].profile == "{size}"'


def index(number: int) -> str:
    """Return a CEL selector for one GPU or interface."""
    return f'device.attributes["{DRIVER}"].index == {number}'


class Lab(Space):
    """A namespace of a test, and the control files of the drivers on the first node."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster, name)
        self.node = cluster.nodes[0]

    def _control(self, driver: str) -> Path:
        folder = self.cluster.node_path(
            self.node, f"/var/lib/kubelet/plugins/drakit.dev/drivers/{driver}"
        )
        return folder / "control.json"

    def command(self, driver: str = DRIVER, **command: Any) -> None:
        """Write the control file of a driver, in the format of docs/start/simulated-devices.md."""
        path = self._control(driver)
        partial = path.with_name(".control.json.part")
        partial.write_text(json.dumps(command))
        partial.replace(path)

    def reset(self) -> None:
        """Remove all commands of all drivers."""
        for driver in DRIVERS:
            self._control(driver).unlink(missing_ok=True)

    def devices(self, driver: str = DRIVER) -> dict[str, dict[str, Any]]:
        """Return a driver's published devices, keyed by name."""
        return devices(self.cluster, driver=driver)

    def facts(self, pod_name: str, container: str | None = None) -> list[dict[str, Any]]:
        """Return the devices in a container's environment, in order."""
        variables = self.environment(pod_name, container)
        return [
            json.loads(value)
            for name, value in sorted(variables.items())
            if name.startswith("SIMULATED_") and value.startswith("{")
        ]

    def environment(self, pod_name: str, container: str | None = None) -> dict[str, str]:
        """Return a running container's environment."""
        chosen = [f"--container={container}"] if container else []
        text = self.kubectl("exec", pod_name, *chosen, "--", "env")
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def results(self, pod_name: str, claim_name: str) -> list[dict[str, Any]]:
        """Return the allocation results of a pod's claim."""
        body = self.claim_of(pod_name, claim_name)
        return body["status"]["allocation"]["devices"]["results"]
