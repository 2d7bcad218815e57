"""
A node plugin is updated while pods come and go: two instances at once, or one that cannot start.

See `tests/scenarios.md`. What is removed with a release is in `test_release.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.kit import from_template, pod, ready, slices, template, wait_for
from e2e.scripted.control import Rule
from e2e.scripted.stage import CLASSES, LAMPS, SCRIPTED, Stage, install_scripted, number

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.disruptive,
    pytest.mark.serial,
    pytest.mark.feature("release"),
]

SURGE = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
"""The new pod is ready before the old one is stopped."""


@pytest.fixture
def update(stage) -> Iterator[Any]:
    """Change values of the release, without waiting; undone at the end."""
    annotations = stage.plugin()["metadata"]["annotations"]
    build = annotations["drakit.dev/build"]

    def change(**values: Any) -> None:
        install_scripted(
            stage.cluster, build=build, wait=False, **{"updateStrategy": SURGE, **values}
        )

    change()
    yield change
    install_scripted(stage.cluster, build=build)


def instances(stage) -> list[dict[str, Any]]:
    """The pods of the daemon, those that are being stopped included; the oldest first."""
    items = stage.cluster.get("pods", "-n", SCRIPTED.namespace)["items"]
    return sorted(items, key=lambda body: body["metadata"]["creationTimestamp"])


def run(stage, name, index) -> None:
    """A pod with one lamp, applied but not waited for."""
    stage.apply(
        template(name, ("lamp", "lamp.test", number(LAMPS, index))),
        pod(name, ("lamp", from_template(name))),
    )


def versions(stage) -> dict[str, str]:
    """The slices of both drivers, each with its version."""
    bodies = [body for d in CLASSES.values() for body in slices(stage.cluster, driver=d)]
    return {b["metadata"]["name"]: b["metadata"]["resourceVersion"] for b in bodies}


def test_a_rolling_update_has_no_downtime(stage: Stage, update):
    run(stage, "before", 0)
    stage.wait_phase("before", "Running")
    stage.lamps.play(Rule(operation="prepare", device="lamp-1", hang="cooperative"))
    run(stage, "during", 1)
    wait_for("a prepare in flight", lambda: stage.lamps.calls("prepare", device="lamp-1"))
    written = versions(stage)
    (old,) = instances(stage)

    update(podAnnotations={"update": "rolling"})
    # The old instance is stopped and waits for its call; the new one serves meanwhile.
    wait_for(
        "two instances",
        lambda: (
            [bool(b["metadata"].get("deletionTimestamp")) for b in instances(stage)]
            == [True, False]
        ),
        seconds=90,
        period=0.1,
    )
    run(stage, "after", 2)
    stage.wait_phase("after", "Running", seconds=20)
    assert len(instances(stage)) == 2
    assert stage.phase("during") == "Pending"
    stage.lamps.play()
    stage.wait_phase("during", "Running")
    wait_for("the old instance's end", lambda: len(instances(stage)) == 1)
    assert instances(stage)[0]["metadata"]["uid"] != old["metadata"]["uid"]
    assert len(stage.lamps.calls("prepare", "began", device="lamp-1")) == 1
    assert versions(stage) == written, "slices are not touched"

    # The new one undoes what the old one did.
    for name in ("before", "during", "after"):
        stage.delete("pod", name, wait=False)
    stage.wait_empty()


def test_after_an_update_that_cannot_start_the_old_instance_goes_on(stage: Stage, update):
    run(stage, "before", 0)
    stage.wait_phase("before", "Running")
    written = versions(stage)
    (old,) = instances(stage)

    update(drivers=[{"driver": "scripted:Missing"}])

    def failed() -> bool:
        new = [b for b in instances(stage) if b["metadata"]["uid"] != old["metadata"]["uid"]]
        return bool(new) and sum(
            status["restartCount"] for status in new[0]["status"].get("containerStatuses", [])
        )

    wait_for("the new instance to fail", failed, seconds=90)
    assert ready(instances(stage)[0])
    run(stage, "after", 1)
    stage.wait_phase("after", "Running")
    stage.delete("pod", "before")
    uid = stage.uid("after", "lamp")
    wait_for("the first lamp to be given back", lambda: stage.prepared() == {uid})
    assert versions(stage) == written
