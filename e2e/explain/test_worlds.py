"""Random worlds through the real scheduler: where we say that a pod fits, and nowhere else."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from drakit_explain.pending import Explanation, Verdict
from e2e.cluster.api import Cluster, ClusterError
from e2e.explain.worlds import (
    RealWorld,
    RejectedWorldError,
    close_world,
    is_allocated,
    labelled,
    open_world,
    scene_of,
)
from e2e.kit import wait_for
from tests.situations.api import Api
from tests.situations.explaining import Explaining
from tests.situations.scene import Heartbeats, Scene

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.serial,
    pytest.mark.timeout(1200),
    pytest.mark.feature("explain"),
]

WORLDS = 100
MAX_SEEDS = 300
"""The API server refuses some worlds: those that no driver could publish."""

SETTLE_SECONDS = 0.4
"""Until the scheduler has seen the world: slices and pods come to it by different watches."""


def scheduler_agrees(found: Explanation, world: RealWorld, scene: Scene) -> bool:
    """Give the pod to the scheduler, and return whether it does what we say."""
    scene.release()
    if found.verdict is Verdict.FITS:
        try:
            wait_for("devices", lambda: is_allocated(world, scene), seconds=20)
        except ClusterError:
            return False
        return True
    scene.wait_refused()
    return not is_allocated(world, scene)


def test_a_pod_fits_where_we_say_so_and_nowhere_else(
    cluster: Cluster, api: Api, explaining: Explaining, heartbeats: Heartbeats
):
    node, other = cluster.nodes[:2]
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    with labelled(api, node):
        for seed in range(MAX_SEEDS):
            world = RealWorld.of(seed, node=node, other=other)
            scene = scene_of(seed, api, explaining, heartbeats, node=node, other=other)
            scene.open()
            try:
                open_world(world, scene)
                time.sleep(SETTLE_SECONDS)
                found = scene.explain()
                # Of an incomplete pool more may come, but now no device can be allocated from it.
                search_ended = not any("too long" in each for each in found.unknown)
                outcomes[found.verdict] += 1
                if search_ended and not scheduler_agrees(found, world, scene):
                    sentences = [reason.text for reason in found.reasons]
                    wrong.append(f"seed {seed}: {found.verdict}: {sentences} {found.unknown}")
            except RejectedWorldError as error:
                outcomes["rejected"] += 1
                print(f"seed {seed} is rejected: {error}")
            finally:
                close_world(world, scene)
            if outcomes.total() - outcomes["rejected"] == WORLDS:
                break
    print(dict(outcomes), *wrong, sep="\n")
    assert wrong == []
    assert outcomes.total() - outcomes["rejected"] == WORLDS
    assert outcomes[Verdict.FITS] >= 15
