"""
A node plugin is updated while pods come and go: two instances at once, or one that cannot start.

See `tests/scenarios.md`. What is removed with a release is in `test_release.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.kit import holds_for, ready, slice_versions, wait_for
from e2e.scripted.control import Rule
from e2e.scripted.stage import CLASSES, DEVICES, LAMPS, SCRIPTED, Stage, install_scripted

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


def standing(stage) -> list[bool]:
    """For each instance, whether it is ready and stays; the oldest first."""
    return [ready(b) and "deletionTimestamp" not in b["metadata"] for b in instances(stage)]


def test_a_rolling_update_hands_over_when_calls_in_flight_have_ended(stage: Stage, update):
    stage.with_lamp("before", 0)
    stage.wait_phase("before", "Running")
    stage.lamps.play(Rule(operation="prepare", device="lamp-1", hang="cooperative"))
    stage.with_lamp("during", 1)
    wait_for("a prepare in flight", lambda: stage.lamps.calls("prepare", device="lamp-1"))
    written = slice_versions(stage.cluster, *CLASSES.values())
    (old,) = instances(stage)

    update(podAnnotations={"update": "rolling"})
    wait_for("a second instance", lambda: len(instances(stage)) == 2, seconds=90, period=0.1)
    stage.with_lamp("after", 2)
    # The old instance works on its call, so the new one is not ready, and its calls wait.
    holds_for("both instances to stay", lambda: standing(stage) == [True, False], seconds=10)
    assert {stage.phase("during"), stage.phase("after")} == {"Pending"}
    stage.lamps.play()
    stage.wait_phase("during", "Running")
    stage.wait_phase("after", "Running")
    wait_for("the old instance's end", lambda: len(instances(stage)) == 1)
    assert instances(stage)[0]["metadata"]["uid"] != old["metadata"]["uid"]
    assert len(stage.lamps.calls("prepare", "began", device="lamp-1")) == 1
    assert slice_versions(stage.cluster, *CLASSES.values()) == written, "slices are not touched"

    # The new one undoes what the old one did.
    for name in ("before", "during", "after"):
        stage.delete("pod", name, wait=False)
    stage.wait_empty()


@pytest.mark.parametrize(
    ("strategy", "allowed"),
    [
        pytest.param(SURGE, (), id="with-surge"),
        pytest.param(
            {"type": "RollingUpdate"},
            ("not registered",),
            id="without-surge",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rolling_update_under_load(stage: Stage, update, strategy, allowed):
    update(updateStrategy=strategy)
    stage.with_lamp("resident", 0)
    stage.wait_phase("resident", "Running")
    stage.lamps.play(Rule(operation="prepare", delay_seconds=1.0))
    written = slice_versions(stage.cluster, *CLASSES.values())
    (old,) = instances(stage)
    update(updateStrategy=strategy, podAnnotations={"update": "under-load"})

    def is_updated() -> bool:
        found = instances(stage)
        return len(found) == 1 and found[0]["metadata"]["uid"] != old["metadata"]["uid"]

    rounds = 0
    while not is_updated() or rounds < 3:
        names = [f"load-{rounds}-{index}" for index in range(1, DEVICES)]
        for index, name in enumerate(names, start=1):
            stage.with_lamp(name, index)
        for name in names:
            stage.wait_phase(name, "Running", seconds=150)
        for name in names:
            stage.delete("pod", name, wait=False)
        for name in names:
            stage.wait_gone(name, seconds=120)
        rounds += 1
        assert rounds < 20, "the update does not end"
    failed = [
        event["message"]
        for event in stage.items("events")
        if event["reason"] == "FailedPrepareDynamicResources"
        and not any(word in event["message"] for word in allowed)
    ]
    assert failed == []
    assert stage.phase("resident") == "Running"
    assert slice_versions(stage.cluster, *CLASSES.values()) == written, "slices are not touched"


def test_after_an_update_that_cannot_start_the_old_instance_goes_on(stage: Stage, update):
    stage.with_lamp("before", 0)
    stage.wait_phase("before", "Running")
    written = slice_versions(stage.cluster, *CLASSES.values())
    (old,) = instances(stage)

    update(drivers=[{"driver": "scripted:Missing", "name": LAMPS}])

    def failed() -> bool:
        new = [b for b in instances(stage) if b["metadata"]["uid"] != old["metadata"]["uid"]]
        return bool(new) and sum(
            status["restartCount"] for status in new[0]["status"].get("containerStatuses", [])
        )

    wait_for("the new instance to fail", failed, seconds=90)
    assert ready(instances(stage)[0])
    stage.with_lamp("after", 1)
    stage.wait_phase("after", "Running")
    stage.delete("pod", "before")
    uid = stage.uid("after", "lamp")
    wait_for("the first lamp to be given back", lambda: stage.prepared() == {uid})
    assert slice_versions(stage.cluster, *CLASSES.values()) == written
