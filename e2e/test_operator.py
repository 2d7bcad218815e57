"""The operator explains why a pod waits, and writes only its own objects."""

from __future__ import annotations

import json
import time

import pytest

from e2e.closed_list import undocumented
from e2e.cluster.api import Capability
from e2e.kit import (
    NAMESPACE,
    OPERATOR,
    claim,
    device_class,
    from_claim,
    from_template,
    lease_holder,
    operator_metric,
    pod,
    template,
    wait_for,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.feature("operator", "explain")]


def events_about(space, name: str) -> list[dict]:
    """Return the operator's Events about an object."""
    return [
        event
        for event in space.events(name)
        if "drakit"
        in (event.get("reportingComponent") or event.get("source", {}).get("component", ""))
    ]


def first_event(space, name: str, *, since: float, within: float = 3.0) -> dict:
    wait_for(
        f"an Event about {name}", lambda: events_about(space, name), seconds=within + 5, period=0.1
    )
    seconds = time.monotonic() - since
    assert seconds <= within, f"the Event came after {seconds:.1f} s"
    return events_about(space, name)[0]


def test_a_pod_whose_devices_are_all_taken_gets_an_event_with_their_users(space, release, zram):
    space.apply(template("disk", ("disk", "zram-second.test")))
    for number in range(len(zram.second)):
        space.apply(pod(f"holder-{number}", ("disk", from_template("disk"))))
        space.wait_phase(f"holder-{number}", "Running")
    since = time.monotonic()
    space.apply(
        claim("shared", ("disk", "zram-second.test")),
        pod("waits", ("disk", from_claim("shared"))),
        pod("waits-alone", ("disk", from_template("disk"))),
    )

    event = first_event(space, "waits", since=since)

    assert "holder-0" in event["message"]
    (of_claim,) = wait_for("the claim's Event", lambda: events_about(space, "shared"), seconds=10)
    assert of_claim["reason"] == event["reason"] == "DevicesAllocated"
    start = "ResourceClaim shared is not allocated for pod waits: all 2 devices"
    assert of_claim["message"].startswith(start), of_claim["message"]
    assert "; the pod would fit on node " in of_claim["message"], of_claim["message"]
    assert of_claim["message"].endswith(" released its devices"), of_claim["message"]
    time.sleep(3)
    assert len(events_about(space, "waits")) == 1, "one Event, however often it is evaluated"
    assert len(events_about(space, "waits-alone")) == 1
    made = space.claim_of("waits-alone", "disk")["metadata"]["name"]
    assert events_about(space, made) == [], "the pod's Event has the same sentence"
    for name in ("waits", "shared"):
        wait_for(
            f"the Event about {name} to be repeated",
            lambda name=name: events_about(space, name)[0].get("series", {}).get("count", 1) > 1,
            seconds=20,
        )
        assert len(events_about(space, name)) == 1
    for name in ("holder-0", "holder-1"):
        space.delete("pod", name)
    for name in ("waits", "waits-alone"):
        space.wait_phase(name, "Running")


def hand_made_slice(name: str, node: str, *, pool: str = "shelf", slices: int = 1) -> dict:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": "shelf.test",
            "nodeName": node,
            "pool": {"name": pool, "generation": 1, "resourceSliceCount": slices},
            "devices": [{"name": "book"}],
        },
    }


def warnings(release, kind: str, name: str) -> set[str]:
    """Return the reasons of the operator's Events about an object without a namespace."""
    text = release.kubectl(
        "-n",
        "default",
        "get",
        "events",
        "-o",
        "json",
        f"--field-selector=involvedObject.kind={kind},involvedObject.name={name}",
    ).stdout
    return {
        each["reason"]
        for each in json.loads(text)["items"]
        if each.get("reportingComponent") == "drakit.dev/operator"
    }


def pools(release, state: str) -> float:
    return operator_metric(release, f'drakit_operator_pools{{state="{state}"}}')


