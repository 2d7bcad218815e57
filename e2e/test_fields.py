"""
Fields of devices in slices of a real API server, and their effect on its scheduler.

The node plugin runs as a local process next to a control plane. The Node has no kubelet, so the
tests treat a bound pod as running.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.machine import folders
from bench.plugin import NODE, running
from e2e.cluster.api import Capability, Cluster, Options
from e2e.cluster.choice import cluster_of_tests
from e2e.cluster.gates import defaults, gates_of_tests
from e2e.kit import device_class, holds_for, wait_for
from e2e.listed import ATTACHED, DRIVER, FAILED, INVENTORIES, PROFILE
from e2e.writes import written

GATES = (
    "DRANodeAllocatableResources",
    "DRADeviceCompatibilityGroups",
    "DRAFractionalCapacityRange",
    "DRAPartitionableDevicesType",
    "DRAResourcePoolStatus",
)
CPUS = "4"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.feature("versions"),
    pytest.mark.needs(Capability.CONTROL_PLANE_ALONE),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    chosen = cluster_of_tests("fields")
    known = defaults(chosen.minor)
    gates = {**gates_of_tests(chosen.minor), **{name: True for name in GATES if name in known}}
    chosen.start(Options(nodes=0, gates=gates))
    amounts = {"cpu": CPUS, "memory": "8Gi", "pods": "100"}
    status: dict[str, Any] = {"capacity": amounts, "allocatable": amounts}
    status |= {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]}
    status |= {"declaredFeatures": ["DRANodeAllocatableResources"]}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
    create(chosen, node, device_class("listed", DRIVER))
    patch = ("patch", "node", NODE, "--subresource=status", "--type=merge", "-p")
    chosen.kubectl(*patch, json.dumps({"status": status}))
    yield chosen
    chosen.stop()
    assert chosen.leftovers() == []


def create(cluster: Cluster, *bodies: dict[str, Any]) -> None:
    for body in bodies:
        cluster.kubectl("create", "-f", "-", input=json.dumps(body))


class Driver:
    """The driver in a running node plugin."""

    def __init__(self, cluster: Cluster, file: Path) -> None:
        self.cluster = cluster
        self._file = file
        self._count = 0

    def list(self, name: str, *, fallback: bool = False) -> None:
        """List an inventory, and wait until its devices are published."""
        self._file.write_text(name)
        inventory = INVENTORIES[name]
        names = [each.name for each in (inventory.fallback if fallback else inventory.devices)]
        names = names if inventory.ordered else sorted(names)
        wait_for(f"{name} to be published", lambda: [*self.published()] == names)

    def specs(self) -> list[dict[str, Any]]:
        """Return the specs of its slices, in the order in which the scheduler reads them."""
        items = self.cluster.get("resourceslices")["items"]
        ours = [each for each in items if each["spec"]["driver"] == DRIVER]
        return [each["spec"] for each in sorted(ours, key=lambda e: e["metadata"]["name"])]

    def published(self) -> dict[str, dict[str, Any]]:
        """Return the published devices, in the order in which the scheduler tries them."""
        return {each["name"]: each for spec in self.specs() for each in spec.get("devices") or ()}

    def pod(self, selector: str = "true", **capacity: str) -> str:
        """Create a pod with a claim for one device, and return their common name."""
        self._count += 1
        name = f"pod-{self._count}"
        exactly: dict[str, Any] = {
            "deviceClassName": "listed",
            "selectors": [{"cel": {"expression": selector}}],
        }
        if capacity:
            exactly["capacity"] = {"requests": capacity}
        claim = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name},
            "spec": {"devices": {"requests": [{"name": "main", "exactly": exactly}]}},
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "containers": [
                    {
                        "name": "main",
                        "image": "none.test/none",
                        "resources": {"claims": [{"name": "device"}]},
                    }
                ],
                "resourceClaims": [{"name": "device", "resourceClaimName": name}],
                "tolerations": [{"operator": "Exists"}],
            },
        }
        create(self.cluster, claim, pod)
        return name

    def claim(self, name: str) -> dict[str, Any]:
        return self.cluster.get(f"resourceclaims/{name}")

    def allocation(self, name: str) -> dict[str, Any]:
        """Wait until the claim of a pod is allocated, and return its result."""

        def look() -> dict[str, Any] | None:
            status = self.claim(name).get("status") or {}
            return status.get("allocation")

        allocation = wait_for(f"{name} to be allocated", look)
        (result,) = allocation["devices"]["results"]
        return result

    def is_bound(self, name: str) -> bool:
        return "nodeName" in self.cluster.get(f"pods/{name}")["spec"]

    def refusal(self, name: str) -> str:
        """Wait until the scheduler rejects a pod, and return its message."""

        def look() -> str:
            conditions = self.cluster.get(f"pods/{name}").get("status", {}).get("conditions", ())
            found = [each for each in conditions if each["type"] == "PodScheduled"]
            return found[0]["message"] if found and found[0]["status"] == "False" else ""

        return wait_for(f"{name} to be refused", look)


@pytest.fixture
def driver(cluster: Cluster) -> Iterator[Driver]:
    with running_driver(cluster) as made:
        yield made
    cluster.kubectl("delete", "pods,resourceclaims", "--all", "--force", "--grace-period=0")
    cluster.kubectl("delete", "resourceslices", "--all")


@contextmanager
def running_driver(cluster: Cluster) -> Generator[Driver]:
    with folders() as places:
        file = places.root / "listed"
        file.write_text("attached")
        entry = {"driver": "e2e.listed:Listed", "config": {"file": str(file)}}
        try:
            with running([entry], kubeconfig=cluster.kubeconfig, folders=places):
                yield Driver(cluster, file)
        finally:
            print((places.root / "log").read_text()[-8000:])


def test_the_scheduler_takes_devices_in_the_order_of_their_driver(driver: Driver):
    driver.list("falling")
    assert len(driver.specs()) == 2
    for first in ("dev-69", "dev-68"):
        assert driver.allocation(driver.pod())["device"] == first
    with written(driver.cluster, updates=2):
        driver.list("another-first")
    assert driver.allocation(driver.pod())["device"] == "dev-2"
    assert driver.allocation(driver.pod())["device"] == "dev-67"


def test_a_pod_is_not_bound_before_its_device_is_attached(driver: Driver):
    driver.list("attached")
    (device,) = driver.published().values()
    assert (device["bindingConditions"], device["bindingFailureConditions"]) == (
        [ATTACHED],
        [FAILED],
    )
    assert device["bindsToNode"] is True
    name = driver.pod()
    result = driver.allocation(name)
    assert result["bindingConditions"] == [ATTACHED]
    claim = driver.claim(name)
    (term,) = claim["status"]["allocation"]["nodeSelector"]["nodeSelectorTerms"]
    assert NODE in json.dumps(term)
    holds_for("the pod waits", lambda: not driver.is_bound(name), seconds=3)
    attached = {key: result[key] for key in ("driver", "pool", "device")}
    condition = {"type": ATTACHED, "status": "True", "reason": "Attached", "message": ""}
    condition["lastTransitionTime"] = claim["metadata"]["creationTimestamp"]
    status = {"devices": [{**attached, "conditions": [condition]}]}
    patch = ("patch", f"resourceclaims/{name}", "--subresource=status", "--type=merge", "-p")
    driver.cluster.kubectl(*patch, json.dumps({"status": status}))
    wait_for("the pod to be bound", lambda: driver.is_bound(name))


@pytest.mark.kubernetes(oldest="1.36", newest="1.36")
def test_a_field_that_drakit_does_not_know_is_published_and_the_scheduler_uses_it(driver: Driver):
    driver.list("mapped-in-1.36")
    for device in driver.published().values():
        assert device["nodeAllocatableResourceMappings"]["cpu"] == {"allocationMultiplier": "3"}
    assert_cpus_are_counted(driver)


def assert_cpus_are_counted(driver: Driver) -> None:
    """Check that each of the two devices takes 3 of the node's 4 CPUs."""
    first = driver.pod()
    wait_for("the first pod to be bound", lambda: driver.is_bound(first))
    assert "cpu" in driver.refusal(driver.pod()).lower()


