"""
A test's stage: a namespace, the two scripted drivers on the first node, and operations on them.

Lamps and horns are the devices of two drivers in one daemon, which is installed as a separate
release in addition to drakit's.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from e2e.cluster.api import Cluster
from e2e.images.vendor import repository_name
from e2e.kit import (
    Space,
    cdi_files,
    device_class,
    from_template,
    plugin_pod,
    plugin_pods,
    pod,
    ready,
    restarts,
    slices,
    taints,
    template,
    wait_for,
)
from e2e.release import Release, install
from e2e.scripted.control import Operation, Script

SCRIPTED = Release(name="scripted", namespace="scripted-system")

LAMPS = "scripted.test.drakit.dev"
HORNS = "scripted-two.test.drakit.dev"
CLASSES = {"lamp.test": LAMPS, "horn.test": HORNS}
DEVICES = 4

STOP_GRACE_SECONDS = 15
RECOVERY_SECONDS = 3
EVICTION_SECONDS = 2
DEVICE_TIMES = {
    "endpointStopGracePeriod": f"{STOP_GRACE_SECONDS}s",
    "startGracePeriod": "6s",
    "health": {
        "recoveryPeriod": f"{RECOVERY_SECONDS}s",
        "evictionDelay": f"{EVICTION_SECONDS}s",
    },
}
"""Long enough for the actions of a test, and short enough to wait for."""

PROCESS = "-m drakit_nodeplugin --config"
"""A part of the daemon's command line that no other command of drakit contains."""


def folder(driver: str) -> str:
    """The driver's data directory on the node."""
    return f"/var/lib/kubelet/plugins/drakit.dev/drivers/{driver}"


def scripted_values(
    cluster: Cluster, *, vendor: str = "scripted", **nodeplugin: Any
) -> dict[str, Any]:
    """Return the chart's values. `nodeplugin` contains further values of that component."""
    drivers = [
        {
            "driver": f"scripted:{kind}",
            "name": driver,
            "config": {"folder": folder(driver), "devices": DEVICES},
        }
        for kind, driver in (("Scripted", LAMPS), ("ScriptedTwo", HORNS))
    ]
    return {
        "image": {"repository": repository_name(vendor)},
        "hostdev": {"enabled": False},
        "operator": {"enabled": False},
        "nodeplugin": {
            "drivers": drivers,
            "nodeSelector": {"kubernetes.io/hostname": cluster.nodes[0]},
            "devices": DEVICE_TIMES,
            "claimStatus": {"enabled": True},
            **nodeplugin,
        },
    }


def install_scripted(
    cluster: Cluster, *, build: str = "", wait: bool = True, **nodeplugin: Any
) -> None:
    """Install the scripted drivers, or upgrade them to other values of the node plugin."""
    install(
        cluster, SCRIPTED, values=scripted_values(cluster, **nodeplugin), build=build, wait=wait
    )


def scripted_classes() -> list[dict[str, Any]]:
    return [device_class(name, driver) for name, driver in CLASSES.items()]


def wait_scripted(cluster: Cluster) -> None:
    """Wait until the daemon is ready and both drivers have published their devices, all usable."""
    node = cluster.nodes[0]
    wait_for(
        f"the scripted drivers on {node} to be ready",
        lambda: ready(plugin_pod(cluster, node, release=SCRIPTED)),
        seconds=120,
    )
    for driver in CLASSES.values():
        wait_for(
            f"the devices of {driver} to be published",
            lambda: slices(cluster, node, driver=driver),  # noqa: B023
        )
        wait_for(f"no taint of {driver}", lambda: not taints(cluster, driver))  # noqa: B023


def opaque(driver: str, parameters: dict[str, Any], *requests: str) -> dict[str, Any]:
    """Return opaque parameters for a driver, in the form of a class or claim, for some requests or
    for all."""
    body: dict[str, Any] = {"opaque": {"driver": driver, "parameters": parameters}}
    return {**body, "requests": list(requests)} if requests else body


def number(driver: str, index: int) -> str:
    """Return a CEL selector for one device of a driver."""
    return f'device.attributes["{driver}"].index == {index}'


def wait_began(script: Script, operation: Operation) -> None:
    """Wait until a driver is in a call."""
    wait_for(f"the driver's {operation}", lambda: script.calls(operation, "began"), period=0.05)


