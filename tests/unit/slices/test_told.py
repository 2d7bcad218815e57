"""What the publisher tells of what the API server holds: at its start, and after each change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.slices.conftest import Published
from tests.unit.slices.world import NODE, device, pool, taint

pytestmark = pytest.mark.looptime


async def test_what_was_published_as_unhealthy_is_told_after_a_restart(published: Published):
    await published.settled()
    assert published.before == [{}]
    unhealthy = taint("drakit.dev/unhealthy")
    evicted = replace(unhealthy, effect="NoExecute")
    dusty = taint("lab.example.com/dusty")
    published.source.says(
        pool("a", device("b", unhealthy), device("c", unhealthy, evicted), device("d", dusty))
    )
    await published.settled()
    await published.stop()

    published.restart()
    await published.start()
    await published.settled()

    assert published.before[1:] == [{(NODE, "b"): False, (NODE, "c"): True}]


async def test_the_pools_that_there_are_are_told_after_each_change(published: Published):
    await published.settled()
    assert published.pools[-1] == set()
    published.source.says({NODE: pool("a"), f"{NODE}/gpus": pool("b")})
    await published.settled()
    assert published.pools[-1] == {NODE, f"{NODE}/gpus"}
    published.source.says(pool("a"))
    await published.settled()
    assert published.pools[-1] == {NODE}


async def test_the_pools_are_told_when_what_is_wanted_changes(published: Published):
    published.source.says({}, held={NODE})
    await published.settled()
    before = len(published.pools)
    published.source.says({})
    await published.settled()
    assert published.pools[before:] == [set()], "one that was never there can be forgotten"
