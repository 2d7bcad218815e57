"""
Clusters that serve an older version of `resource.k8s.io`, or fewer of its features.

The kubelet and the scheduler of our Kubernetes need v1, but the node plugin does not. It runs as a
local process next to a control plane without nodes, whose API server is restarted with the options
of each test. The tests allocate its claims in place of a scheduler.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.machine import Folders, folders
from bench.plugin import NODE, Plugin, running
from drakit.device import ClaimReference
from e2e.alone import operator
from e2e.cluster.api import Capability, Cluster, Options
from e2e.cluster.choice import cluster_of_tests
from e2e.kit import holds_for, wait_for
from e2e.simulated import DRIVER
from e2e.writes import SliceWrites, slice_writes, written

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.feature("versions"),
    pytest.mark.needs(Capability.CONTROL_PLANE_ALONE),
]

GROUP = "resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")
TAINTS = "DRADeviceTaints"
FEATURES = {"DRAPartitionableDevices", "DRAConsumableCapacity", "DRAListTypeAttributes", TAINTS}
"""Feature gates that are disabled before Kubernetes 1.36. The gate of lists is also disabled in
1.36."""

TAINTED = {"taints": {"gpu-0": [{"key": "maintenance", "effect": "NoSchedule"}]}}


def only(version: str) -> dict[str, bool]:
    """Return the runtime configuration of an API server that serves only one version of the
    group."""
    return {f"{GROUP}/{each}": each == version for each in VERSIONS}


def claim_of(version: str, name: str, *, device_class: str) -> dict[str, Any]:
    """Return a claim with one request, in the form of that version."""
    request = {"deviceClassName": device_class}
    exactly = request if version == "v1beta1" else {"exactly": request}
    return {
        "apiVersion": f"{GROUP}/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "main", **exactly}]}},
    }


class Server:
    """A control plane without nodes, and the configuration of its API server."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._has: tuple[str, dict[str, bool]] | None = None

    def serve(self, version: str, **gates: bool) -> None:
        """Serve only one version, with these feature gates. The stored objects remain."""
        wanted = (version, gates)
        if self._has is None:
            self.cluster.start(Options(nodes=0, gates=gates, runtime_config=only(version)))
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
            self.cluster.kubectl("create", "-f", "-", input=json.dumps(node))
        elif self._has != wanted:
            self.cluster.stop_api_server()
            self.cluster.start_api_server(gates=gates, runtime_config=only(version))
        self._has = wanted

    def slices(self, version: str) -> list[dict[str, Any]]:
        """Return the driver's slices, in the form of that version."""
        items = self.cluster.get(f"resourceslices.{version}.{GROUP}")["items"]
        return [item for item in items if item["spec"]["driver"] == DRIVER]

    def allocated(self, version: str, **result: Any) -> ClaimReference:
        """Create a claim with one device of the driver, allocated as by a scheduler."""
        name = f"claim-{uuid.uuid4().hex[:6]}"
        claim = claim_of(version, name, device_class="any")
        path = f"/apis/{GROUP}/{version}/namespaces/default/resourceclaims"
        created = self._send("create", path, claim)
        results = [{"request": "main", "driver": DRIVER, "pool": NODE, **result}]
        created["status"] = {"allocation": {"devices": {"results": results}}}
        self._send("replace", f"{path}/{name}/status", created)
        return ClaimReference(namespace="default", name=name, uid=created["metadata"]["uid"])

    def _send(self, verb: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        text = json.dumps(body)
        return json.loads(self.cluster.kubectl(verb, "--raw", path, "-f", "-", input=text).stdout)


@pytest.fixture(scope="module")
def control_plane() -> Iterator[Server]:
    chosen = cluster_of_tests("versions")
    yield Server(chosen)
    chosen.stop()
    assert chosen.leftovers() == []


@pytest.fixture
def server(control_plane: Server) -> Iterator[Server]:
    """The control plane, without slices at the end."""
    yield control_plane
    control_plane.cluster.kubectl("delete", "resourceslices,resourceclaims", "--all")


@pytest.fixture
def places() -> Iterator[Folders]:
    with folders() as chosen:
        yield chosen
        # To diagnose a failed test.
        print((chosen.root / "log").read_text()[-8000:])


def control(places: Folders) -> Path:
    return places.root / "control.json"


@contextmanager
def plugin(server: Server, places: Folders, **config: Any) -> Generator[Plugin]:
    """Run the node plugin with the driver `simulated`, by default with default settings."""
    entry = {"driver": "simulated", "config": {"controlFile": str(control(places)), **config}}
    with running([entry], kubeconfig=server.cluster.kubeconfig, folders=places) as process:
        yield process


def pools(slices: list[dict[str, Any]]) -> dict[str, int]:
    """Return the generations of the complete pools."""
    found: dict[str, list[dict[str, Any]]] = {}
    for item in slices:
        found.setdefault(item["spec"]["pool"]["name"], []).append(item["spec"]["pool"])
    return {
        name: of[0]["generation"]
        for name, of in found.items()
        if all(each["resourceSliceCount"] == len(of) for each in of)
    }


def devices(slices: list[dict[str, Any]], version: str) -> dict[str, dict[str, Any]]:
    """Return the devices by name, as that version reports them."""
    found = [device for item in slices for device in item["spec"].get("devices") or ()]
    return {device["name"]: device["basic"] if version == "v1beta1" else device for device in found}


def wait_published(server: Server, version: str) -> dict[str, dict[str, Any]]:
    """Wait until the two pools are complete, and return the devices."""

    def look() -> dict[str, dict[str, Any]] | None:
        slices = server.slices(version)
        return devices(slices, version) if pools(slices).keys() == both else None

    both = {NODE, f"{NODE}/cpus"}
    return wait_for("both pools to be complete", look)


def counter_sets(slices: list[dict[str, Any]]) -> set[str]:
    return {each["name"] for item in slices for each in item["spec"].get("sharedCounters") or ()}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v1beta1", pytest.param("v1beta2", id="v1beta2")])
def test_where_only_an_older_version_is_served_slices_are_published_and_claims_prepared(
    server, places, version
):
    server.serve(version)
    with plugin(server, places) as process:
        published = wait_published(server, version)
        slices = server.slices(version)
        generations = pools(slices)
        assert counter_sets(slices) == {"gpu-0", "gpu-1"}
        (consumed,) = published["gpu-0-2g-0"]["consumesCounters"]
        assert consumed["counterSet"] == "gpu-0"
        assert consumed["counters"]["compute"] == {"value": "2"}
        assert published["nic-0"]["allowMultipleAllocations"] is True
        assert published["nic-0"]["capacity"]["bandwidth"]["requestPolicy"]["default"] == "1G"
        assert published["gpu-0"]["attributes"]["model"] == {"string": "Simulated G1"}

        with written(server.cluster, updates=1):
            control(places).write_text(json.dumps(TAINTED))
        slices = server.slices(version)
        (taint,) = devices(slices, version)["gpu-0"]["taints"]
        assert (taint["key"], taint["effect"]) == (f"{DRIVER}/maintenance", "NoSchedule")
        assert pools(slices) == generations

        share = str(uuid.uuid4())
        claim = server.allocated(
            version, device="nic-0", shareID=share, consumedCapacity={"bandwidth": "40G"}
        )
        with process.kubelet(DRIVER) as kubelet:
            kubelet.prepare([claim])
        (spec,) = places.cdi.iterdir()
        assert share in spec.read_text()
        assert r"\"bandwidth\":\"40G\"" in spec.read_text()

    before = slice_writes(server.cluster)
    with plugin(server, places) as process:
        with process.kubelet(DRIVER) as kubelet:
            kubelet.prepare([claim])
            kubelet.unprepare([claim])
        assert not list(places.cdi.iterdir())
        holds_for(
            "a restart writes nothing",
            lambda: slice_writes(server.cluster) - before == SliceWrites(),
            seconds=3,
        )
        with written(server.cluster, updates=1):
            control(places).unlink()
    assert pools(server.slices(version)) == generations


@pytest.mark.slow
def test_a_cluster_is_updated_to_another_version_under_a_running_plugin(server, places):
    server.serve("v1beta1")
    with plugin(server, places) as process:
        before = wait_published(server, "v1beta1")
        claim = server.allocated("v1beta1", device="gpu-0")
        with process.kubelet(DRIVER) as kubelet:
            kubelet.prepare([claim])

        server.serve("v1")
        after = devices(server.slices("v1"), "v1")
        assert {name: {**each, "name": name} for name, each in before.items()} == after
        claims = [claim, server.allocated("v1", device="gpu-1")]
        with process.kubelet(DRIVER) as kubelet:
            kubelet.prepare(claims)
            kubelet.unprepare(claims)
        with written(server.cluster, updates=1, seconds=60):
            control(places).write_text(json.dumps(TAINTED))
        assert "taints" in devices(server.slices("v1"), "v1")["gpu-0"]


@pytest.mark.slow
def test_where_features_are_off_the_fallback_is_published_until_they_are_on(server, places):
    # Rules need taints.
    server.serve("v1", **dict.fromkeys([*FEATURES, "DRADeviceTaintRules"], False))
    with plugin(server, places, nic={"listAttributes": True}):

        def names() -> set[str]:
            return devices(server.slices("v1"), "v1").keys() - {f"cpu-{n}" for n in range(8)}

        wait_for("the fallback", lambda: names() == {"gpu-0", "gpu-1", "nic-0"})
        published = wait_published(server, "v1")
        assert {"cpu-0", "cpu-7"} <= published.keys()
        assert not counter_sets(server.slices("v1"))
        for device in published.values():
            assert not device.keys() & {"consumesCounters", "allowMultipleAllocations"}
            assert "vlans" not in device["attributes"]
        wait_for(
            "the gates to be named in Events", lambda: FEATURES - {TAINTS} <= gates_told(server)
        )

        control(places).write_text(json.dumps(TAINTED))
        wait_for("a device that must not be used to be left out", lambda: "gpu-0" not in names())
        wait_for("the last gate to be named", lambda: gates_told(server) == FEATURES)
        before = slice_writes(server.cluster)
        holds_for(
            "what is dropped is not tried again and again",
            lambda: slice_writes(server.cluster) - before == SliceWrites(),
            seconds=4,
        )

        server.serve("v1", **dict.fromkeys(FEATURES, True))
        wait_for("the partitions, once the API server knows them", lambda: "gpu-0-2g-0" in names())
        published = wait_published(server, "v1")
        assert "taints" in published["gpu-0"]
        assert published["cpu-numa-0"]["allowMultipleAllocations"] is True
        assert published["nic-0"]["attributes"]["vlans"] == {"ints": [100, 200, 300]}
        assert counter_sets(server.slices("v1")) == {"gpu-0", "gpu-1"}


def gates_told(server: Server) -> set[str]:
    """Return the feature gates that Events of the Node name."""
    selector = f"--field-selector=involvedObject.name={NODE},reason=FieldsDropped"
    notes = [event["message"] for event in server.cluster.get("events", selector)["items"]]
    return {gate for note in notes for gate in FEATURES if f"(feature gate {gate})" in note}


def waiting_pod(server: Server, version: str) -> None:
    """Create a pod and a claim with the name of a version, for a class that does not exist."""
    claim = claim_of(version, version, device_class="missing.test")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": version},
        "spec": {
            "containers": [{"name": "main", "image": "none.test/none"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": version}],
        },
    }
    for body in (claim, pod):
        server.cluster.kubectl("create", "-f", "-", input=json.dumps(body))


def reasons(server: Server, name: str) -> set[str]:
    """Return the reasons of the operator's Events about a pod."""
    return {
        event["reason"]
        for event in server.cluster.get("events")["items"]
        if event["involvedObject"]["kind"] == "Pod"
        and event["involvedObject"]["name"] == name
        and event.get("reportingComponent") == "drakit.dev/operator"
    }


@pytest.mark.slow
def test_the_operator_explains_pods_before_and_after_an_upgrade_of_the_api_server(server, places):
    server.serve("v1beta1")
    # With the default, a leader that cannot renew its Lease would exit before the API server is
    # back.
    election = {"leaseDuration": 120, "renewDeadline": 100}
    with operator(server.cluster, places.root, resyncPeriod=1, election=election):
        for version in ("v1beta1", "v1"):
            server.serve(version)
            waiting_pod(server, version)
            wait_for(
                f"an Event about pod {version}",
                lambda name=version: reasons(server, name) == {"DeviceClassMissing"},
                seconds=90,
            )
    server.cluster.kubectl("delete", "pods", "--all", "--force")
