"""The content of a NodeDeviceReport: bounded, sorted, and valid for its
CustomResourceDefinition."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml

from drakit import PolicyConflict, PolicyOutcome, RejectedDevice, RejectionReason
from drakit_formats.resource.device import Feature
from drakit_nodeplugin.devices.counts import DeviceCounts
from drakit_nodeplugin.devices.model import DeviceHealth, EndpointStatus
from drakit_nodeplugin.host.policies import PolicyState
from drakit_nodeplugin.host.report import (
    ReportFacts,
    StuckClaim,
    dated,
    object_of,
    report_name,
    status_of,
)

ROOT = Path(__file__).parents[3]
CRD = yaml.safe_load((ROOT / "charts/drakit/crds/nodedevicereports.yaml").read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

FEATURES = SCHEMA["properties"]["status"]["properties"]["droppedFields"]["items"]["properties"][
    "feature"
]["enum"]

FACTS = ReportFacts(
    registration="Registered",
    registration_message="",
    endpoints=[EndpointStatus(name="lamps.example.com", state="Running")],
    devices=DeviceCounts(free=1, unhealthy=2, allocated=1),
    published=4,
    unhealthy=[],
    dropped={},
    rejected=[RejectedDevice(device="/dev/sda", reason="InUse", policy="disks", message="in use")],
    rejected_count=1,
    claims={"prepared": 1},
    stuck=[],
    stuck_count=0,
    policies=[
        PolicyState(
            name="disks", uid="d", observed_generation=3, generation=2, problem="spec.x: no"
        )
    ],
    outcomes=[PolicyOutcome(policy="disks", matched=3, published=2, in_use=1, in_use_by="x")],
)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, which refuses unknown keys: the API server drops them."""
    made = dict(schema)
    if "properties" in schema:
        made["properties"] = {key: closed(each) for key, each in schema["properties"].items()}
        made["additionalProperties"] = False
    if "items" in schema:
        made["items"] = closed(schema["items"])
    return made


def unhealthy(device: str, message: str, *, pool: str = "node-1") -> DeviceHealth:
    return DeviceHealth(
        pool=pool, device=device, status="unhealthy", message=message, changed_at=1000
    )


def full(size: int) -> ReportFacts:
    """Facts that exceed every limit."""
    long = "x" * 5000
    names = [f"{n:05}" for n in range(size)]
    return ReportFacts(
        registration="Rejected",
        registration_message=long,
        endpoints=[EndpointStatus(name=n + long, state="Stopped", reason=long) for n in names],
        devices=DeviceCounts(free=size),
        published=size,
        unhealthy=[unhealthy(n + long, long, pool=n + long) for n in names],
        dropped=dict.fromkeys(FEATURES, long),
        rejected=[
            RejectedDevice(device=n + long, reason="Other", policy=n + long, message=long)
            for n in names
        ],
        rejected_count=size + 7,
        claims={"prepared": size, "preparing": 1, "unpreparing": size},
        stuck=[StuckClaim(namespace="lab", name=n, uid=n, state="unpreparing") for n in names][:20],
        stuck_count=size,
        policies=[
            PolicyState(name=n, uid=n, observed_generation=2, generation=1, problem=long)
            for n in names
        ],
        outcomes=[
            PolicyOutcome(
                policy=n,
                matched=1,
                problem=long,
                conflicts=tuple(PolicyConflict(device=d + long, policy=d) for d in names),
            )
            for n in names
        ],
        refusal=long,
    )


def body(facts: ReportFacts) -> dict[str, Any]:
    made = object_of(node="node-1", node_uid="uid-1", driver="lamps.example.com")
    return made | {"status": dated(status_of(facts), (), time="2026-11-26T12:00:00Z")}


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(FACTS, id="usual"),
        pytest.param(replace(FACTS, registration="Pending", policies=[], outcomes=[]), id="start"),
        pytest.param(full(300), id="far-too-much"),
    ],
)
def test_the_report_is_valid_for_its_schema(facts):
    jsonschema.validate(body(facts), closed(SCHEMA))


