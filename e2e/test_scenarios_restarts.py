"""
Kubelets and plugins that are down, killed or restarted during an operation.

These are the plugin's part of upstream's list for the kubelet's node tests, as in
`tests/scenarios.md`. `test_faults.py` covers scenarios with hostdev's devices (a reboot, wiped
slices).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from e2e.kit import (
    from_template,
    holds_for,
    pod,
    ready,
    restarts,
    slice_versions,
    slices,
    template,
    wait_for,
)
from e2e.scripted.control import Rule
from e2e.scripted.stage import CLASSES, LAMPS, PROCESS, number, wait_began

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.disruptive,
    pytest.mark.serial,
    pytest.mark.feature("faults"),
]


def with_claim(stage, name, *requests) -> None:
    """Apply a pod with its own claim, but do not wait for it."""
    stage.apply(template(name, *requests), pod(name, ("claim", from_template(name))))


def lamp(index) -> tuple[str, str, str]:
    return ("lamp", "lamp.test", number(LAMPS, index))


BOTH = (("lamp", "lamp.test"), ("horn", "horn.test"))


@contextmanager
def kubelet_down(stage) -> Generator[None]:
    """Stop the kubelet of the stage's node during the block."""
    stage.cluster.stop_kubelet(stage.node)
    try:
        yield
    finally:
        stage.cluster.start_kubelet(stage.node)


def test_a_pod_that_came_while_the_kubelet_was_down_gets_its_device(stage):
    with kubelet_down(stage):
        with_claim(stage, "user", lamp(0))
        wait_for("the scheduler", lambda: stage.get("pod", "user")["spec"].get("nodeName"))
    stage.wait_phase("user", "Running", seconds=90)
    assert stage.lamps.story() == ["prepare began", "prepare ended"]


def test_a_restarted_kubelet_tries_again_what_had_failed(stage):
    with_claim(stage, "going", lamp(0))
    stage.wait_phase("going", "Running")
    broken = [
        Rule(operation="prepare", device="lamp-1", fail="no bulb"),
        Rule(operation="unprepare", device="lamp-0", fail="too hot"),
    ]
    stage.lamps.play(*broken)
    with_claim(stage, "coming", lamp(1))
    stage.delete("pod", "going", wait=False)
    stage.event("coming", "no bulb")
    wait_for("unprepare to fail", lambda: stage.lamps.calls("unprepare", "failed", device="lamp-0"))

    with kubelet_down(stage):
        stage.lamps.play()
    stage.wait_phase("coming", "Running", seconds=90)
    stage.wait_gone("going", seconds=90)
    assert stage.prepared() == {stage.uid("coming", "claim")}


def test_a_restarted_kubelet_asks_again_for_what_was_in_progress_in_two_drivers(stage):
    stage.lamps.play(Rule(operation="prepare", hang="cooperative"))
    with_claim(stage, "user", *BOTH)
    wait_began(stage.lamps, "prepare")
    stage.cluster.restart_kubelet(stage.node)
    # The call is held back until the new kubelet has called, which joins the work of the old one's
    # call.
    wait_for(
        "the kubelet's second call",
        lambda: sum("joins work" in line["msg"] for line in stage.log()),
        seconds=90,
    )
    stage.lamps.play()
    stage.wait_phase("user", "Running", seconds=90)
    uid = stage.uid("user", "claim")
    for script in stage.scripts:
        assert script.calls("prepare", "ended", claim_uid=uid)
    assert len(stage.lamps.calls("prepare", claim_uid=uid, moment="began")) == 1

    stage.lamps.play(Rule(operation="unprepare", hang="cooperative"))
    stage.delete("pod", "user", wait=False)
    wait_began(stage.lamps, "unprepare")
    stage.cluster.restart_kubelet(stage.node)
    stage.lamps.play()
    stage.wait_gone("user", seconds=90)
    stage.wait_empty()


@pytest.mark.parametrize(
    "forced",
    [
        pytest.param(False, id="deleted"),
        # The kubelet looks for claims of pods that no longer exist once a minute.
        pytest.param(True, id="force-deleted", marks=pytest.mark.slow),
    ],
)
def test_pods_that_were_deleted_while_the_kubelet_was_down(stage, forced):
    with_claim(stage, "running", lamp(0))
    stage.wait_phase("running", "Running")
    stage.lamps.play(
        Rule(operation="prepare", device="lamp-1", hang="cooperative"),
        Rule(operation="prepare", device="lamp-2", fail="no bulb"),
    )
    with_claim(stage, "hanging", lamp(1))
    with_claim(stage, "failing", lamp(2))
    wait_for("a prepare that hangs", lambda: stage.lamps.calls("prepare", device="lamp-1"))
    wait_for("a rollback", lambda: stage.lamps.calls("unprepare", "ended", device="lamp-2"))

    names = ("running", "hanging", "failing")
    with kubelet_down(stage):
        for name in names:
            stage.delete("pod", name, force=forced, wait=False)
        tried = len(stage.lamps.calls("prepare", device="lamp-2"))
    for name in names:
        stage.wait_gone(name, seconds=90)
    # The rule still applies, so the driver would never have returned from the hanging call by
    # itself.
    stage.wait_empty()
    assert "prepare canceled" in stage.lamps.story(device="lamp-1")
    assert stage.lamps.story(device="lamp-1")[-1] == "unprepare ended"
    assert len(stage.lamps.calls("prepare", device="lamp-2")) == tried, "nothing is prepared again"


