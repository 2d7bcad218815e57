"""The known bugs of Kubernetes: which releases have them, and which objects meet them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from drakit_explain.broken import broken_pod
from drakit_explain.bugs import BUGS, NODE_BUGS, READ, bug_behind, bugs_of_node, known_bugs
from drakit_explain.codes import Code
from drakit_explain.model import Consumer, PodClaim, PodFacts
from drakit_explain.projection import (
    FOR_EXTENDED,
    project_claim,
    project_class,
    project_node,
    project_slice,
    project_taint_rule,
    project_template,
)
from drakit_explain.world import World

NEWEST = [f"v1.{minor}.{patch}" for minor, patch in READ.items()]
FIRST = [f"v1.{minor}.0" for minor in READ]

COUNTERS = [{"counterSet": "board", "counters": {"slots": {"value": "2"}}}]
TAINT = {"key": "example.com/broken", "effect": "NoSchedule"}
HUGE = 2**62


def a_slice(driver: str = "a.example.com", pool: str = "pool-a", **device: Any) -> Any:
    name = f"{driver}-{pool}"
    devices = [{"name": "dev-0"}, {"name": "dev-1", **device}]
    identity = {"name": pool, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "pool": identity, "allNodes": True, "devices": devices}
    return project_slice({"metadata": {"name": name, "uid": name}, "spec": spec})


def counters_of(driver: str, pool: str) -> Any:
    name = f"{driver}-{pool}-counters"
    identity = {"name": pool, "generation": 1, "resourceSliceCount": 2}
    sets = [{"name": "board", "counters": {"slots": {"value": "4"}}}]
    spec = {"driver": driver, "pool": identity, "allNodes": True, "sharedCounters": sets}
    return project_slice({"metadata": {"name": name, "uid": name}, "spec": spec})


def a_template(*requests: Any, **devices: Any) -> Any:
    named = [
        {"name": f"r{number}", **({"exactly": each} if isinstance(each, dict) else {})}
        | ({"firstAvailable": each} if isinstance(each, list) else {})
        for number, each in enumerate(requests)
    ]
    spec = {"devices": {"requests": named, **devices}}
    metadata = {"name": "t", "namespace": "lab", "uid": "t"}
    return project_template({"metadata": metadata, "spec": {"spec": spec}})


def exact(**fields: Any) -> dict[str, Any]:
    return {"deviceClassName": "c", **fields}


def a_claim(device: str = "dev-0", *, extended: bool = False, **more: Any) -> Any:
    result = {"request": "r", "driver": "a.example.com", "pool": "pool-a", "device": device} | more
    annotations = {FOR_EXTENDED: "true"} if extended else {}
    metadata = {"name": "used", "namespace": "lab", "uid": "used", "annotations": annotations}
    return project_claim(
        {
            "metadata": metadata,
            "spec": {"devices": {"requests": [{"name": "r", "exactly": exact()}]}},
            "status": {"allocation": {"devices": {"results": [result]}}},
        }
    )


def a_rule(**spec: Any) -> Any:
    taint = {"key": "example.com/off", "effect": "NoExecute"}
    return project_taint_rule(
        {"metadata": {"name": "off", "uid": "off"}, "spec": {"taint": taint, **spec}}
    )


def a_class(**spec: Any) -> Any:
    return project_class({"metadata": {"name": "c", "uid": "c"}, "spec": spec})


ALL = exact(allocationMode="All")
WITH_COUNTERS = a_slice(consumesCounters=COUNTERS)

CASES = {
    "141323": ([a_template(exact(count=HUGE), exact(count=HUGE))], "ResourceClaimTemplate lab/t"),
    "138882": ([a_template(ALL), WITH_COUNTERS], "ResourceClaimTemplate lab/t"),
    "139681": ([a_rule(deviceSelector={"driver": "a.example.com"})], "DeviceTaintRule off"),
    "136269": ([a_claim()], "ResourceClaim lab/used"),
    "139034": (
        [a_slice(consumesCounters=COUNTERS, allowMultipleAllocations=True)],
        "ResourceSlice a.example.com-pool-a",
    ),
    "140436": (
        [a_slice(consumesCounters=COUNTERS, taints=[TAINT])],
        "ResourceSlice a.example.com-pool-a",
    ),
    "140434": (
        [counters_of("a.example.com", "one"), counters_of("b.example.com", "one")],
        "ResourceSlice b.example.com-one-counters",
    ),
    "140729": (
        [a_template(exact(adminAccess=True)), WITH_COUNTERS],
        "ResourceClaimTemplate lab/t",
    ),
    "133705": (
        [a_slice(allowMultipleAllocations=True)],
        "ResourceSlice a.example.com-pool-a",
    ),
    "137347": (
        [a_template([{"name": "s0", **exact()}, {"name": "s1", **ALL}])],
        "ResourceClaimTemplate lab/t",
    ),
    "140438": (
        [a_template(exact(count=2), constraints=[{"distinctAttribute": "a.example.com/numa"}])],
        "ResourceClaimTemplate lab/t",
    ),
    "140769": (
        [a_template(ALL), a_slice(allowMultipleAllocations=True)],
        "ResourceClaimTemplate lab/t",
    ),
    "139017": ([a_claim(), a_template(exact())], "ResourceClaim lab/used"),
    "142202": (
        [a_template(exact(capacity={"requests": {"a.example.com/memory": "1Gi"}}))],
        "ResourceClaimTemplate lab/t",
    ),
    "140798": ([a_slice(), a_claim(shareID="s")], "ResourceClaim lab/used"),
    "141620": ([a_rule()], "DeviceTaintRule off"),
    "134479": (
        [a_template(exact(tolerations=[{"operator": "Exists", "effect": "NoExecute"}]))],
        "ResourceClaimTemplate lab/t",
    ),
    "141290": (
        [a_slice(taints=[TAINT | {"effect": "NoExecute"}]), a_claim(device="dev-1", extended=True)],
        "ResourceClaim lab/used",
    ),
}
"""By the number of the bug: objects that meet it, and the one that is named."""

NOT_THE = {
    "141323": [a_template(exact(count=HUGE), exact(count=1))],
    "138882": [a_template(ALL, exact(count=2)), a_slice()],
    "140434": [counters_of("a.example.com", "one"), counters_of("a.example.com", "two")],
    "140729": [a_template(exact()), WITH_COUNTERS],
    "133705": [a_slice()],
    "137347": [a_template([{"name": "s0", **ALL}, {"name": "s1", **exact()}])],
    "140438": [a_template(exact(count=2), constraints=[{"matchAttribute": "a.example.com/numa"}])],
    "139017": [a_claim()],
    "142202": [a_template(exact(capacity={"requests": {"memory": "1Gi"}}))],
    "140798": [a_claim(), a_slice()],
    "141620": [a_rule(deviceSelector={})],
    "134479": [a_template(exact(tolerations=[{"operator": "Exists", "effect": "NoSchedule"}]))],
    "141290": [
        a_class(extendedResourceName="example.com/gpu"),
        a_slice(taints=[TAINT]),
        a_claim(device="dev-1", extended=True),
    ],
}
"""Objects like those that meet a bug, but which do not."""


def numbers(version: str, *facts: Any) -> dict[str, Any]:
    world = World()
    for fact in facts:
        world.apply(fact)
    return {each.link.rpartition("/")[2]: each for each in known_bugs(version, world)}


@pytest.mark.parametrize("number", CASES)
def test_a_bug_names_an_object_that_meets_it(number):
    facts, named = CASES[number]
    found = [each for version in FIRST if (each := numbers(version, *facts).get(number))]
    assert {each.object for each in found} == {named}


@pytest.mark.parametrize("number", NOT_THE)
def test_similar_objects_do_not_meet_a_bug(number):
    assert all(number not in numbers(version, *NOT_THE[number]) for version in FIRST)


def test_a_request_for_all_devices_meets_a_pool_that_is_not_ready():
    world = World()
    incomplete = counters_of("a.example.com", "one")
    for fact in (a_template(ALL), incomplete):
        world.apply(fact)
    assert "141829" not in {each.link[-6:] for each in known_bugs("v1.37.2", world)}
    of_node = {"metadata": {"name": "node-1", "uid": "n"}, "spec": {}, "status": {}}
    world.apply(project_node(of_node))
    assert "141829" in {each.link[-6:] for each in known_bugs("v1.37.2", world)}


@pytest.mark.parametrize(
    ("version", "number", "fixed"),
    [
        pytest.param("v1.36.4", "141323", "1.36.5", id="a-patch-before-the-fix"),
        pytest.param("v1.36.5", "141323", None, id="the-patch-with-the-fix"),
        pytest.param("v1.34.11+vendor.2", "141323", "1.34.12", id="a-version-of-a-vendor"),
        pytest.param("v1.39.0", "141323", None, id="a-release-that-was-not-read"),
        pytest.param("v1.33.0", "141323", None, id="an-older-release"),
        pytest.param("unknown", "141323", None, id="no-version"),
        pytest.param("v1.36.6", "140438", "1.37", id="fixed-in-the-next-minor-release"),
        pytest.param("v1.36.7", "140438", None, id="a-patch-that-was-not-read"),
        pytest.param("v1.37.0", "140438", None, id="a-minor-release-without-the-bug"),
        pytest.param("v1.37.2", "140729", "", id="not-fixed"),
        pytest.param("v1.38.0-alpha.2", "140729", "", id="not-fixed-in-an-alpha-release"),
        pytest.param("v1.37.2", "142202", "1.38", id="fixed-in-an-alpha-release"),
        pytest.param("v1.38.0-alpha.2", "142202", None, id="the-alpha-release-with-the-fix"),
        pytest.param("v1.37.1", "141290", "1.37.2", id="evictions-before-1.37.2"),
        pytest.param("v1.37.2", "141290", None, id="evictions-from-1.37.2-on"),
    ],
)
def test_a_bug_is_that_of_a_release(version, number, fixed):
    found = numbers(version, *CASES[number][0]).get(number)
    assert (found and found.fixed.removeprefix("Kubernetes ")) == fixed


@pytest.mark.parametrize("version", FIRST + NEWEST)
def test_a_cluster_without_devices_meets_no_bug(version):
    assert numbers(version) == {}
    assert numbers(version, a_slice(), a_class(), a_template(exact(), exact(count=2))) == {}


def test_each_row_has_a_link_of_its_own_and_releases_that_were_read():
    assert len({bug.link for bug in BUGS}) == len(BUGS)
    for bug in BUGS:
        assert re.fullmatch(
            r"https://github\.com/kubernetes/kubernetes/(issues|pull)/\d+", bug.link
        )
        assert bug.fixes.keys() <= READ.keys()
        for minor, patch in bug.fixes.items():
            assert patch is None or 0 < patch <= READ[minor]


# ---- kubelets and runtimes


def a_node(
    kubelet: str = "v1.37.2", runtime: str = "containerd://2.4.2", **allocatable: str
) -> Any:
    info = {"kubeletVersion": kubelet, "containerRuntimeVersion": runtime}
    ready = {"type": "Ready", "status": "True"}
    status = {"nodeInfo": info, "allocatable": allocatable, "conditions": [ready]}
    return project_node({"metadata": {"name": "n1", "uid": "n1"}, "status": status})


def of_node(driver: str = "a.example.com") -> Any:
    identity = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "pool": identity, "nodeName": "n1", "devices": [{"name": "d"}]}
    return project_slice({"metadata": {"name": driver, "uid": driver}, "spec": spec})


def on_node(node: Any, *facts: Any) -> tuple[World, set[str]]:
    world = World()
    for fact in (node, *facts):
        world.apply(fact)
    return world, {found.link.rpartition("/")[2] for _, found in bugs_of_node(node, world)}


TWO = [of_node(), of_node("b.example.com")]
PLUGIN = [a_class(extendedResourceName="squat.ai/pair")]


@pytest.mark.parametrize(
    ("node", "facts", "found"),
    [
        pytest.param(a_node(), [of_node()], set(), id="new-versions"),
        pytest.param(a_node("v1.34.1"), [of_node()], {"133920", "135901"}, id="idle-connection"),
        pytest.param(a_node("v1.34.2+k3s1"), [of_node()], {"135901"}, id="the-patch-with-a-fix"),
        pytest.param(a_node("v1.34.1"), [], set(), id="a-node-without-devices"),
        pytest.param(a_node("v1.36.3"), TWO, {"140274"}, id="two-drivers"),
        pytest.param(a_node("v1.35.4"), TWO, {"140274"}, id="a-release-without-a-fix"),
        pytest.param(a_node("v1.36.4"), TWO, set(), id="two-drivers-and-the-fix"),
        pytest.param(a_node(**{"squat.ai/pair": "0"}), PLUGIN, {"141426"}, id="old-device-plugin"),
        pytest.param(a_node(), PLUGIN, set(), id="no-device-plugin"),
        pytest.param(a_node(runtime="docker://29.4.0"), [of_node()], {"558"}, id="docker"),
        pytest.param(
            a_node(runtime="containerd://1.7.29"),
            [of_node()],
            {"9621", "12650"},
            id="containerd-1.7",
        ),
        pytest.param(
            a_node(runtime="containerd://1.7.30"), [of_node()], {"9621"}, id="containerd-1.7.30"
        ),
        pytest.param(
            a_node(runtime="containerd://2.0.5"), [of_node()], {"12650"}, id="containerd-2.0"
        ),
    ],
)
def test_nodes_have_the_bugs_of_their_versions(node, facts, found):
    assert on_node(node, *facts)[1] == found


POD = PodFacts(
    namespace="lab", name="p", uid="p", node="n1", claims=(PodClaim(name="c", claim="used"),)
)


def test_a_bug_that_can_be_the_cause_is_named():
    world, _ = on_node(a_node("v1.34.1", "docker://29.4.0"), of_node())
    behind = bug_behind(POD, Code.NOT_PREPARED, world)
    assert behind.startswith("kubelet 1.34.1 on node n1 loses its connection to a driver")
    assert "upgrade to Kubernetes 1.34.2 (" in behind
    assert "135901" not in behind, "the pod has one claim"
    assert "docker" not in behind
    assert "docker 29.4.0 on node n1 ignores the CDI devices" in bug_behind(POD, None, world)
    reserved = replace(a_claim(), consumers=(Consumer("pods", "p", "p"),), results=())
    world.apply(reserved)
    (reason,) = broken_pod(replace(POD, phase="Pending"), world, settled=True)
    assert (reason.code, reason.advice) == (Code.NOT_PREPARED, behind)


@pytest.mark.parametrize(
    ("pod", "code", "number"),
    [
        (replace(POD, claims=POD.claims * 2), Code.POD_NOT_STARTED, "140274"),
        (replace(POD, claims=(PodClaim(name="c", template="t"),)), Code.NOT_UNPREPARED, "139772"),
        (replace(POD, extended_claim="used"), Code.POD_NOT_STARTED, "141426"),
        (POD, Code.POD_NOT_STARTED, ""),
        (replace(POD, node="elsewhere", extended_claim="used"), Code.POD_NOT_STARTED, ""),
    ],
)
def test_what_a_pod_can_meet(pod, code, number):
    """The node does not need its own devices for that."""
    world, _ = on_node(a_node("v1.36.3"))
    behind = bug_behind(pod, code, world)
    assert number in behind
    assert bool(behind) is bool(number)


def test_each_row_of_nodes_has_a_link_of_its_own():
    assert len({bug.link for bug in NODE_BUGS}) == len(NODE_BUGS)
