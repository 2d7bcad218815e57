"""
Drivers that fail, hang or take too long, and the effects on the pod.

These are the plugin's part of upstream's list for the kubelet's node tests, as in
`tests/scenarios.md`.
"""

from __future__ import annotations

import pytest

from e2e.cluster.api import Capability
from e2e.kit import claim, from_claim, from_template, holds_for, pod, template, wait_for
from e2e.scripted.control import Rule
from e2e.scripted.stage import LAMPS, number, wait_began

pytestmark = [pytest.mark.e2e, pytest.mark.feature("faults")]

BROKEN = "the lamp's wire is broken; mend it"


def test_a_prepare_that_fails_is_reported_and_tried_again(stage):
    stage.lamps.play(Rule(operation="prepare", fail=BROKEN, times=1))
    stage.with_lamp("user", 0)
    text = stage.event("user", BROKEN)
    claim_name = stage.claim_of("user", "lamp")["metadata"]["name"]
    assert f"{stage.name}/{claim_name}" in text
    assert "lamp-0" in text
    wait_for("the failed claim to be rolled back", lambda: not stage.lamps.held())
    assert stage.files() == set()

    stage.nudge("user")
    stage.wait_phase("user", "Running")
    assert stage.prepared() == {stage.uid("user", "lamp")}


def test_of_two_claims_of_a_pod_the_one_that_failed_is_prepared_again(stage):
    stage.lamps.play(Rule(operation="prepare", device="lamp-0", fail=BROKEN, times=1))
    stage.apply(
        template("bad", ("lamp", "lamp.test", number(LAMPS, 0))),
        template("good", ("lamp", "lamp.test", number(LAMPS, 1))),
        pod("user", ("bad", from_template("bad")), ("good", from_template("good"))),
    )
    stage.event("user", BROKEN)
    wait_for("the other claim to stay prepared", lambda: len(stage.files()) == 1)
    good = stage.uid("user", "good")
    assert stage.prepared() == {good}

    stage.nudge("user")
    stage.wait_phase("user", "Running")
    assert len(stage.lamps.calls("prepare", claim_uid=good, moment="began")) == 1


def test_an_unprepare_that_fails_keeps_the_pod_terminating_until_it_succeeds(stage):
    stage.with_lamp("user", 0)
    stage.wait_phase("user", "Running")
    uid = stage.uid("user", "lamp")
    stage.lamps.play(Rule(operation="unprepare", fail=BROKEN))
    stage.delete("pod", "user", wait=False)
    wait_for("unprepare to fail", lambda: stage.lamps.calls("unprepare", "failed"))

    def terminating() -> bool:
        body = stage.get("pod", "user")
        return bool(body and body["metadata"].get("deletionTimestamp"))

    holds_for("the pod is terminating", terminating, seconds=3)
    assert stage.prepared() == {uid}, "its device is not free"
    assert any(BROKEN in str(line) and uid in str(line) for line in stage.log())

    stage.lamps.play()
    stage.nudge("user")
    stage.wait_gone("user")
    stage.wait_empty()


@pytest.mark.parametrize(
    "other", ["horn.test", "tun.drakit.dev"], ids=["one-daemon", "two-daemons"]
)
def test_of_two_drivers_one_fails_to_prepare_and_then_recovers(stage, request, other):
    if other == "tun.drakit.dev":
        request.getfixturevalue("release")
    stage.lamps.play(Rule(operation="prepare", fail=BROKEN))
    stage.apply(
        template("both", ("lamp", "lamp.test"), ("other", other)),
        pod("user", ("both", from_template("both"))),
    )
    stage.event("user", BROKEN)
    stage.lamps.play()
    stage.nudge("user")
    stage.wait_phase("user", "Running")
    if other == "horn.test":
        uid = stage.uid("user", "both")
        ended = stage.horns.calls("prepare", "ended", claim_uid=uid)
        assert len(ended) == 1, "a retry does not disturb the driver that had succeeded"


@pytest.mark.parametrize(
    "other", ["horn.test", "tun.drakit.dev"], ids=["one-daemon", "two-daemons"]
)
def test_of_two_drivers_one_fails_to_unprepare_and_then_recovers(stage, request, other):
    if other == "tun.drakit.dev":
        request.getfixturevalue("release")
    stage.apply(
        template("both", ("lamp", "lamp.test"), ("other", other)),
        pod("user", ("both", from_template("both"))),
    )
    stage.wait_phase("user", "Running")
    stage.lamps.play(Rule(operation="unprepare", fail=BROKEN))
    stage.delete("pod", "user", wait=False)
    wait_for("unprepare to fail", lambda: stage.lamps.calls("unprepare", "failed"))
    assert stage.phase("user") != "Gone"
    stage.lamps.play()
    stage.wait_gone("user")
    stage.wait_empty()