def test_a_plugin_that_is_killed_while_it_prepares(stage):
    stage.lamps.play(Rule(operation="prepare", hang="cooperative"))
    with_claim(stage, "user", lamp(0))
    wait_began(stage.lamps, "prepare")
    uid = stage.uid("user", "claim")
    assert stage.lamps.held() == {f"lamp-0@{uid}"}, "the driver was half way"
    stage.cluster.exec_on_node(stage.node, ["pkill", "-KILL", "-f", "--", PROCESS])
    stage.lamps.play()
    stage.nudge("user")
    stage.wait_phase("user", "Running", seconds=120)
    assert stage.prepared() == {uid}
    assert len(stage.files()) == 1
    wait_for("the daemon", lambda: ready(stage.plugin()), seconds=90)


@pytest.mark.slow
def test_a_prepare_of_20_s_in_flight_at_sigterm_gets_its_answer(stage):
    stage.lamps.play(
        Rule(operation="prepare", device="lamp-0", delay_seconds=20),
        Rule(operation="prepare", device="lamp-1", delay_seconds=20),
    )
    with_claim(stage, "user", lamp(0))
    with_claim(stage, "other", lamp(1))
    for device in ("lamp-0", "lamp-1"):
        wait_for(
            f"the prepare of {device}",
            lambda device=device: stage.lamps.calls("prepare", "began", device=device),
            period=0.05,
        )
    before = restarts(stage.plugin())
    stage.cluster.exec_on_node(stage.node, ["pkill", "-TERM", "-f", "--", PROCESS])
    stage.lamps.play()

    # The kubelet retries a failed pod only after more than a minute, and emits an Event.
    for name in ("user", "other"):
        stage.wait_phase(name, "Running", seconds=60)
        assert "FailedPrepareDynamicResources" not in {e["reason"] for e in stage.events(name)}
    for device in ("lamp-0", "lamp-1"):
        assert stage.lamps.story(device=device) == ["prepare began", "prepare ended"]
    answered = [
        line
        for line in stage.log()
        if line["msg"] == "call completed" and line["method"].endswith("NodePrepareResources")
    ]
    assert [line["errors"] for line in answered] == [0, 0]
    assert min(line["seconds"] for line in answered) > 15
    wait_for(
        "the daemon to be started again",
        lambda: restarts(stage.plugin()) > before and ready(stage.plugin()),
        seconds=90,
    )


@pytest.mark.slow
def test_a_plugin_that_is_killed_while_it_unprepares(stage):
    with_claim(stage, "user", lamp(0))
    stage.wait_phase("user", "Running")
    stage.lamps.play(Rule(operation="unprepare", hang="cooperative"))
    stage.delete("pod", "user", wait=False)
    wait_began(stage.lamps, "unprepare")
    stage.cluster.exec_on_node(stage.node, ["pkill", "-KILL", "-f", "--", PROCESS])
    stage.lamps.play()
    stage.wait_gone("user", seconds=120)
    stage.wait_empty()
    wait_for("the daemon", lambda: ready(stage.plugin()), seconds=90)


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(5, id="5s"),
        # The kubelet removes the slices of a driver that is unavailable for 30 s.
        pytest.param(25, id="25s", marks=pytest.mark.slow),
    ],
)
def test_a_plugin_that_starts_after_the_pod_was_created_and_its_slices_stay(stage, seconds):
    before = slice_versions(stage.cluster, *CLASSES.values())
    with stage.without_plugin():
        with_claim(stage, "user", lamp(0))
        stage.event("user", LAMPS)
        assert stage.phase("user") == "Pending"
        holds_for("the slices stay", lambda: slices(stage.cluster, driver=LAMPS), seconds=seconds)
    stage.nudge("user")
    stage.wait_phase("user", "Running")
    # Shorter than the kubelet's 30 s, so nothing was wiped, and nothing is written.
    assert slice_versions(stage.cluster, *CLASSES.values()) == before


def test_the_kubelet_counts_the_claims_in_use(stage):
    with_claim(stage, "user", *BOTH)
    stage.wait_phase("user", "Running")

    def counted() -> dict[str, float]:
        text = stage.cluster.kubectl("get", "--raw", f"/api/v1/nodes/{stage.node}/proxy/metrics")
        found = [
            line.partition("{")[2].rpartition("} ")
            for line in text.stdout.splitlines()
            if line.startswith("dra_resource_claims_in_use{")
        ]
        return {labels.split('"')[1]: float(value) for labels, _, value in found}

    assert {counted().get(driver) for driver in CLASSES.values()} == {1.0}
    stage.delete("pod", "user")
    wait_for("no claim to be counted", lambda: counted().get(LAMPS, 0) == 0)


@pytest.mark.slow
def test_a_plugin_that_hangs_is_restarted_and_knows_what_it_had_prepared(stage):
    with_claim(stage, "user", lamp(0))
    stage.wait_phase("user", "Running")
    uid = stage.uid("user", "claim")
    before = restarts(stage.plugin())
    # Its sockets remain open, but nothing responds. Only the liveness probe detects that.
    stage.cluster.exec_on_node(stage.node, ["pkill", "-STOP", "-f", "--", PROCESS])
    wait_for(
        "the kubelet to restart it",
        lambda: restarts(stage.plugin()) > before and ready(stage.plugin()),
        seconds=180,
    )
    wait_for("the slices", lambda: slices(stage.cluster, driver=LAMPS))
    assert stage.phase("user") == "Running"
    assert stage.prepared() == {uid}
    stage.delete("pod", "user")
    stage.wait_empty()