def test_entries_beyond_a_limit_are_counted():
    status = status_of(full(300))
    omitted = {key: value for key, value in status.items() if key.endswith("Omitted")}
    assert omitted == {
        "endpointsOmitted": 200,
        "rejectedDevicesOmitted": 207,
        "stuckClaimsOmitted": 280,
        "policiesOmitted": 280,
    }
    assert status["devices"]["rejected"] == 307
    assert status["policies"][0]["conflictsOmitted"] == 297


def test_the_order_of_facts_does_not_change_the_report():
    facts = full(120)
    shuffled = replace(
        facts,
        **{
            name: random.Random(3).sample(list(getattr(facts, name)), len(getattr(facts, name)))
            for name in ("endpoints", "unhealthy", "rejected", "stuck", "policies", "outcomes")
        },
    )
    assert status_of(shuffled) == status_of(facts)


PROBLEMS = {
    "none": ({}, {}),
    "slow-call": (
        {"slow_calls": ["it has not responded to prepare for 5 s (claim lab/a)", "x"]},
        {
            "ClaimsProgressing": (
                "False",
                "Slow",
                "2 slow calls: it has not responded to prepare for 5 s (claim lab/a); if this "
                "persists, restart the pod in which the driver runs",
            )
        },
    ),
    "rejected": (
        {"registration": "Rejected", "registration_message": "no socket"},
        {"Registered": ("False", "Rejected", "no socket")},
    ),
    "pending": ({"registration": "Pending"}, {"Registered": ("Unknown", "Pending", "")}),
    "stopped": (
        {
            "endpoints": [
                *(EndpointStatus(name=f"e{n}", state="Stopped", reason="x") for n in range(5)),
                EndpointStatus(name="w", state="Waiting"),
            ]
        },
        {"EndpointsRunning": ("False", "Stopped", "stopped: e0, e1, e2 and 2 more")},
    ),
    "waiting": (
        {"endpoints": [EndpointStatus(name=name, state="Waiting") for name in "ab"]},
        {"EndpointsRunning": ("False", "Waiting", "no devices were listed since the start: a, b")},
    ),
    "stuck": (
        {
            "stuck": [
                StuckClaim(namespace="lab", name=name, uid=name, state="preparing") for name in "ab"
            ],
            "stuck_count": 2,
        },
        {
            "ClaimsProgressing": (
                "False",
                "Stuck",
                "2 claims have been preparing or unpreparing for a minute, such as lab/a, lab/b",
            )
        },
    ),
}


@pytest.mark.parametrize(("facts", "expected"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_condition_is_true_unless_there_is_a_problem(facts, expected):
    found = {
        each["type"]: (each["status"], each["reason"], each["message"])
        for each in status_of(replace(FACTS, **facts))["conditions"]
    }
    assert found == {
        "Registered": ("True", "Registered", ""),
        "EndpointsRunning": ("True", "Running", ""),
        "ClaimsProgressing": ("True", "Progressing", ""),
        **expected,
    }


def test_entries_whose_names_are_cut_to_the_same_key_are_listed_once():
    names = ["x" * 300 + end for end in "ab"]
    facts = replace(
        FACTS,
        endpoints=[EndpointStatus(name=name, state="Running") for name in names],
        unhealthy=[unhealthy(name, "") for name in [*names, "y"]],
    )
    status = status_of(facts)
    assert len(status["endpoints"]) == status["endpointsOmitted"] == 1
    assert len(status["unhealthyDevices"]) == 2


def test_an_unhealthy_device_has_the_message_of_its_driver():
    facts = replace(FACTS, unhealthy=[unhealthy("b", "no link"), unhealthy("a", "")])
    assert status_of(facts)["unhealthyDevices"] == [
        {"pool": "node-1", "device": "a"},
        {"pool": "node-1", "device": "b", "message": "no link"},
    ]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        pytest.param("bulb is\n  broken\t", "bulb is broken", id="lines"),
        pytest.param("\x1b[31mred\x07", r"\u001b[31mred\u0007", id="terminal"),
        pytest.param("a\u202eb\udc80", r"a\u202eb\udc80", id="direction-and-half-character"),
        pytest.param("x" * 300, "x" * 253 + "...", id="long"),
        pytest.param("\x07" * 300, r"\u0007" * 42 + r"\...", id="long-when-escaped"),
        pytest.param(" " * 300 + "x", "...", id="long-and-blank"),
    ],
)
def test_hostile_messages_are_one_short_line_of_printable_characters(message, shown):
    devices = [unhealthy("a", "fine"), unhealthy("b", message)]
    found = status_of(replace(FACTS, unhealthy=devices))["unhealthyDevices"]
    assert [each["message"] for each in found] == ["fine", shown]
    assert shown.isprintable()
    assert len(shown) <= 256