@pytest.mark.disruptive
@pytest.mark.needs(Capability.CUT)
def test_a_claim_that_cannot_be_read_waits_for_the_api_server(stage):
    address = stage.plugin()["status"]["podIP"]
    stage.cluster.cut_pod(stage.node, address)
    try:
        stage.with_lamp("user", 0)
        text = stage.event("user", "API server")
        claim_name = stage.claim_of("user", "lamp")["metadata"]["name"]
        assert f"{stage.name}/{claim_name}" in text
        assert stage.lamps.story() == [], "without the claim nothing is known to prepare"
    finally:
        stage.cluster.heal_pod(stage.node, address)
    stage.nudge("user")
    stage.wait_phase("user", "Running")


def test_a_device_that_is_still_in_use_is_refused_with_its_holder_named(stage):
    stage.with_lamp("first", 0)
    stage.wait_phase("first", "Running")
    holder = stage.claim_of("first", "lamp")["metadata"]["name"]
    stuck = Rule(operation="unprepare", hang="cooperative")
    stage.lamps.play(stuck)
    # The claim is deleted with the pod, so the scheduler allocates the same device again.
    stage.delete("pod", "first", force=True, wait=False)
    wait_began(stage.lamps, "unprepare")

    stage.with_lamp("second", 0)
    text = stage.event("second", f"{stage.name}/{holder}")
    assert "lamp-0" in text
    assert stage.phase("second") == "Pending"
    stage.lamps.play()
    wait_for("the first claim to be unprepared", lambda: not stage.lamps.held())
    stage.nudge("second")
    stage.wait_phase("second", "Running")


def test_a_claim_of_the_same_name_waits_for_the_force_deleted_one(stage):
    wanted = claim("lamp", ("lamp", "lamp.test", number(LAMPS, 0)))
    user = pod("user", ("lamp", from_claim("lamp")))
    stage.apply(wanted, user)
    stage.wait_phase("user", "Running")
    old = stage.uid("user", "lamp")
    stage.lamps.play(Rule(operation="unprepare", hang="cooperative"))
    stage.delete("pod", "user", force=True, wait=False)
    wait_began(stage.lamps, "unprepare")
    stage.delete("resourceclaim", "lamp")

    stage.apply(wanted, user)
    wait_for("the new claim to be allocated", lambda: stage.get("pod", "user")["spec"]["nodeName"])
    new = stage.uid("user", "lamp")
    assert new != old
    stage.event("user", "UID")
    assert stage.lamps.calls("prepare", claim_uid=new) == []
    stage.lamps.play()
    wait_for("the old claim to be unprepared", lambda: not stage.lamps.held())
    stage.nudge("user")
    stage.wait_phase("user", "Running")
    assert stage.prepared() == {new}


@pytest.mark.slow
def test_a_prepare_call_that_hangs_is_canceled_when_its_pod_is_deleted(stage):
    # The kubelet of 1.36 does not cancel its call when the pod is deleted: it calls unprepare only
    # after the response at 40 s. A restarted kubelet calls it immediately
    # (test_scenarios_restarts).
    stage.lamps.play(Rule(operation="prepare", hang="cooperative"))
    stage.with_lamp("user", 0)
    wait_began(stage.lamps, "prepare")
    uid = stage.uid("user", "lamp")
    stage.delete("pod", "user", wait=False)
    # The rule still applies, so the driver would never have returned by itself.
    stage.wait_gone("user", seconds=90)
    stage.wait_empty()
    story = stage.lamps.story(claim_uid=uid)
    assert story == ["prepare began", "prepare canceled", "unprepare began", "unprepare ended"]


def test_a_prepare_that_blocks_its_thread_is_undone_once_it_ends(stage):
    stage.lamps.play(Rule(operation="prepare", hang="blocking"))
    stage.with_lamp("user", 0)
    wait_began(stage.lamps, "prepare")
    uid = stage.uid("user", "lamp")
    stage.delete("pod", "user", wait=False)
    # The other driver in the daemon is not affected.
    stage.apply(template("horn", ("horn", "horn.test")))
    stage.apply(pod("neighbour", ("horn", from_template("horn"))))
    stage.wait_phase("neighbour", "Running")
    assert "unprepare began" not in stage.lamps.story()

    stage.lamps.play()
    stage.wait_gone("user")
    wait_for("the lamp to be given back", lambda: not stage.lamps.held())
    assert stage.lamps.story(claim_uid=uid)[-1] == "unprepare ended"


@pytest.mark.slow
def test_a_prepare_that_outlasts_the_kubelets_deadline_is_joined_by_the_retry(stage):
    # The kubelet waits 45 s. After 40 s, the plugin responds that the work continues.
    stage.lamps.play(Rule(operation="prepare", delay_seconds=50))
    stage.with_lamp("user", 0)
    text = stage.event("user", "still", seconds=60)
    assert f"{stage.name}/" in text
    assert stage.phase("user") == "Pending"
    stage.nudge("user")
    stage.wait_phase("user", "Running")
    assert stage.lamps.story() == ["prepare began", "prepare ended"], "the driver was asked once"
    assert any("joins work" in line["msg"] for line in stage.log())
