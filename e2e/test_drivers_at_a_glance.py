"""
DeviceDrivers on a real API server: another project's driver appears, breaks, is repaired and
disappears, and the operator restarts in between.

A control plane without nodes is sufficient: the test writes Nodes and ResourceSlices in place of
kubelets and drivers. The operator runs as a local process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from drakit_formats import crds
from e2e.alone import control_plane, operator
from e2e.cluster.api import Capability, Cluster
from e2e.kit import wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.feature("operator"),
    pytest.mark.needs(Capability.CONTROL_PLANE_ALONE),
]

DRIVER = "gpu.example.com"
LABELS = {"example.com/gpu": "true"}

LASTING_SECONDS = 60
"""Maximum time until a problem that lasts for 30 s is in the status."""


class Scene:
    """Two nodes, and the driver's ResourceSlices."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.not_ready: set[str] = set()
        for node in ("n1", "n2"):
            metadata = {"name": node, "labels": LABELS}
            self.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        self.beat()

    def apply(self, body: dict[str, Any]) -> None:
        self.cluster.apply(json.dumps(body))

    def beat(self) -> None:
        """Write the heartbeats of the nodes. Without them, a node becomes not ready after 40 s."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for node in ("n1", "n2"):
            status = "False" if node in self.not_ready else "True"
            ready = {"type": "Ready", "status": status, "lastHeartbeatTime": now}
            patch = json.dumps({"status": {"conditions": [ready]}})
            options = ("--subresource=status", "--type=merge", "-p", patch)
            self.cluster.kubectl("patch", "node", node, *options)

    def publish(self, node: str, *, slices: int = 1) -> None:
        """Write a ResourceSlice of a pool with this number of slices."""
        self.apply(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceSlice",
                "metadata": {"name": f"{node}-gpu"},
                "spec": {
                    "driver": DRIVER,
                    "nodeName": node,
                    "pool": {"name": node, "generation": 1, "resourceSliceCount": slices},
                    "devices": [{"name": "gpu-0"}, {"name": "gpu-1"}],
                },
            }
        )

    def withdraw(self, node: str) -> None:
        self.cluster.kubectl("delete", "resourceslice", f"{node}-gpu")

    def body(self) -> dict[str, Any]:
        return self.cluster.get("devicedriver", DRIVER)

    def condition(self, wanted: str) -> dict[str, Any]:
        conditions = self.body().get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == wanted), {})

    def rules(self) -> list[str]:
        """Return the names of the devices that DeviceTaintRules taint."""
        items = self.cluster.get("devicetaintrules")["items"]
        return sorted(each["spec"]["deviceSelector"]["device"] for each in items)

    def wait(
        self, what: str, look: Callable[[], object], *, seconds: int = LASTING_SECONDS
    ) -> None:
        def beat_and_look() -> object:
            self.beat()
            return look()

        wait_for(what, beat_and_look, seconds=seconds, period=2)

    def wait_for_ready(self, status: str, reason: str) -> None:
        def look() -> bool:
            found = self.condition("Ready")
            return (found.get("status"), found.get("reason")) == (status, reason)

        self.wait(f"Ready={status} with the reason {reason}", look)


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with control_plane("drivers") as started:
        yield started


@pytest.fixture
def scene(server: Cluster) -> Iterator[Scene]:
    yield Scene(server)
    server.kubectl("delete", "devicedrivers,resourceslices,nodes", "--all", "--timeout=20s")


def columns(scene: Scene) -> list[str]:
    """Return the columns of the object, or nothing if it does not exist."""
    shown = scene.cluster.kubectl("get", "ddr", DRIVER, "--no-headers", check=False)
    return shown.stdout.split()


def test_a_driver_of_others_breaks_and_is_mended(scene, tmp_path):
    scene.publish("n1")
    scene.publish("n2")
    with operator(scene.cluster, tmp_path):
        wait_for("the object", lambda: columns(scene)[1:4] == ["True", "Ready", "2"], seconds=30)
        assert columns(scene)[4:6] == ["2", "2"]
        wait_for("the devices", lambda: columns(scene)[6:9] == ["4", "0", "0"], seconds=40)

        # A node that must have the driver loses its ResourceSlices, as after a crash of the plugin.
        spec = {"version": "1.4.0", "nodeSelector": {"matchLabels": LABELS}}
        patch = ("patch", "ddr", DRIVER, "--type=merge", "-p", json.dumps({"spec": spec}))
        scene.cluster.kubectl(*patch)
        scene.withdraw("n2")
        scene.wait_for_ready("False", "PluginMissing")
        assert columns(scene)[1:7] == ["1.4.0", "False", "PluginMissing", "2", "1", "1"]
        assert "spec.nodeName=n2" in scene.condition("Registered")["message"]
        assert [each["node"] for each in scene.body()["status"]["problems"]] == ["n2"]
        scene.wait("the devices", lambda: columns(scene)[7] == "2")
        since = scene.condition("Ready")["lastTransitionTime"]

    # Another operator leads: nothing is forgotten, and nothing is written.
    version = scene.body()["metadata"]["resourceVersion"]
    with operator(scene.cluster, tmp_path):
        scene.beat()
        time.sleep(15)
        assert scene.condition("Ready")["lastTransitionTime"] == since
        assert scene.body()["metadata"]["resourceVersion"] == version

        scene.publish("n2")
        scene.wait_for_ready("True", "Ready")
        events = scene.cluster.get("events", "-n", "default")["items"]
        reported = {each["reason"] for each in events if each["involvedObject"]["name"] == DRIVER}
        assert reported == {"PluginMissing", "Registered"}


@pytest.mark.slow
def test_an_incomplete_pool_and_what_remains_of_a_driver(scene, tmp_path):
    scene.publish("n1", slices=2)
    with operator(scene.cluster, tmp_path):
        wait_for("the object", lambda: columns(scene) != [], seconds=30)
        scene.wait_for_ready("False", "PoolIncomplete")
        scene.withdraw("n1")
        scene.wait_for_ready("False", "NotFound")
        assert "kubectl delete devicedriver" in scene.condition("Installed")["message"]
    # The operator is gone, but the object can still be deleted.
    scene.cluster.kubectl("delete", "ddr", DRIVER, "--timeout=5s")


@pytest.mark.slow
def test_devices_are_tainted_until_the_plugin_is_back_or_the_object_is_gone(scene, tmp_path):
    served = scene.cluster.kubectl("get", "devicetaintrules", check=False).returncode == 0
    scene.publish("n1")
    scene.publish("n2")
    scene.apply(
        {
            "apiVersion": crds.API_VERSION,
            "kind": "DeviceDriver",
            "metadata": {"name": DRIVER},
            "spec": {"taintAfterSeconds": 60},
        }
    )
    with operator(scene.cluster, tmp_path, driverTaints=True):
        if not served:
            scene.wait("the condition", lambda: scene.condition("Tainted").get("reason"))
            assert scene.condition("Tainted")["reason"] == "Unsupported"
            return
        for _ in range(2):
            scene.not_ready.add("n1")
            scene.wait("the taints", lambda: scene.rules() == ["gpu-0", "gpu-1"], seconds=120)
            scene.wait("the condition", lambda: scene.condition("Tainted")["status"] == "True")
            scene.not_ready.clear()
            scene.wait("no taints", lambda: scene.rules() == [])
        scene.not_ready.add("n1")
        scene.wait("the taints", lambda: scene.rules() == ["gpu-0", "gpu-1"], seconds=120)
    # If the operator never returns, the rules are deleted with their owner.
    scene.cluster.kubectl("delete", "ddr", DRIVER, "--timeout=5s")
    wait_for("no taints", lambda: scene.rules() == [], seconds=60)


def test_the_api_server_refuses_a_specification_that_nobody_can_follow(server):
    for spec, words in (
        ({"nodeSelector": {"gpu": "true"}}, "write labels of nodes below matchLabels"),
        ({"version": "1" * 65}, "spec.version"),
        ({"taintAfterSeconds": 1}, "spec.taintAfterSeconds"),
        ({"parameters": {f"a/v{n}": {} for n in range(17)}}, "spec.parameters"),
    ):
        body = {
            "apiVersion": crds.API_VERSION,
            "kind": "DeviceDriver",
            "metadata": {"name": DRIVER},
            "spec": spec,
        }
        done = server.kubectl("create", "-f", "-", input=json.dumps(body), check=False)
        assert done.returncode != 0
        assert words in done.stderr