def test_dropped_fields_are_those_of_the_schema_each_with_its_sentence():
    assert sorted(each.name.title().replace("_", "") for each in Feature) == FEATURES
    facts = replace(FACTS, dropped={"Taints": "no taints", "ListAttributes": "no lists"})
    assert status_of(facts)["droppedFields"] == [
        {"feature": "ListAttributes", "message": "no lists"},
        {"feature": "Taints", "message": "no taints"},
    ]


def test_a_policy_shows_its_generations_its_outcome_and_its_problem():
    assert status_of(FACTS)["policies"] == [
        {
            "name": "disks",
            "uid": "d",
            "observedGeneration": 3,
            "generation": 2,
            "matched": 3,
            "inUse": 1,
            "inUseBy": "x",
            "published": 2,
            "problem": "spec.x: no",
        }
    ]


def test_a_policy_that_the_driver_has_not_applied_has_no_outcome():
    """The outcome is of a deleted policy of the same name."""
    conflicts = (PolicyConflict(device="/dev/x", policy="old"),)
    facts = replace(
        FACTS,
        policies=[
            PolicyState(name=name, uid=f"uid-{name}", observed_generation=1, generation=generation)
            for name, generation in (("cams", None), ("mics", 1))
        ],
        outcomes=[
            PolicyOutcome(policy=name, matched=3, published=2, in_use=1, conflicts=conflicts)
            for name in ("cams", "mics")
        ],
    )
    cams, mics = status_of(facts)["policies"]
    assert cams == {
        "name": "cams",
        "uid": "uid-cams",
        "observedGeneration": 1,
        "matched": 0,
        "published": 0,
    }
    assert (mics["generation"], mics["matched"], mics["inUse"]) == (1, 3, 1)


def test_too_many_policies_are_cut_to_those_with_problems_changes_and_devices():
    quiet = [
        PolicyState(name=f"a{n:03}", uid="a", observed_generation=1, generation=1)
        for n in range(150)
    ]
    bad = PolicyState(
        name="y", uid="y", observed_generation=1, generation=None, problem="spec: is missing"
    )
    new = PolicyState(name="x", uid="x", observed_generation=1, generation=None)
    used = PolicyState(name="z", uid="z", observed_generation=1, generation=1)
    facts = replace(
        FACTS, policies=[*quiet, bad, new, used], outcomes=[PolicyOutcome(policy="z", matched=1)]
    )
    names = [each["name"] for each in status_of(facts)["policies"]]
    assert names[-3:] == ["x", "y", "z"]
    assert len(names) == 20


def test_the_name_of_a_report_is_that_of_node_and_driver_unless_it_is_too_long():
    assert report_name("node-1", "lamps.example.com") == "node-1.lamps.example.com"
    assert report_name("n" * 250, "lamps.example.com") is None


def test_the_words_of_reasons_are_the_same_in_contract_schema_and_page():
    words = set(get_args(RejectionReason))
    status = SCHEMA["properties"]["status"]["properties"]
    assert set(status["rejectedDevices"]["items"]["properties"]["reason"]["enum"]) == words
    page = (ROOT / "docs" / "reference" / "slices.md").read_text()
    section = page.partition("## Rejected devices")[2].partition("\n## ")[0]
    listed = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(listed) == sorted(words)


def test_every_field_of_the_schema_is_documented():
    def undocumented(schema: dict[str, Any], path: str) -> list[str]:
        found = [] if schema.get("description") else [path]
        for key, each in schema.get("properties", {}).items():
            found += undocumented(each, f"{path}.{key}")
        items = schema.get("items", {}).get("properties", {}).items()
        return found + list(
            itertools.chain.from_iterable(
                undocumented(each, f"{path}[].{key}") for key, each in items
            )
        )

    standard = {".apiVersion", ".kind", ".metadata"}
    assert set(undocumented(SCHEMA, "")) <= standard
