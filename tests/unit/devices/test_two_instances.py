"""Two instances of a driver on one node, as in a rolling update: only the primary one stores."""

from __future__ import annotations

import asyncio

import pytest

from drakit_nodeplugin.state.checkpoint import CheckpointError
from drakit_nodeplugin.state.records import StoredEndpoint
from tests.unit.devices.conftest import DRIVER, NODE, Node, inventory, pass_time, shown

pytestmark = pytest.mark.looptime


@pytest.fixture
def second() -> asyncio.Event:
    """Set when the second instance becomes the primary one."""
    return asyncio.Event()


def hand_over(node: Node, second: asyncio.Event) -> None:
    node.primary.clear()
    second.set()


async def test_changes_of_the_other_instance_are_not_stored(node: Node, second: asyncio.Event):
    async with node.plugin() as first, node.plugin(primary=second) as other:
        first.replaced(DRIVER, inventory("a"))
        await pass_time(2)
        other.replaced(DRIVER, inventory("a"))
        other.stopped(DRIVER, "it cannot have the device twice")
        await pass_time(400)
        other.observe_published([])
        await pass_time(2)
        row = node.store.rows[DRIVER]
        assert (row.pools, row.stopped_at, row.removing) == ({NODE: ("a",)}, None, False)
        assert node.store.writes == 1


async def test_the_new_primary_instance_repairs_the_rows_of_the_other(
    node: Node, second: asyncio.Event
):
    async with node.plugin(primary=second) as other:
        other.replaced(DRIVER, inventory("a"))
        await pass_time(2)
        async with node.plugin() as first:
            first.replaced(DRIVER, inventory("a"))
            await pass_time(2)
            first.stopped(DRIVER, "it ended")
            await pass_time(2)
        assert node.store.rows[DRIVER].stopped_at is not None
        hand_over(node, second)
        await pass_time(2)
        assert node.store.rows[DRIVER] == StoredEndpoint(name=DRIVER, pools={NODE: ("a",)})


async def test_endpoints_that_the_other_instance_forgot_are_stored_again(
    node: Node, second: asyncio.Event
):
    async with node.plugin() as first:
        first.replaced(DRIVER, inventory("a"))
        await pass_time(2)
        async with node.plugin(primary=second) as other:
            other.replaced(DRIVER, inventory("a"))
            first.stopped(DRIVER, "it ended")
            await pass_time(302)
            first.observe_published([])
            await pass_time(2)
            assert node.store.rows == {}
            hand_over(node, second)
            await pass_time(2)
            assert node.store.rows.keys() == {DRIVER}


async def test_a_missing_endpoint_has_its_grace_from_the_moment_at_which_the_other_left_it(
    node: Node, second: asyncio.Event
):
    async with node.plugin(primary=second) as other:
        async with node.plugin() as first:
            first.replaced(DRIVER, inventory("a", "b"))
            await pass_time(1000)
        hand_over(node, second)
        await pass_time(2)
        stopped = {NODE: {"a": ["stopped"], "b": ["stopped"]}}
        assert shown(other.publication()) == stopped
        await pass_time(295)
        assert shown(other.publication()) == stopped
        await pass_time(6)
        assert other.publication().pools == {}


async def test_an_endpoint_that_the_other_instance_has_forgotten_does_not_return(
    node: Node, second: asyncio.Event
):
    async with node.plugin("old") as first:
        first.replaced("old", inventory("a"))
        await pass_time(2)
        async with node.plugin("old", primary=second) as other:
            first.stopped("old", "it ended")
            await pass_time(290)
            assert shown(other.publication()) == {NODE: {"a": ["stopped"]}}
            await pass_time(15)
            first.observe_published([])
            await pass_time(2)
            hand_over(node, second)
            await pass_time(2)
            assert other.publication().pools == {}
            assert node.store.rows == {}


async def test_nothing_is_deleted_before_the_new_primary_one_has_read_what_was_stored(
    node: Node, second: asyncio.Event
):
    async with node.plugin(primary=second) as other:
        await pass_time(400)
        async with node.plugin("also") as first:
            first.replaced("also", inventory("a"))
            await pass_time(2)
        assert other.publication().complete
        node.store.error = CheckpointError("no such device")
        hand_over(node, second)
        await pass_time(10)
        assert not other.publication().complete
        node.store.error = None
        await pass_time(61)
        assert shown(other.publication()) == {NODE: {"a": ["stopped"]}}


async def test_an_instance_that_is_the_primary_one_again_reads_again(
    node: Node, second: asyncio.Event
):
    second.set()
    async with node.plugin(primary=second) as manager:
        manager.replaced(DRIVER, inventory("a"))
        await pass_time(5)
        second.clear()
        manager.wake()
        await pass_time(2)
        node.store.rows.clear()
        second.set()
        manager.wake()
        await pass_time(2)
        assert node.store.rows[DRIVER].pools == {NODE: ("a",)}
