"""
A node plugin that is updated while pods start and stop: two instances at once, or one that cannot
start.

See `tests/scenarios.md`. `test_release.py` covers the removal of a release, and the rollback of
policies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.choice import REPOSITORY
from e2e.images.cache import kept
from e2e.images.vendor import vendor_image
from e2e.kit import devices, holds_for, ready, slice_versions, wait_for
from e2e.release import CHART, install, uninstall
from e2e.scripted import IMAGE
from e2e.scripted.control import Rule
from e2e.scripted.stage import (
    CLASSES,
    DEVICES,
    LAMPS,
    SCRIPTED,
    Stage,
    folder,
    install_scripted,
    scripted_values,
    wait_scripted,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.disruptive,
    pytest.mark.serial,
    pytest.mark.feature("release"),
]

SURGE = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
"""The new pod is ready before the old one stops."""


@pytest.fixture
def update(stage) -> Iterator[Any]:
    """Change values of the release, without waiting. The change is undone at the end."""
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
    """Return the pods of the daemon, oldest first, including terminating pods."""
    items = stage.cluster.get("pods", "-n", SCRIPTED.namespace)["items"]
    return sorted(items, key=lambda body: body["metadata"]["creationTimestamp"])


def standing(stage) -> list[bool]:
    """Return for each instance, oldest first, whether it is ready and not terminating."""
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

    # The new instance undoes the prepares of the old one.
    for name in ("before", "during", "after"):
        stage.delete("pod", name, wait=False)
    stage.wait_empty()


def run_pods(stage: Stage, *, until: Callable[[], bool]) -> None:
    """Run pods on all lamps except the first, round by round: at least three times, and until a
    condition is true."""
    rounds = 0
    while not until() or rounds < 3:
        names = [f"load-{uuid.uuid4().hex[:6]}-{index}" for index in range(1, DEVICES)]
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


def failed_prepares(stage: Stage, *, allowed: Sequence[str] = ()) -> list[str]:
    """Return the messages of failed prepares, except those with one of these words."""
    return [
        event["message"]
        for event in stage.items("events")
        if event["reason"] == "FailedPrepareDynamicResources"
        and not any(word in event["message"] for word in allowed)
    ]


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

    run_pods(stage, until=is_updated)
    assert failed_prepares(stage, allowed=allowed) == []
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


# ------------------------------------------------------------ an earlier commit

EARLIER = "93db3028c3ab822ede76383cbeffd88fbc290d9c"
"""The commit, of 2026-11-29, from which the test upgrades. It is built unchanged."""

MAX_GAP_SECONDS = 5.0
"""Maximum time in which the published devices of a driver may be incomplete."""


def earlier_checkout() -> Path:
    """Return the files of the earlier commit. Skip the test if the history is missing."""
    git = ("git", "-C", str(REPOSITORY))

    def has_commit() -> bool:
        argv = [*git, "cat-file", "-e", f"{EARLIER}^{{commit}}"]
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0

    if shutil.which("git") is None:
        pytest.skip("git is missing: the earlier commit cannot be built")
    if not has_commit():
        # A shallow clone, as in CI.
        argv = [*git, "fetch", "--quiet", "--depth=1", "origin", EARLIER]
        subprocess.run(argv, capture_output=True, timeout=120, check=False)
    if not has_commit():
        pytest.skip(f"this clone has no commit {EARLIER}: run git fetch --unshallow")

    def extract(place: Path) -> None:
        packed = place / "files.tar"
        subprocess.run([*git, "archive", f"--output={packed}", EARLIER], check=True)
        subprocess.run(["tar", "-x", "-f", packed, "-C", place], check=True)
        packed.unlink()

    return kept("checkouts", EARLIER, extract)


BUILD = """
import tempfile
from pathlib import Path
from e2e.images import build, context
with tempfile.TemporaryDirectory() as scratch:
    programs = Path(scratch, "cel")
    programs.mkdir()
    context.cel_programs = lambda minors: programs  # for the operator, which is not built
    print(build._built("nodeplugin", context.write_context(Path(scratch, "context")), print))
"""
"""Builds the image of the node plugin with the tools of the earlier commit, and prints its path."""


def earlier_image(checkout: Path) -> Path:
    """Return the archive of the earlier node plugin with the scripted drivers."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=checkout,
        env=environment | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    nodeplugin = Path(done.stdout.splitlines()[-1])
    return vendor_image("earlier", checkout / IMAGE.relative_to(REPOSITORY), nodeplugin=nodeplugin)


@contextmanager
def watched_devices(stage: Stage) -> Generator[dict[str, float]]:
    """Measure in the background, for each driver, the longest time with a missing device."""
    gaps = dict.fromkeys(CLASSES.values(), 0.0)
    complete = dict.fromkeys(gaps, time.monotonic())
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(0.3):
            for driver in gaps:
                found = len(devices(stage.cluster, driver=driver))
                now = time.monotonic()
                if found == DEVICES:
                    complete[driver] = now
                gaps[driver] = max(gaps[driver], now - complete[driver])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield gaps
    finally:
        stopped.set()
        thread.join()


@pytest.fixture
def earlier_release(stage: Stage) -> Iterator[None]:
    """The scripted drivers, installed from the earlier commit instead of the current one."""
    checkout = earlier_checkout()
    stage.cluster.load_image(earlier_image(checkout))
    build = (stage.plugin() or {})["metadata"]["annotations"]["drakit.dev/build"]
    uninstall(stage.cluster, SCRIPTED)
    for driver in CLASSES.values():
        stage.cluster.exec_on_node(stage.node, ["rm", "-rf", folder(driver)])
    try:
        values = scripted_values(stage.cluster, vendor="earlier", updateStrategy=SURGE)
        chart = checkout / CHART.relative_to(REPOSITORY)
        install(stage.cluster, SCRIPTED, values=values, build=build, chart=chart)
        wait_scripted(stage.cluster)
        yield
    finally:
        stage.wait_empty()
        install_scripted(stage.cluster, build=build)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_an_upgrade_from_an_earlier_commit_and_its_rollback_under_load(
    stage: Stage, earlier_release: None
):
    stage.with_lamp("resident", 0)
    stage.wait_phase("resident", "Running")
    stage.lamps.play(Rule(operation="prepare", delay_seconds=1.0))
    build = (stage.plugin() or {})["metadata"]["annotations"]["drakit.dev/build"]

    def is_replaced(old: dict[str, Any]) -> bool:
        found = instances(stage)
        return len(found) == 1 and found[0]["metadata"]["uid"] != old["metadata"]["uid"]

    with watched_devices(stage) as gaps:
        (first,) = instances(stage)
        install_scripted(stage.cluster, build=build, wait=False, updateStrategy=SURGE)
        run_pods(stage, until=lambda: is_replaced(first))
        (second,) = instances(stage)
        assert images_of(second) != images_of(first)

        stage.cluster.helm("rollback", SCRIPTED.name, "1", "-n", SCRIPTED.namespace)
        run_pods(stage, until=lambda: is_replaced(second))
        (third,) = instances(stage)
        assert images_of(third) == images_of(first)
    print(f"longest gaps: {gaps}")
    assert failed_prepares(stage) == []
    assert max(gaps.values()) <= MAX_GAP_SECONDS
    assert stage.phase("resident") == "Running"
    stage.delete("pod", "resident")
    stage.wait_empty()


def images_of(body: dict[str, Any]) -> list[str]:
    return [container["image"] for container in body["spec"]["containers"]]