def test_the_fallback_replaces_a_field_that_no_server_knows(driver: Driver):
    driver.list("in-no-release", fallback=True)
    (device,) = driver.published().values()
    assert "inNoRelease" not in device
    assert driver.allocation(driver.pod())["device"] == "present"
    selector = f"--field-selector=involvedObject.name={NODE},reason=FieldsDropped"
    notes = [each["message"] for each in driver.cluster.get("events", selector)["items"]]
    assert any("extra fields; the node plugin publishes the driver's fallback" in n for n in notes)


@pytest.mark.kubernetes(oldest="1.37")
def test_resources_of_the_node_are_counted(driver: Driver):
    driver.list("mapped")
    for device in driver.published().values():
        assert device["nodeAllocatableResources"] == {
            "cpu": {"mapping": {"deviceMultiplier": "3"}},
            "memory": {"overhead": {"perPod": "64Mi"}},
        }
    assert_cpus_are_counted(driver)


@pytest.mark.gate("DRADeviceCompatibilityGroups")
def test_partitions_without_a_common_group_are_not_allocated_together(driver: Driver):
    driver.list("grouped")
    types = {spec.get("partitionTypeAttribute") for spec in driver.specs() if "devices" in spec}
    assert types == {PROFILE}
    groups = driver.published()["vgpu"]["consumesCounters"][0]["compatibilityGroups"]
    assert groups == ["vgpu"]
    assert driver.allocation(driver.pod())["device"] == "mig"
    assert driver.allocation(driver.pod())["device"] == "mig-2", "vgpu is passed over"
    assert driver.refusal(driver.pod())


@pytest.mark.gate("DRAFractionalCapacityRange")
def test_claims_share_fractions_of_a_capacity(driver: Driver):
    driver.list("fractions")
    amounts = [driver.allocation(driver.pod(cores=cores)) for cores in ("600m", "100m")]
    assert [each["consumedCapacity"]["cores"] for each in amounts] == ["750m", "500m"]
    assert driver.allocation(driver.pod())["consumedCapacity"]["cores"] == "500m"
    assert driver.refusal(driver.pod())
