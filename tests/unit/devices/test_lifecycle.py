"""Each path through the life cycle of an endpoint, as the publisher and the store see it."""

from __future__ import annotations

import asyncio

import pytest

from drakit import Device
from drakit.device import Inventory
from drakit_nodeplugin.state.checkpoint import CheckpointError
from drakit_nodeplugin.state.records import StoredEndpoint
from tests.unit.devices.conftest import (
    DRIVER,
    NODE,
    Node,
    inventory,
    pass_time,
    published,
    shown,
)

pytestmark = pytest.mark.looptime

GOOD = {NODE: {"a": [], "b": []}}
STOPPED = {NODE: {"a": ["stopped"], "b": ["stopped"]}}


async def life(node: Node, *, seconds: float = 5.0) -> None:
    """A plugin that ran, with its driver, and ended."""
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        await pass_time(seconds)


# ------------------------------------------------------------ stop and return


async def test_an_endpoint_that_stops_is_tainted_at_once_and_untainted_when_it_returns(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        before = manager.publication()
        assert shown(before) == GOOD
        assert before.complete
        manager.stopped(DRIVER, "it ended")
        assert shown(manager.publication()) == STOPPED
        assert manager.stop_reason == "it ended"
        assert manager.capacity().pools[NODE].unhealthy == {"a", "b"}
        await pass_time(299)
        assert shown(manager.publication()) == STOPPED
        manager.replaced(DRIVER, inventory("a", "b"))
        assert manager.publication() == before
        assert manager.stop_reason is None
        await pass_time(1000)
        assert manager.publication() == before


async def test_another_reason_changes_neither_the_time_of_the_taint_nor_the_grace(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a"))
        await pass_time(100)
        manager.stopped(DRIVER, "it ended")
        await pass_time(299)
        manager.stopped(DRIVER, "it cannot be started")
        assert manager.stop_reason == "it cannot be started"
        (device,) = manager.publication().pools[NODE].devices
        assert [taint.added_at for taint in device.taints] == [int(node.epoch) + 100]
        await pass_time(2)
        assert manager.capacity().inactive == {NODE}


# ------------------------------------------------------------ removal


async def test_a_stopped_endpoint_is_removed_after_its_grace_and_then_forgotten(
    node: Node, looptime
):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        manager.stopped(DRIVER, "it ended")
        await pass_time(301)
        published = manager.publication()
        assert (published.pools, published.held, published.complete) == ({}, frozenset(), True)
        assert manager.capacity().inactive == {NODE}
        assert node.store.rows[DRIVER].removing
        manager.observe_published([NODE])
        await pass_time(2)
        assert node.store.rows[DRIVER].removing  # it is still to be deleted
        manager.observe_published([])
        await pass_time(2)
        assert node.store.rows == {}
        assert manager.capacity().inactive == set()
        assert manager.stop_reason == "it ended"  # and the plugin is still without its driver
        assert looptime == 305
        seen = manager.revision.number
        manager.observe_published([])  # the publisher reports it at each change
        assert manager.revision.number == seen


async def test_nothing_is_removed_before_the_store_knows_of_it(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        await pass_time(5)
        node.store.error = CheckpointError("the disk is full")
        manager.stopped(DRIVER, "it ended")
        await pass_time(1000)
        assert shown(manager.publication()) == STOPPED
        node.store.error = None
        await pass_time(61)
        assert manager.publication().pools == {}
        assert node.store.rows[DRIVER].removing


async def test_nothing_is_removed_while_the_sources_are_not_ready(node: Node):
    node.ready = False
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        assert not manager.publication().complete
        manager.stopped(DRIVER, "it ended")
        await pass_time(1000)
        assert shown(manager.publication()) == STOPPED
        assert not node.store.rows[DRIVER].removing
        seen = manager.revision.number
        manager.set_sources_ready()
        await pass_time(2)
        assert manager.publication().pools == {}
        assert manager.publication().complete
        assert manager.revision.number > seen


@pytest.mark.parametrize("removed", [False, True], ids=["during-its-removal", "after-it"])
async def test_an_endpoint_that_returns_is_published_again(node: Node, removed: bool):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        manager.stopped(DRIVER, "it ended")
        await pass_time(310)
        assert manager.publication().pools == {}
        if removed:
            manager.observe_published([])
            await pass_time(310)
        manager.replaced(DRIVER, inventory("a", "b"))
        assert shown(manager.publication()) == GOOD
        manager.observe_published([])
        assert shown(manager.publication()) == GOOD
        await pass_time(2)
        assert not node.store.rows[DRIVER].removing
        assert node.store.rows[DRIVER].pools == {NODE: ("a", "b")}


# ------------------------------------------------------------ restarts


async def test_a_restart_without_change_publishes_and_stores_the_same(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        await pass_time(5)
        before = manager.publication()
    writes = node.store.writes
    async with node.plugin() as manager:
        restarted = manager.publication()
        assert (restarted.pools, restarted.held) == ({}, {NODE})
        assert not restarted.complete
        assert manager.stop_reason is None
        await pass_time(20)
        assert manager.publication() == restarted
        manager.replaced(DRIVER, inventory("a", "b"))
        assert manager.publication() == before
        await pass_time(1000)
        assert manager.publication() == before
    assert node.store.writes == writes == 1


async def test_a_driver_missing_after_a_restart_is_tainted_when_the_start_grace_ends(node: Node):
    await life(node)
    async with node.plugin() as manager:
        await pass_time(29)
        assert manager.publication().held == {NODE}
        assert manager.capacity().pools[NODE].unhealthy == {"a", "b"}
        seen = manager.revision.number
        await pass_time(1)
        assert manager.revision.number > seen
        published = manager.publication()
        assert shown(published) == STOPPED
        assert published.complete
        assert published.pools[NODE].keeps_counter_sets
        assert all(device.device is None for device in published.pools[NODE].devices)
        assert manager.stop_reason is not None
        manager.replaced(DRIVER, inventory("a", "b"))
        assert shown(manager.publication()) == GOOD
        assert all(device.device for device in manager.publication().pools[NODE].devices)


async def test_a_plugin_that_restarts_repeatedly_does_not_restart_the_grace(node: Node):
    await life(node)
    for _ in range(4):
        async with node.plugin() as manager:
            await pass_time(60)
            assert shown(manager.publication()) == STOPPED
    async with node.plugin() as manager:
        await pass_time(59)
        assert shown(manager.publication()) == STOPPED
        await pass_time(3)
        assert manager.publication().pools == {}


async def test_a_removal_that_was_begun_is_finished_after_a_restart(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        manager.stopped(DRIVER, "it ended")
        await pass_time(302)
    assert node.store.rows[DRIVER].removing
    async with node.plugin() as manager:
        published = manager.publication()
        assert (published.pools, published.held, published.complete) == ({}, frozenset(), False)
        assert manager.capacity().inactive == {NODE}
        await pass_time(30)
        assert manager.publication().complete  # so that the pool, which is not named, is deleted
        manager.observe_published([])
        await pass_time(2)
    assert node.store.rows == {}


async def test_an_endpoint_that_is_not_configured_any_more_is_stopped_and_removed(node: Node):
    async with node.plugin("old", "new") as manager:
        manager.replaced("old", inventory("a", pool="olds"))
        manager.replaced("new", inventory("b", pool="news"))
        await pass_time(5)
    async with node.plugin("new") as manager:
        manager.replaced("new", inventory("b", pool="news"))
        assert shown(manager.publication()) == {f"{NODE}/news": {"b": []}}
        assert manager.publication().held == {f"{NODE}/olds"}
        assert not manager.publication().complete
        await pass_time(31)
        assert shown(manager.publication()) == {
            f"{NODE}/news": {"b": []},
            f"{NODE}/olds": {"a": ["stopped"]},
        }
        assert manager.stop_reason is None  # nobody waits for it
        await pass_time(271)
        assert shown(manager.publication()) == {f"{NODE}/news": {"b": []}}
        assert manager.capacity().inactive == {f"{NODE}/olds"}
        manager.observe_published([f"{NODE}/news"])
        await pass_time(2)
        assert node.store.rows.keys() == {"new"}
        assert manager.capacity().inactive == set()


async def test_a_pool_that_moved_to_another_endpoint_is_that_ones(node: Node):
    async with node.plugin("old") as manager:
        manager.replaced("old", inventory("a", "b"))
        await pass_time(5)
    async with node.plugin("new") as manager:
        manager.replaced("new", inventory("a", "b"))
        assert shown(manager.publication()) == GOOD
        await pass_time(305)
        assert shown(manager.publication()) == GOOD
        assert manager.capacity().inactive == set()
        manager.observe_published([NODE])
        await pass_time(2)
        assert node.store.rows.keys() == {"new"}
        assert shown(manager.publication()) == GOOD


# ------------------------------------------------------------ stores that fail or know nothing


async def test_a_store_that_cannot_be_read_at_the_start_is_read_later(node: Node):
    await life(node)
    node.store.error = CheckpointError("no such device")
    async with node.plugin() as manager:
        assert not manager.publication().complete
        await pass_time(100)
        assert not manager.publication().complete
        assert manager.publication().pools == {}
        node.store.error = None
        await pass_time(61)
        assert shown(manager.publication()) == STOPPED


async def test_an_endpoint_that_has_listed_wins_over_a_store_that_is_read_late(node: Node):
    await life(node)
    node.store.error = CheckpointError("no such device")
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("b", "c"))
        assert shown(manager.publication()) == {NODE: {"b": [], "c": []}}
        node.store.error = None
        await pass_time(61)
        assert shown(manager.publication()) == {NODE: {"b": [], "c": []}}
        assert node.store.rows[DRIVER].pools == {NODE: ("b", "c")}


async def test_without_a_stored_endpoint_what_is_published_is_left_alone_for_both_grace_periods(
    node: Node,
):
    async with node.plugin() as manager:
        await pass_time(299)
        assert not manager.publication().complete
        await pass_time(2)
        assert manager.publication().complete
        assert manager.stop_reason is not None


async def test_a_stop_in_the_future_is_a_stop_now(node: Node):
    node.store.rows[DRIVER] = StoredEndpoint(
        name=DRIVER, pools={NODE: ("a", "b")}, stopped_at=node.epoch + 1e9
    )
    async with node.plugin() as manager:
        await pass_time(299)
        assert shown(manager.publication()) == STOPPED
        await pass_time(3)
        assert manager.publication().pools == {}


async def test_names_are_stored_when_they_change_and_at_most_once_a_second(node: Node):
    async with node.plugin() as manager:
        for number in range(1000):
            manager.replaced(DRIVER, inventory("a", f"b-{number}"))
            await asyncio.sleep(0.01)
        await pass_time(2)
        assert node.store.rows[DRIVER].pools == {NODE: ("a", "b-999")}
        assert 10 <= node.store.writes <= 12
        writes = node.store.writes
        manager.stopped(DRIVER, "it ended")
        await pass_time(2)
        assert node.store.rows[DRIVER].stopped_at == node.wall_clock() - 2
        assert node.store.writes == writes + 1


# ------------------------------------------------------------ waiting before the first inventory


@pytest.mark.parametrize(
    ("returns", "stays_away", "seconds"),
    [
        pytest.param("one", "two", 300, id="and-one-was-available"),
        pytest.param("two", "one", 100, id="and-one-was-stopped"),
    ],
)
async def test_while_endpoints_must_not_list_no_grace_period_runs_and_slices_stay(
    node: Node, returns: str, stays_away: str, seconds: int
):

    def devices(pool: str) -> Inventory:
        return Inventory(devices=[Device(name=name, pool=pool) for name in ("a", "b")])

    async with node.plugin("one", "two") as manager:
        for name in ("one", "two"):
            manager.replaced(name, devices(name))
        await pass_time(1)
        manager.stopped("one", "it ended")
        await pass_time(200)
    writes = node.store.writes
    async with node.plugin("one", "two") as manager:
        manager.wait("the checkpoint cannot be read")
        await pass_time(3600)
        before = manager.publication()
        assert (before.pools, before.held) == ({}, {f"{NODE}/one", f"{NODE}/two"})
        assert not before.complete
        assert manager.stop_reason is None
        assert {(each.state, each.reason) for each in manager.endpoint_statuses()} == {
            ("Waiting", "the checkpoint cannot be read")
        }
        assert manager.capacity().inactive == set()
        assert node.store.writes == writes

        manager.wait(None)
        await pass_time(29)
        assert manager.publication() == before, "the grace period of a start begins now"
        manager.replaced(returns, devices(returns))
        await pass_time(1)
        assert shown(manager.publication()) == {
            f"{NODE}/{returns}": {"a": [], "b": []},
            f"{NODE}/{stays_away}": {"a": ["stopped"], "b": ["stopped"]},
        }
        await pass_time(seconds - 31)
        assert manager.capacity().inactive == set()
        await pass_time(1)
        assert manager.capacity().inactive == {f"{NODE}/{stays_away}"}


async def test_while_endpoints_must_not_list_pools_without_a_row_stay_as_well(node: Node):
    """Nobody knows yet whether a driver still has them: its rows were lost with the checkpoint."""
    async with node.plugin() as manager:
        manager.wait("the checkpoint is being rebuilt")
        await pass_time(3600)
        assert not manager.publication().complete
        manager.wait(None)
        await pass_time(29)
        assert not manager.publication().complete
        manager.replaced(DRIVER, inventory("a", "b"))
        assert shown(manager.publication()) == GOOD
        assert manager.publication().complete


async def test_taints_from_before_the_restart_outlast_the_wait(node: Node):
    await life(node)
    async with node.plugin() as manager:
        manager.wait("the checkpoint cannot be read")
        manager.adopt({(NODE, "a"): published("unhealthy", at=17)})
        await pass_time(3600)
        manager.wait(None)
        manager.replaced(DRIVER, inventory("a", "b"))
        assert shown(manager.publication()) == {NODE: {"a": ["unhealthy"], "b": []}}


# ------------------------------------------------------------ for people


async def test_people_see_the_state_of_an_endpoint_with_its_reason(node: Node):
    def status() -> tuple[str, str]:
        (each,) = manager.endpoint_statuses()
        return each.state, each.reason

    async with node.plugin() as manager:
        assert status()[0] == "Waiting"
        manager.replaced(DRIVER, inventory("a", "B_"))
        assert status() == ("Running", "")
        assert list(manager.rejected) == ["B_"]
        manager.stopped(DRIVER, "it ended")
        assert status() == ("Stopped", "it ended")
        await pass_time(301)
        assert status()[0] == "Removing"