def test_templates_classes_and_pools_with_a_problem_get_events(space, release, zram):
    first, second = release.nodes[:2]
    exactly = {"deviceClassName": "zram-second.test", "count": len(zram.second) + 1}
    too_many = template("many", {"name": "disk", "exactly": exactly})
    nothing = device_class(f"nothing.{space.name}", "nothing.test")
    slices = [
        hand_made_slice(f"{space.name}-half", first, pool="half", slices=2),
        hand_made_slice(f"{space.name}-twin-1", first),
        hand_made_slice(f"{space.name}-twin-2", second),
        hand_made_slice(f"{space.name}-lost", "lost", pool="lost"),
    ]
    try:
        space.apply(too_many, template("few", ("disk", "zram-second.test")), nothing, *slices)
        for kind, name, reason in (
            ("DeviceClass", nothing["metadata"]["name"], "NoDevicePublished"),
            ("Node", first, "PoolIncomplete"),
            ("Node", second, "PoolNameConflict"),
            ("ResourceSlice", f"{space.name}-lost", "NodeGone"),
        ):
            wait_for(
                f"{reason} about {name}",
                lambda kind=kind, name=name, reason=reason: reason in warnings(release, kind, name),
                seconds=20,
            )
        wait_for("the template's Event", lambda: events_about(space, "many"), seconds=10)
        assert pools(release, "incomplete") == 1
        assert pools(release, "conflicting") == 2
        assert pools(release, "node-missing") == 1
        time.sleep(12)  # longer than the time after which an Event is repeated
        (event,) = events_about(space, "many")
        assert event["reason"] == "NoDevicePublished"
        assert event.get("series", {}).get("count", 1) == 1, "a template gets one Event"
        assert not events_about(space, "few")
    finally:
        for each in (nothing, *slices):
            space.delete(each["kind"], each["metadata"]["name"])
    wait_for("the pools to be gone", lambda: not pools(release, "conflicting"), seconds=10)


def nested_claim(name: str, *, levels: int) -> str:
    """Return a claim as a string, because encoders reject parameters with this nesting."""
    parameters = {"nested": "HERE"}
    config = {"opaque": {"driver": "nested.test", "parameters": parameters}}
    exactly = {"deviceClassName": "missing.test"}
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {
            "devices": {"requests": [{"name": "gpu", "exactly": exactly}], "config": [config]}
        },
    }
    return json.dumps(body).replace('"HERE"', "[" * levels + "]" * levels)


@pytest.mark.disruptive
def test_a_claim_that_cannot_be_parsed_does_not_prevent_events_of_other_pods(space, release):
    wait_for("a leader", lambda: lease_holder(release))
    space.kubectl("create", "-f", "-", input=nested_claim("deep", levels=1200))
    space.apply(template("gone", ("gpu", "missing.test")))
    since = time.monotonic()
    space.apply(pod("watched", ("gpu", from_template("gone"))))
    first_event(space, "watched", since=since)

    # New replicas find the claim in their initial lists.
    release.kubectl("-n", NAMESPACE, "delete", "pod", "-l", OPERATOR, "--wait=true")
    space.apply(pod("listed", ("gpu", from_template("gone"))))
    wait_for("an Event about listed", lambda: events_about(space, "listed"), seconds=60)
    assert not events_about(space, "deep"), "the operator knows only its name"


def test_selectors_are_evaluated_with_the_feature_gates_of_the_cluster(release):
    leader = wait_for("a leader", lambda: lease_holder(release)).rpartition("_")[0]

    def logged() -> list[dict]:
        log = release.kubectl("-n", NAMESPACE, "logs", leader).stdout
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        return [line for line in lines if "DRAListTypeAttributes" in line]

    (line,) = wait_for("the feature gates in the log", logged, seconds=10)
    # By default, the first is enabled in Kubernetes 1.36, and the second is disabled.
    for gate, default in (("DRAConsumableCapacity", True), ("DRAListTypeAttributes", False)):
        assert line[gate] is release.gates.get(gate, default)


@pytest.mark.needs(Capability.AUDIT)
def test_the_operator_writes_only_what_its_page_lists(space, release):
    space.apply(
        template("gone", ("gpu", "missing.test")), pod("waits", ("gpu", from_template("gone")))
    )
    wait_for("an Event", lambda: events_about(space, "waits"), seconds=10)
    records = release.audit()
    of_operator = f"system:serviceaccount:{NAMESPACE}:drakit-operator"
    agents = {each["userAgent"] for each in records if each["user"]["username"] == of_operator}
    # Other tests also use the operator's token, so identify its writes by the user agent.
    assert any(each.startswith("drakit-operator") for each in agents)
    assert undocumented(records) == set()
