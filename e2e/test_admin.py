"""An administrator uses `drakit node` in the node plugin's pod."""

from __future__ import annotations

import json

import pytest

from e2e.cluster.api import CommandError
from e2e.kit import from_template, pod, template, wait_for
from e2e.scripted.control import Rule
from e2e.scripted.stage import HORNS, LAMPS, number

pytestmark = [pytest.mark.e2e, pytest.mark.feature("claims")]


def states(stage, uid: str) -> dict[str, str]:
    """Return the state of a claim in each driver's checkpoint."""
    result = json.loads(stage.drakit("node", "checkpoint", "show", "--json"))
    return {
        checkpoint["driver"]: entry["state"]
        for checkpoint in result["checkpoints"]
        for entry in checkpoint["claims"]
        if entry["uid"] == uid
    }


def test_the_checkpoints_are_shown_and_verified_while_the_plugin_runs(stage):
    stage.apply(
        template("both", ("lamp", "lamp.test"), ("horn", "horn.test")),
        pod("user", ("both", from_template("both"))),
    )
    stage.wait_phase("user", "Running")
    uid = stage.uid("user", "both")
    assert states(stage, uid) == {LAMPS: "prepared", HORNS: "prepared"}
    text = stage.drakit("node", "checkpoint", "show", "--driver", LAMPS)
    assert f"{stage.name}/{stage.claim_of('user', 'both')['metadata']['name']}" in text
    assert "no problems found" in stage.drakit("node", "checkpoint", "verify")

    stage.delete("pod", "user")
    assert states(stage, uid) == {}


def test_a_claim_in_use_is_not_forgotten_and_a_stuck_one_can_be(stage):
    wanted = ("lamp", "lamp.test", number(LAMPS, 0))
    stage.apply(template("lamp", wanted), pod("user", ("lamp", from_template("lamp"))))
    stage.wait_phase("user", "Running")
    uid = stage.uid("user", "lamp")
    with pytest.raises(CommandError, match="uses it; delete the pod"):
        stage.drakit("node", "claim", "forget", uid)
    assert states(stage, uid) == {LAMPS: "prepared"}

    stage.lamps.play(Rule(operation="unprepare", fail="the lamp is stuck"))
    stage.delete("pod", "user", wait=False)
    wait_for("unprepare to fail", lambda: stage.lamps.calls("unprepare", "failed"))
    assert states(stage, uid) == {LAMPS: "unpreparing"}
    text = stage.drakit("node", "claim", "forget", uid)
    assert "lamp-0" in text
    assert "did not unprepare" in text
    stage.nudge("user")
    stage.wait_gone("user")
    assert states(stage, uid) == {}
    assert stage.lamps.held() == {f"lamp-0@{uid}"}, "the driver's work is left to people"

    (stage.lamps.folder / "held" / "exclusive" / f"lamp-0@{uid}").unlink()
    stage.apply(pod("next", ("lamp", from_template("lamp"))))
    stage.wait_phase("next", "Running")
