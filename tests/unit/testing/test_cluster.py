"""The API server of a kit: what is read from it, and claims as a scheduler allocates them."""

from __future__ import annotations

import pytest

from drakit.testing.apiserver import FakeApiServer
from drakit.testing.conformance.claims import Cluster, result_for
from drakit.testing.conformance.facts import PublishedDevice

DRIVER = "lamp.example.com"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
LAMP = PublishedDevice(name="lamp-0", pool="node-1")


def result(device, **changes):
    values = {"request": "main", "admin_access": False, "share_id": None, "consumed": None}
    return result_for(device, driver=DRIVER, **(values | changes))


@pytest.fixture
def api():
    return FakeApiServer()


@pytest.fixture
def cluster(api):
    return Cluster(api, node="node-1")


def publish(api, name, *devices, generation=1, driver=DRIVER):
    pool = {"name": "node-1", "generation": generation, "resourceSliceCount": 1}
    api.store(f"{SLICES}/{name}", {"spec": {"driver": driver, "pool": pool, "devices": devices}})


def test_devices_are_those_of_the_newest_generation_of_the_driver_alone(api, cluster):
    publish(api, "old", {"name": "gone"})
    publish(api, "other", {"name": "camera"}, driver="camera.example.com")
    taint = {"key": "a", "effect": "NoSchedule"}
    attributes = {"watts": {"int": 5}, "kinds": {"strings": ["a", "b"]}}
    capacity = {"light": {"value": "9"}}
    lamp = {"name": "lamp-0", "attributes": attributes, "capacity": capacity, "taints": [taint]}
    publish(api, "new", {"name": "lamp-1", "allowMultipleAllocations": True}, lamp, generation=2)
    first, second = cluster.devices(DRIVER)
    assert (first.name, second.name, second.allow_multiple) == ("lamp-0", "lamp-1", True)
    assert first.attributes == {"watts": 5, "kinds": ["a", "b"]}
    assert first.capacity == {"light": "9"}
    assert first.taints == (taint,)


def test_a_claim_is_allocated_to_the_node_with_the_parameters_in_its_config(cluster):
    claim = cluster.store_claim(DRIVER, [result(LAMP)], devices=[LAMP], configs=[{"watts": 3}])
    allocation = claim.body["status"]["allocation"]
    assert allocation["devices"]["results"] == [
        {"driver": DRIVER, "pool": "node-1", "device": "lamp-0", "request": "main"}
    ]
    (config,) = allocation["devices"]["config"]
    assert config["opaque"] == {"driver": DRIVER, "parameters": {"watts": 3}}
    (term,) = allocation["nodeSelector"]["nodeSelectorTerms"]
    assert term["matchFields"][0]["values"] == ["node-1"]


def test_a_claim_that_is_allocated_again_keeps_its_uid(cluster):
    claim = cluster.store_claim(DRIVER, [result(LAMP)], devices=[LAMP], configs=[])
    again = cluster.store_claim(DRIVER, [], devices=[], configs=[], of=claim)
    assert again.uid == claim.uid == again.body["metadata"]["uid"]
    assert again.body["status"]["allocation"]["devices"]["results"] == []
    cluster.delete_claim(claim)
    cluster.delete_claim(claim)
    fresh = cluster.store_claim(DRIVER, [], devices=[], configs=[])
    assert fresh.uid != claim.uid


def test_a_device_for_several_claims_is_allocated_as_a_share():
    capacity = {
        "rpm": {"value": "3000", "requestPolicy": {"default": "100"}},
        "oil": {"value": "2"},
    }
    body = {"name": "lamp-0", "capacity": capacity}
    device = PublishedDevice(name="lamp-0", pool="node-1", allow_multiple=True, body=body)
    one, other = result(device), result(device)
    assert one["shareID"] != other["shareID"]
    assert one["consumedCapacity"] == {"rpm": "100", "oil": "2"}
    told = result(device, share_id="share-1", consumed={"rpm": "300"})
    assert (told["shareID"], told["consumedCapacity"]) == ("share-1", {"rpm": "300"})
    assert result(device, admin_access=True).keys() == {
        "driver",
        "pool",
        "device",
        "request",
        "adminAccess",
    }


def test_writes_of_slices_are_counted_without_dry_runs_and_reads(api, cluster):
    for method, path, query in [
        ("GET", SLICES, {}),
        ("POST", SLICES, {"dryRun": "All"}),
        ("POST", SLICES, {}),
        ("PUT", f"{SLICES}/a", {}),
        ("POST", "/api/v1/namespaces/lab/events", {}),
    ]:
        api.requests.append((method, path))
        api.queries.append(query)
    assert cluster.slice_writes() == 2
