"""
Features of DRA beyond whole devices, with the driver `simulated`.

The real scheduler tracks partitions and shares, and the real API server drops unsupported fields.
If possible, the pods are those of `examples/simulated`, because users try these first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drakit.quantity import same_quantity
from e2e.cluster.api import Capability, Cluster
from e2e.fixtures import build_of, namespace_of
from e2e.kit import claim, container, from_claim, from_template, holds_for, template, wait_for
from e2e.release import uninstall
from e2e.scripted.stage import opaque
from e2e.simulated import (
    CPU,
    DRIVER,
    GPU,
    LISTS,
    NIC,
    PARTITION,
    SIMULATED,
    STAY,
    Lab,
    amount,
    example,
    index,
    install_simulated,
    of_gpu,
    profile,
    user,
    wait_simulated,
)

pytestmark = [pytest.mark.e2e, pytest.mark.feature("simulated")]

PARTITIONS = pytest.mark.kubernetes(oldest="1.35")
"""For Kubernetes 1.34, the driver publishes whole GPUs, because counters have another format."""


SHARES = pytest.mark.kubernetes(oldest="1.35")
"""The scheduler of 1.34 compares a request with the first device of the slice (k/k#133705)."""


@pytest.fixture(scope="module")
def simulated(cluster: Cluster, images: list[Path]) -> Iterator[Cluster]:
    install_simulated(cluster, build=build_of(images))
    yield cluster
    if os.environ.get("KEEP_CLUSTER") != "1":
        uninstall(cluster, SIMULATED)


@pytest.fixture
def lab(simulated: Cluster, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A namespace for a test. Its drivers have no commands, before and after the test."""
    with namespace_of(simulated, request) as name:
        lab = Lab(simulated, name)
        lab.reset()
        wait_simulated(simulated)
        yield lab
        lab.reset()


# ------------------------------------------------------------ partitions


@PARTITIONS
def test_partitions_are_given_out_until_the_counters_of_all_gpus_are_used_up(lab):
    lab.apply(*example("simulated/partitions-pod"))
    lab.wait_phase("partitions", "Running")
    facts = lab.facts("partitions")
    assert sorted(fact["profile"] for fact in facts) == ["1g", "2g"]
    (cut,) = {fact["parent"] for fact in facts}

    lab.apply(
        template("half", ("half", PARTITION, profile("2g"))),
        template("quarter", ("quarter", PARTITION, profile("1g"))),
        *(user(name, ("half", from_template("half"))) for name in ("one", "two")),
    )
    for name in ("one", "two"):
        lab.wait_phase(name, "Running")
        (fact,) = lab.facts(name)
        assert fact["parent"] != cut, "three of its four compute slices are taken"
    lab.apply(user("three", ("half", from_template("half"))))
    assert "cannot allocate all claims" in lab.refused("three")

    lab.apply(user("last", ("quarter", from_template("quarter"))))
    lab.wait_phase("last", "Running")
    (fact,) = lab.facts("last")
    assert fact["parent"] == cut, "what is left of it is enough for a small one"
    assert lab.phase("three") == "Pending"

    lab.delete("pod", "one")
    lab.wait_phase("three", "Running")


@PARTITIONS
def test_a_gpu_and_its_partitions_exclude_each_other(lab):
    lab.apply(*example("simulated/gpu-pod"))
    lab.wait_phase("gpu", "Running")
    (whole,) = lab.facts("gpu")
    assert whole["type"] == "gpu"
    assert whole["capacity"] == {"memory": "40Gi"}
    gpu = whole["device"]

    lab.apply(
        template("part", ("part", PARTITION, of_gpu(gpu))),
        template("whole", ("whole", GPU, index(int(gpu.removeprefix("gpu-"))))),
        user("part", ("part", from_template("part"))),
    )
    lab.refused("part")
    lab.delete("pod", "gpu")
    lab.wait_phase("part", "Running")

    lab.apply(user("again", ("whole", from_template("whole"))))
    lab.refused("again")
    lab.delete("pod", "part")
    lab.wait_phase("again", "Running")


# ------------------------------------------------------------ shares


def check_amounts(fact: dict[str, Any], **capacity: str) -> None:
    """Check the amounts of a device in a pod. The scheduler writes 40G as 39062500Ki."""
    assert fact["capacity"].keys() == capacity.keys()
    assert all(same_quantity(fact["capacity"][name], value) for name, value in capacity.items())


def check_share(lab: Lab, name: str, claim_name: str, **capacity: str) -> str:
    """Compare a pod's share with its claim, and return the share's ID."""
    (fact,) = lab.facts(name)
    (result,) = lab.results(name, claim_name)
    assert fact["capacity"] == result["consumedCapacity"]
    check_amounts(fact, **capacity)
    assert fact["shareID"] == result["shareID"]
    assert fact["device"] == result["device"]
    return fact["shareID"]


@SHARES
def test_claims_share_an_interface_until_its_bandwidth_is_used_up(lab):
    *before, last = example("simulated/nic-shares")
    assert (last["kind"], last["metadata"]["name"]) == ("Pod", "nic-two")
    shares = set()
    for name, objects in (("nic-one", before), ("nic-two", [last])):
        # Apply them one after the other: the scheduler briefly counts a share twice, once as an
        # allocation in flight and once as stored (GatherAllocatedState in 1.36.3 and 1.37.2), and
        # retries a pod that did not fit only after minutes.
        lab.apply(*objects)
        lab.wait_phase(name, "Running")
        shares.add(check_share(lab, name, "nic", bandwidth="40G"))
        assert lab.environment(name)["SIMULATED_NIC"] == "nic-0"
    assert len(shares) == 2

    forty = ("nic", from_template("forty-gigabits"))
    lab.apply(user("nic-three", forty))
    lab.refused("nic-three")
    lab.apply(template("rest", amount("nic", NIC, bandwidth="19500M")))
    lab.apply(user("nic-rest", ("nic", from_template("rest"))))
    lab.wait_phase("nic-rest", "Running")
    check_share(lab, "nic-rest", "nic", bandwidth="20G")  # it is in steps of 1 Gbit/s
    assert lab.phase("nic-three") == "Pending"

    lab.delete("pod", "nic-one")
    lab.wait_phase("nic-three", "Running")
    assert check_share(lab, "nic-three", "nic", bandwidth="40G") not in shares


@SHARES
def test_a_pod_with_two_shares_of_one_interface_sees_both(lab):
    ten, five = amount("ten", NIC, bandwidth="10G"), amount("five", NIC, bandwidth="5G")
    lab.apply(
        claim("two", ten, five),
        user("both", ("two", from_claim("two"))),
        user("beside", ("two", from_claim("two"))),
    )
    for name in ("both", "beside"):
        lab.wait_phase(name, "Running")
        results = {result["request"]: result for result in lab.results(name, "two")}
        facts = {fact["request"]: fact for fact in lab.facts(name)}
        assert facts.keys() == {"ten", "five"}
        assert {f["shareID"] for f in facts.values()} == {r["shareID"] for r in results.values()}
        check_amounts(facts["ten"], bandwidth="10G")
        check_amounts(facts["five"], bandwidth="5G")


@SHARES
def test_cpus_come_from_a_pool_of_their_own_by_numa_node(lab):
    lab.apply(*example("simulated/cpus-pod"))
    lab.wait_phase("cpus", "Running")
    check_share(lab, "cpus", "cpus", cpus="2")
    (result,) = lab.results("cpus", "cpus")
    assert result["pool"] == f"{lab.node}/cpus"
    (fact,) = lab.facts("cpus")
    assert fact["pool"] == "cpus"
    numa = fact["numaNode"]

    lab.apply(template("four", amount("cpus", CPU, cpus="4")))
    lab.apply(user("four", ("cpus", from_template("four"))))
    lab.wait_phase("four", "Running")
    (fact,) = lab.facts("four")
    assert fact["numaNode"] != numa, "two of its four are taken"
    lab.apply(user("more", ("cpus", from_template("four"))))
    lab.refused("more")
    lab.delete("pod", "cpus")
    lab.wait_phase("more", "Running")


@SHARES
def test_a_gpu_and_a_share_of_the_interface_near_it(lab):
    lab.apply(*example("simulated/near-pod"))
    lab.wait_phase("near", "Running")
    facts = {fact["request"]: fact for fact in lab.facts("near")}
    assert facts["gpu"]["numaNode"] == facts["nic"]["numaNode"]
    # The claim requests no amount.
    check_amounts(facts["nic"], bandwidth="1G")


# ------------------------------------------------------------ parameters


def test_parameters_of_a_claim_arrive_in_the_containers(lab):
    lab.apply(*example("simulated/parameters-pod"))
    lab.wait_phase("parameters", "Running")
    wanted = {"sharing": "timeSlicing", "timeSliceMilliseconds": 20, "env": {"MODE": "fast"}}
    for name in ("one", "two"):
        (fact,) = lab.facts("parameters", name)
        assert fact["parameters"] == wanted
        assert lab.environment("parameters", name)["MODE"] == "fast"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        pytest.param({"vlanId": 7}, ("vlanId",), id="a-key-that-is-unknown"),
        pytest.param({"vlan": 4095}, ("vlan", "4094"), id="a-number-out-of-range"),
        pytest.param({"env": {"SIMULATED_X": "1"}}, ("env", "SIMULATED_X"), id="our-own-variable"),
    ],
)
def test_a_mistake_in_parameters_is_reported_with_the_field(lab, parameters, words):
    lab.apply(
        template("nic", ("nic", NIC), config=[opaque(DRIVER, parameters)]),
        user("nic", ("nic", from_template("nic"))),
    )
    text = lab.event("nic", "nic", *words)
    assert lab.results("nic", "nic")[0]["request"] in text


# ------------------------------------------------------------ commands


def keys(device: dict[str, Any]) -> set[str]:
    return {f"{taint['key']}:{taint['effect']}" for taint in device.get("taints", ())}


def test_taints_come_and_go_as_in_the_control_file(lab):
    lab.command(
        taints={"nic-*": [{"key": "maintenance", "value": "today", "effect": "NoSchedule"}]}
    )
    taint = f"{DRIVER}/maintenance:NoSchedule"
    wait_for("the taint", lambda: keys(lab.devices()["nic-0"]) == {taint})
    lab.apply(template("nic", ("nic", NIC)), user("nic", ("nic", from_template("nic"))))
    assert "cannot allocate all claims" in lab.refused("nic")
    lab.reset()
    lab.wait_phase("nic", "Running")
    assert keys(lab.devices()["nic-0"]) == set()


@PARTITIONS
def test_an_unhealthy_gpu_and_its_partitions_are_left_to_those_who_tolerate_it(lab):
    lab.command(health={"gpu-0": {"status": "unhealthy", "message": "it is too hot"}})
    unhealthy = {"drakit.dev/unhealthy:NoSchedule"}
    wait_for("the taint", lambda: keys(lab.devices()["gpu-0"]) == unhealthy)
    tainted = {name for name, device in lab.devices().items() if keys(device)}
    assert tainted == {name for name in lab.devices() if name.startswith("gpu-0")}

    lab.apply(*example("simulated/unhealthy-pod"))
    lab.wait_phase("unhealthy", "Running")
    lab.delete("pod", "unhealthy")
    lab.apply(
        template("part", ("part", PARTITION, of_gpu("gpu-0"))),
        user("part", ("part", from_template("part"))),
    )
    lab.refused("part")
    lab.reset()
    lab.wait_phase("part", "Running")
    assert not any(keys(device) for device in lab.devices().values())


# ------------------------------------------------------------ fields that the API server does not
# support


def writes_of_slices(cluster: Cluster) -> list[dict[str, Any]]:
    """Return all attempts of the release to write a slice, whether or not they succeeded. A dry
    run, with which the plugin checks whether taints are kept, does not write."""
    account = f"system:serviceaccount:{SIMULATED.namespace}:"
    return [
        entry
        for entry in cluster.audit()
        if entry["objectRef"]["resource"] == "resourceslices"
        and entry["verb"] in ("create", "update", "patch", "delete")
        and entry["user"]["username"].startswith(account)
        and "dryRun=" not in entry["requestURI"]
    ]


@pytest.mark.needs(Capability.AUDIT)
def test_list_attributes_that_the_api_server_does_not_know_are_reported_and_left_out(lab):
    if lab.cluster.gates.get("DRAListTypeAttributes"):
        pytest.skip("the cluster knows list attributes")

    def reported() -> set[str]:
        events = lab.cluster.get(
            *("events", "-n", "default"),
            f"--field-selector=involvedObject.name={lab.node},reason=FieldsDropped",
        )["items"]
        return {event["message"] for event in events if f"driver {LISTS}:" in event["message"]}

    (note,) = wait_for("an Event of the Node", reported)
    assert "list attributes (feature gate DRAListTypeAttributes)" in note
    attributes = lab.devices(LISTS)["nic-0"]["attributes"]
    assert attributes["model"] == {"string": "Simulated N1"}
    assert "vlans" not in attributes

    before = len(writes_of_slices(lab.cluster))
    lab.command(LISTS, taints={"nic-0": [{"key": "maintenance"}]})
    wait_for("the taint", lambda: keys(lab.devices(LISTS)["nic-0"]))
    holds_for(
        "one change is one write",
        lambda: len(writes_of_slices(lab.cluster)) == before + 1,
        seconds=4,
    )
    assert "vlans" not in lab.devices(LISTS)["nic-0"]["attributes"]


# ------------------------------------------------------------ metadata files

METADATA = "/var/run/kubernetes.io/dra-device-attributes"


@SHARES
def test_containers_read_the_attributes_of_their_devices_with_kubernetes_own_package(lab):
    lab.apply(
        template("cards", ("first", GPU), ("second", GPU)),
        claim("link", amount("port", NIC, bandwidth="1G")),
        user(
            "reader",
            ("mine", from_template("cards")),
            ("ours", from_claim("link")),
            containers=[
                container("all", "mine", "ours", command=["sh", "-c", STAY]),
                container("one", ("mine", "second"), command=["sh", "-c", STAY]),
            ],
        ),
    )
    lab.wait_phase("reader", "Running")
    published = lab.devices()

    def read(container: str, *arguments: str) -> dict[str, Any]:
        command = ["exec", "reader", f"--container={container}", "--", "read-metadata", *arguments]
        return json.loads(lab.kubectl(*command))

    results = {each["request"]: each for each in lab.results("reader", "mine")}
    for request, driver in (("first", []), ("second", [DRIVER])):
        found = read("all", "template", "mine", request, *driver)
        assert found["PodClaimName"] == "mine"
        ((name, device),) = [
            (each["Name"], device) for each in found["Requests"] for device in each["Devices"]
        ]
        assert (name, device["Driver"], device["Name"]) == (
            request,
            DRIVER,
            results[request]["device"],
        )
        expected = published[device["Name"]]["attributes"]
        assert {k: v for k, v in device["Attributes"].items() if v} == expected
    assert read("one", "template", "mine", "second") == read("all", "template", "mine", "second")
    own = read("all", "claim", "link", "port", DRIVER)
    assert (own["name"], own["namespace"], own["generation"]) == ("link", lab.name, 1)
    assert own["uid"] == lab.claim_of("reader", "ours")["metadata"]["uid"]

    def files(container: str) -> list[str]:
        shell = ["exec", "reader", f"--container={container}", "--", "sh", "-c"]
        return lab.kubectl(*shell, f"cd {METADATA}; find . -type f -perm 644 | sort").split()

    end = f"{DRIVER}-metadata.json"
    assert files("all") == [
        f"./resourceclaims/link/port/{end}",
        f"./resourceclaimtemplates/mine/first/{end}",
        f"./resourceclaimtemplates/mine/second/{end}",
    ]
    assert files("one") == [f"./resourceclaimtemplates/mine/second/{end}"]
    path = f"{METADATA}/resourceclaims/link/port/{end}"
    refused = lab.kubectl(
        *("exec", "reader", "--container=all", "--", "sh", "-c", f"echo > {path} || echo refused")
    )
    assert "refused" in refused

    folder = lab.cluster.node_path(
        lab.node, f"/var/lib/kubelet/plugins/drakit.dev/drivers/{DRIVER}/metadata"
    )
    kept = sorted(path.name for path in folder.iterdir())
    assert len(kept) == 3
    (folder / kept[0]).unlink()
    wait_for("the file to be restored", (folder / kept[0]).exists, seconds=5)
    lab.delete("pod", "reader")
    wait_for("the files to be removed", lambda: not any(folder.iterdir()), seconds=15)
