"""The publisher's reports about the API server: at its start, and after each change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drakit_nodeplugin.slices.contents import StoredSlice, published_taints
from tests.unit.slices.conftest import Published
from tests.unit.slices.world import NODE, device, pool, taint

pytestmark = pytest.mark.looptime


async def test_published_taints_are_reported_after_a_restart(published: Published):
    await published.settled()
    assert published.source.adopted == [{}]
    unhealthy = taint("drakit.dev/unhealthy", at=5)
    evicted = replace(unhealthy, effect="NoExecute", added_at=6)
    dusty = taint("lab.example.com/dusty", at=1_700_000_000)
    await published.publish(pool("a", device("b", unhealthy, evicted), device("c", dusty)))
    await published.stop()

    await published.start()
    await published.settled()

    assert published.source.adopted[1:] == [
        {
            (NODE, "b"): {
                ("drakit.dev/unhealthy", "NoSchedule"): 5,
                ("drakit.dev/unhealthy", "NoExecute"): 6,
            },
            (NODE, "c"): {("lab.example.com/dusty", "NoSchedule"): 1_700_000_000},
        }
    ]


def test_a_taint_without_a_valid_time_counts_as_published():
    devices = [
        {"name": "a", "taints": [{"key": "x", "effect": "NoSchedule"}]},
        {"name": "b", "taints": [{"key": "x", "effect": "NoSchedule", "timeAdded": "soon"}]},
    ]
    stored = StoredSlice.of({"spec": {"pool": {"name": NODE}, "devices": devices}})
    assert published_taints([stored]) == {
        (NODE, "a"): {("x", "NoSchedule"): None},
        (NODE, "b"): {("x", "NoSchedule"): None},
    }


async def test_existing_pools_are_reported_after_each_change(published: Published):
    await published.settled()
    assert published.source.pools[-1] == set()
    await published.publish({NODE: pool("a"), f"{NODE}/gpus": pool("b")})
    assert published.source.pools[-1] == {NODE, f"{NODE}/gpus"}
    await published.publish(pool("a"))
    assert published.source.pools[-1] == {NODE}


async def test_existing_pools_are_reported_when_the_desired_ones_change(published: Published):
    await published.publish({}, held={NODE})
    before = len(published.source.pools)
    await published.publish({})
    assert published.source.pools[before:] == [set()], "one that was never there can be forgotten"
