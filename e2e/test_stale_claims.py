"""Claims that the kubelet will never unprepare: collected, unless a pod still uses them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cluster.api import Capability
from e2e.kit import claim, from_claim, from_template, holds_for, pod, template, wait_for
from e2e.scripted.stage import LAMPS, Stage, install_scripted, number, wait_scripted

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.disruptive,
    pytest.mark.serial,
    pytest.mark.feature("claims"),
]

GRACE_SECONDS = 4
SOON = {
    "period": "1s",
    "gracePeriod": f"{GRACE_SECONDS}s",
    "unconfirmedGracePeriod": "1h",
}
"""The default is two minutes. An hour is long enough that no test reaches it."""


@pytest.fixture(scope="module")
def soon(scripted, images) -> Iterator[None]:
    """A release that collects stale claims after seconds."""
    install_scripted(scripted, staleClaims=SOON)
    wait_scripted(scripted)
    yield
    install_scripted(scripted)


@pytest.fixture
def stage(soon, stage) -> Stage:
    return stage


def test_a_claim_that_the_kubelet_forgot_is_collected(stage):
    wanted = ("lamp", "lamp.test", number(LAMPS, 0))
    stage.apply(template("lamp", wanted), pod("user", ("lamp", from_template("lamp"))))
    stage.wait_phase("user", "Running")
    uid = stage.uid("user", "lamp")
    stage.cluster.stop_kubelet(stage.node)
    try:
        stage.delete("pod", "user", force=True, wait=False)
        wait_for("the claim to be gone", lambda: not stage.items("resourceclaim"))
        state = stage.cluster.node_path(stage.node, "/var/lib/kubelet/dra_manager_state")
        assert uid in state.read_text()
        state.unlink()
    finally:
        stage.cluster.start_kubelet(stage.node)
    stage.wait_empty()
    assert stage.lamps.story(claim_uid=uid)[-2:] == ["unprepare began", "unprepare ended"]
    asked = [line for line in stage.log() if "NodeUnprepareResources" in str(line)]
    assert not [line for line in asked if stage.name in str(line)], "the kubelet never asked"

    stage.apply(pod("next", ("lamp", from_template("lamp"))))
    stage.wait_phase("next", "Running")


@pytest.mark.slow
@pytest.mark.needs(Capability.CUT)
def test_a_kubelet_that_has_not_synced_its_pods_frees_no_claim(stage):
    command = ["sleep", "3611"]
    stage.apply(
        template("lamp", ("lamp", "lamp.test")),
        pod("user", ("lamp", from_template("lamp")), command=command),
    )
    stage.wait_phase("user", "Running")
    uid = stage.uid("user", "lamp")

    def container_runs() -> bool:
        argv = ["pgrep", "-f", "-x", "--", " ".join(command)]
        return stage.cluster.exec_on_node(stage.node, argv, check=False).returncode == 0

    stage.cluster.cut_kubelet(stage.node)
    try:
        # The kubelet serves podresources from its start, but cannot read the node's pods.
        stage.cluster.restart_kubelet(stage.node)
        stage.delete("pod", "user", force=True, wait=False)
        wait_for("the claim to be gone", lambda: not stage.items("resourceclaim"))
        holds_for(
            "the container's claim stays prepared",
            lambda: stage.prepared() == {uid} and stage.files(),
            seconds=5 * GRACE_SECONDS,
        )
        assert container_runs()
    finally:
        stage.cluster.heal_kubelet(stage.node)
    # The kubelet now ends the container, and either component unprepares the claim.
    stage.wait_empty()
    assert not container_runs()
    stage.cluster.wait_for_nodes()


@pytest.mark.slow
def test_a_claim_that_a_pod_still_uses_is_not_collected(stage):
    stage.apply(
        claim("lamp", ("lamp", "lamp.test")),
        pod("user", ("lamp", from_claim("lamp"))),
    )
    stage.wait_phase("user", "Running")
    uid = stage.uid("user", "lamp")
    # Delete it by force, as an administrator might. Its pod continues.
    patch = '{"metadata": {"finalizers": null}}'
    stage.delete("resourceclaim", "lamp", wait=False)
    stage.kubectl("patch", "resourceclaim", "lamp", "--type=merge", f"--patch={patch}")
    wait_for("the claim to be gone", lambda: not stage.items("resourceclaim"))
    holds_for(
        "the claim stays prepared",
        lambda: stage.prepared() == {uid} and stage.files(),
        seconds=3 * GRACE_SECONDS,
    )
    assert stage.phase("user") == "Running"
    stage.delete("pod", "user")
    stage.wait_empty()
