"""The operator explains why a pod waits, and writes only its own objects."""

from __future__ import annotations

import json
import time

import pytest

from e2e.cluster.api import Capability
from e2e.kit import NAMESPACE, from_template, pod, template, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.feature("operator", "explain")]

LEASE = "drakit-operator"
SELECTOR = "app.kubernetes.io/component=operator"


def events_about(space, name: str) -> list[dict]:
    """The operator's Events about an object."""
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


def holder(release) -> str:
    return release.kubectl(
        "-n", NAMESPACE, "get", "lease", LEASE, "-o", "jsonpath={.spec.holderIdentity}", check=False
    ).stdout


def test_a_pod_whose_class_is_missing_gets_an_event(space, release):
    wait_for("a leader", lambda: holder(release))
    space.apply(template("gone", ("gpu", "missing.test")))
    since = time.monotonic()
    space.apply(pod("waits", ("gpu", from_template("gone"))))

    event = first_event(space, "waits", since=since)

    assert "missing.test" in event["message"]
    assert event["type"] == "Warning"
    wait_for("the template's Event", lambda: events_about(space, "gone"), seconds=10)
    assert "missing.test" in events_about(space, "gone")[0]["message"]


def test_a_pod_whose_devices_are_all_taken_gets_an_event_with_their_users(space, release, zram):
    space.apply(template("disk", ("disk", "zram-second.test")))
    for number in range(len(zram.second)):
        space.apply(pod(f"holder-{number}", ("disk", from_template("disk"))))
        space.wait_phase(f"holder-{number}", "Running")
    since = time.monotonic()
    space.apply(pod("waits", ("disk", from_template("disk"))))

    event = first_event(space, "waits", since=since)

    assert "holder-0" in event["message"]
    time.sleep(3)
    assert len(events_about(space, "waits")) == 1, "one Event, however often it is evaluated"
    space.delete("pod", "holder-0")
    space.wait_phase("waits", "Running")


def nested_claim(name: str, *, levels: int) -> str:
    """A claim as text: encoders refuse parameters that are nested so deeply."""
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
def test_a_claim_that_cannot_be_parsed_keeps_no_other_pod_from_its_event(space, release):
    wait_for("a leader", lambda: holder(release))
    space.kubectl("create", "-f", "-", input=nested_claim("deep", levels=1200))
    space.apply(template("gone", ("gpu", "missing.test")))
    since = time.monotonic()
    space.apply(pod("watched", ("gpu", from_template("gone"))))
    first_event(space, "watched", since=since)

    # New replicas find the claim in their lists.
    release.kubectl("-n", NAMESPACE, "delete", "pod", "-l", SELECTOR, "--wait=true")
    space.apply(pod("listed", ("gpu", from_template("gone"))))
    wait_for("an Event about listed", lambda: events_about(space, "listed"), seconds=60)
    assert not events_about(space, "deep"), "the operator knows only its name"


def test_selectors_are_evaluated_with_the_feature_gates_of_the_cluster(release):
    leader = wait_for("a leader", lambda: holder(release)).rpartition("_")[0]

    def logged() -> list[dict]:
        log = release.kubectl("-n", NAMESPACE, "logs", leader).stdout
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        return [line for line in lines if "DRAListTypeAttributes" in line]

    (line,) = wait_for("the feature gates in the log", logged, seconds=10)
    # The first is on by default in Kubernetes 1.36, the second is off.
    for gate, default in (("DRAConsumableCapacity", True), ("DRAListTypeAttributes", False)):
        assert line[gate] is release.gates.get(gate, default)


@pytest.mark.needs(Capability.AUDIT)
def test_the_operator_writes_to_nothing_but_events_and_its_lease(space, release):
    space.apply(
        template("gone", ("gpu", "missing.test")), pod("waits", ("gpu", from_template("gone")))
    )
    wait_for("an Event", lambda: events_about(space, "waits"), seconds=10)
    user = f"system:serviceaccount:{NAMESPACE}:drakit-operator"
    written = {
        (record["verb"], record["objectRef"].get("resource"))
        for record in release.audit()
        if record["user"]["username"] == user
        and record["verb"] in ("create", "update", "patch", "delete", "deletecollection")
    }
    assert written
    # A review asks for a permission, and is not stored.
    allowed = {"events", "leases", "selfsubjectaccessreviews"}
    assert {resource for _, resource in written} <= allowed
