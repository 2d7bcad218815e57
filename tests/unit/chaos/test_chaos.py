"""The count of leaks, and the sequence of faults: two nodes, two drivers, two claims."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from e2e.chaos.faults import KINDS, MAX_SECONDS, sequence
from e2e.chaos.leaks import KINDS as LEAKS
from e2e.chaos.leaks import NodeTraces, Traces, leaks, pools

DRIVERS = ("one.example.com", "two.example.com")
NODES = ("node-1", "node-2")
PAGE = (Path(__file__).parents[3] / "docs/contributors/chaos.md").read_text()


def claim(uid: str, *, pod: str, node: str, driver: str = DRIVERS[0]) -> dict[str, Any]:
    results = [{"driver": driver, "pool": f"{node}/cpus", "device": "cpu-0"}]
    return {
        "metadata": {"name": f"claim-{uid}", "uid": uid},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": f"pod-{pod}", "uid": pod}],
        },
    }


def pod(uid: str, phase: str = "Running") -> dict[str, Any]:
    return {"metadata": {"name": f"pod-{uid}", "uid": uid}, "status": {"phase": phase}}


def slice_of(node: str, driver: str, *devices: str, generation: int = 1, count: int = 1) -> dict:
    pool = {"name": f"{node}/cpus", "generation": generation, "resourceSliceCount": count}
    bodies = [{"name": name} for name in devices]
    return {"spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": bodies}}


def traces_of(driver: str, uid: str, plugin: str) -> NodeTraces:
    held = {driver: frozenset({uid})}
    sockets = frozenset({f"{driver}-{plugin}-reg.sock" for driver in DRIVERS})
    return NodeTraces(entries=held, files=held, sockets=sockets, own_sockets=sockets)


CLEAN = Traces(
    nodes={
        "node-1": traces_of(DRIVERS[0], "a", "plugin-1"),
        "node-2": traces_of(DRIVERS[1], "b", "plugin-2"),
    },
    claims=(
        claim("a", pod="x", node="node-1"),
        claim("b", pod="y", node="node-2", driver=DRIVERS[1]),
    ),
    pods=(pod("x"), pod("y")),
    slices=tuple(slice_of(node, driver, "cpu-0") for node in NODES for driver in DRIVERS),
)
EXPECTED = pools(CLEAN.slices)


def found(traces: Traces) -> dict[str, int]:
    return {kind: len(texts) for kind, texts in leaks(traces, EXPECTED).items() if texts}


def test_a_cluster_whose_traces_belong_to_running_pods_leaks_nothing():
    assert found(CLEAN) == {}
    assert tuple(leaks(CLEAN, EXPECTED)) == LEAKS


def node(traces: Traces, name: str, **changes: Any) -> Traces:
    return replace(traces, nodes={**traces.nodes, name: replace(traces.nodes[name], **changes)})


@pytest.mark.parametrize(
    ("leaking", "kinds"),
    [
        pytest.param(
            replace(CLEAN, claims=CLEAN.claims[:1]), {"checkpoint": 1, "cdi": 1}, id="claim-gone"
        ),
        pytest.param(
            # The same claim, on the wrong node.
            node(CLEAN, "node-2", entries={DRIVERS[0]: {"a"}, DRIVERS[1]: {"b"}}),
            {"checkpoint": 1},
            id="other-node",
        ),
        pytest.param(node(CLEAN, "node-1", files={}), {"unprepared": 1}, id="no-cdi-file"),
        pytest.param(node(CLEAN, "node-1", entries={}), {"unprepared": 1}, id="no-entry"),
        pytest.param(
            node(CLEAN, "node-1", own_sockets=frozenset()), {"sockets": 2}, id="old-sockets"
        ),
        pytest.param(node(CLEAN, "node-1", sockets=frozenset()), {"sockets": 2}, id="no-sockets"),
        pytest.param(replace(CLEAN, slices=CLEAN.slices[1:]), {"slices": 1}, id="slice-missing"),
        pytest.param(
            replace(
                CLEAN,
                slices=(
                    *CLEAN.slices[:-1],
                    slice_of("node-2", DRIVERS[1], "cpu-0", generation=1, count=2),
                    slice_of("node-2", DRIVERS[1], generation=2, count=2),
                ),
            ),
            {"slices": 1},
            id="two-generations",
        ),
        pytest.param(
            replace(
                CLEAN,
                slices=(*CLEAN.slices[:-1], slice_of("node-2", DRIVERS[1], "cpu-0", count=2)),
            ),
            {"slices": 1},
            id="incomplete-pool",
        ),
        pytest.param(
            replace(CLEAN, pods=(*CLEAN.pods[:1], pod("y", "Failed"))),
            {"reservations": 1},
            id="reserved-for-a-failed-pod",
        ),
        pytest.param(
            replace(CLEAN, pods=CLEAN.pods[1:]), {"reservations": 1}, id="reserved-for-no-pod"
        ),
        pytest.param(replace(CLEAN, rules=("rule",)), {"taints": 1}, id="rule"),
    ],
)
def test_each_leak_is_counted_by_its_kind(leaking: Traces, kinds: dict[str, int]):
    assert found(leaking) == kinds


def test_an_allocated_claim_without_a_reservation_is_a_leak():
    (first, second) = CLEAN.claims
    first = {**first, "status": {**first["status"], "reservedFor": []}}
    assert found(replace(CLEAN, claims=(first, second))) == {"reservations": 1}


def test_a_tainted_device_is_a_leak():
    tainted = slice_of("node-1", DRIVERS[0], "cpu-0")
    tainted["spec"]["devices"][0]["taints"] = [{"key": "drakit.dev/gone"}]
    assert found(replace(CLEAN, slices=(tainted, *CLEAN.slices[1:]))) == {"taints": 1}


# ------------------------------------------------------------ faults


def test_a_seed_has_one_sequence():
    first, again, other = (list(itertools.islice(sequence(seed, NODES), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_each_kind_comes_once_before_one_comes_again():
    faults = list(itertools.islice(sequence(3, NODES), 5 * len(KINDS)))
    for number in range(5):
        deck = faults[number * len(KINDS) : (number + 1) * len(KINDS)]
        assert {fault.kind for fault in deck} == set(KINDS)
        assert {fault.number for fault in deck} == {number}


def test_faults_of_one_node_and_those_that_need_the_api_server_exclude_each_other():
    faults = list(itertools.islice(sequence(4, NODES), 200))
    by_text = {(fault.kind, fault.what, fault.target): fault.targets for fault in faults}
    reboot, kubelet = by_text["reboot", "", "node-1"], by_text["kill", "kubelet", "node-1"]
    assert reboot & kubelet
    assert not reboot & by_text["reboot", "", "node-2"]
    assert by_text["upgrade", "", "api"] & by_text["hang", "etcd", "api"]
    assert by_text["upgrade", "", "api"] & by_text["kill", "kube-scheduler", "controllers"]
    assert not by_text["upgrade", "", "api"] & reboot
    assert by_text["cut", "pod", "node-1"] & by_text["no-history", "", "api"]


# ------------------------------------------------------------ the page


def test_the_page_lists_every_fault_with_its_longest_time_and_every_leak():
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
    names = [name.strip("`") for row in rows for name in row[0].strip().split(", ")]
    assert names == [*KINDS, *LEAKS]
    seconds = {
        name.strip("`"): row[2].strip()
        for row in rows
        if len(row) == 3
        for name in row[0].strip().split(", ")
    }
    for kind, most in MAX_SECONDS.items():
        assert seconds[kind] == f"{most:g} s"