class Stage(Space):
    """A namespace of a test, with the scripts of the drivers on the first node."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster, name)
        self.node = cluster.nodes[0]
        self._since = datetime.now(UTC)
        self.lamps, self.horns = (
            Script(cluster.node_path(self.node, folder(driver))) for driver in (LAMPS, HORNS)
        )
        self.scripts = (self.lamps, self.horns)

    def with_lamp(
        self, name: str, index: int, *, tolerations: Sequence[dict[str, str]] = (), grace: int = 1
    ) -> None:
        """Apply a pod with one lamp, through a template with its name. Does not wait."""
        exactly: dict[str, Any] = {
            "deviceClassName": "lamp.test",
            "selectors": [{"cel": {"expression": number(LAMPS, index)}}],
            "tolerations": list(tolerations),
        }
        self.apply(
            template(name, {"name": "lamp", "exactly": exactly}),
            pod(name, ("lamp", from_template(name)), grace=grace),
        )

    def uid(self, pod_name: str, claim_name: str) -> str:
        """Return the UID of a claim that a pod uses."""
        return self.claim_of(pod_name, claim_name)["metadata"]["uid"]

    def prepared(self) -> set[str]:
        """Return the UIDs of the claims for which the drivers hold something."""
        held = set[str]().union(*(script.held() for script in self.scripts))
        return {name.split("@")[1] for name in held}

    def plugin(self) -> dict[str, Any] | None:
        return plugin_pod(self.cluster, self.node, release=SCRIPTED)

    def log(self) -> list[dict[str, Any]]:
        """
        Return the log of the daemon in this test, one dictionary per line.

        Reads the node's files, because they are available without a kubelet, and include killed
        containers.
        """
        lines: list[dict[str, Any]] = []
        pods = self.cluster.node_path(self.node, "/var/log/pods")
        for path in pods.glob(f"{SCRIPTED.namespace}_*/nodeplugin/*.log"):
            # Time, stream and a flag precede the container's output.
            texts = [line.split(" ", 3)[-1] for line in path.read_text().splitlines()]
            lines += [json.loads(text) for text in texts if text.startswith("{")]
        since = self._since.isoformat()
        return sorted((line for line in lines if line["time"] >= since), key=itemgetter("time"))

    def files(self) -> set[str]:
        """Return the CDI files of both drivers."""
        return set().union(
            *(cdi_files(self.cluster, self.node, driver=driver) for driver in CLASSES.values())
        )

    def kill_plugin(self, *, until_ready: bool = True) -> None:
        """Send SIGKILL to the daemon, and wait until the kubelet has restarted it. While a driver
        is stopped, the daemon does not become ready."""
        before = restarts(self.plugin())
        self.cluster.exec_on_node(self.node, ["pkill", "-KILL", "-f", "--", PROCESS])
        wait_for(
            "the daemon to be started again",
            lambda: restarts(self.plugin()) > before and (not until_ready or ready(self.plugin())),
            seconds=120,
        )

    @contextmanager
    def without_plugin(self) -> Generator[None]:
        """Remove the daemon from the node during the block."""
        self._place_plugin("nowhere")
        try:
            wait_for("the daemon to be gone", self._has_no_plugin, seconds=90)
            yield
        finally:
            self._place_plugin(self.node)
            wait_for("the daemon", lambda: ready(self.plugin()), seconds=90)

    def _has_no_plugin(self) -> bool:
        return not plugin_pods(self.cluster, self.node, release=SCRIPTED)

    def _place_plugin(self, node: str) -> None:
        selector = {"kubernetes.io/hostname": node}
        patch = {"spec": {"template": {"spec": {"nodeSelector": selector}}}}
        self.cluster.kubectl(
            *("-n", SCRIPTED.namespace, "patch", "daemonset", "scripted-drakit-nodeplugin"),
            *("--patch", json.dumps(patch)),
        )

    def drakit(self, *arguments: str) -> str:
        """Return the output of a `drakit` command in the daemon's pod. Fails if the command
        fails."""
        plugin = self.plugin()
        assert plugin is not None
        argv = ["-n", SCRIPTED.namespace, "exec", plugin["metadata"]["name"], "--", "drakit"]
        return self.cluster.kubectl(*argv, *arguments).stdout

    def checkpoint(self, driver: str) -> dict[str, Any]:
        """Return the daemon's stored state of a driver, as in ``drakit node checkpoint show``."""
        text = self.drakit("node", "checkpoint", "show", "--json", "--driver", driver)
        (checkpoint,) = json.loads(text)["checkpoints"]
        return checkpoint

    def wait_empty(self) -> None:
        """Wait until the drivers hold nothing for claims, and there are no CDI files."""
        wait_for(
            "all claims to be unprepared",
            lambda: not (self.files() or any(script.held() for script in self.scripts)),
            seconds=90,
        )

    def show(self) -> None:
        """Print the calls and the log, to diagnose a failed test."""
        for script in self.scripts:
            print(script.folder.name, *script.story(), sep="\n  ")
            print("  held:", *script.held())
        for line in self.log()[-40:]:
            print({key: line[key] for key in line if key not in ("logger", "level")})
