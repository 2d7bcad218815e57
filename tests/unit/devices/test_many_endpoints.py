"""
A driver with an unknown number of endpoints, as with device plugins. Each has its own pool, appears
and disappears independently, and does not affect the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from drakit import Health
from drakit.device import Device, Inventory, PolicyOutcome, RejectedDevice
from drakit_driver.runtime.contract import HealthReport
from drakit_nodeplugin.devices.endpoint_state import MAX_REPORTED
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.state.records import StoredEndpoint
from tests.unit.devices.conftest import NODE, Node, cameras, pass_time, shown

pytestmark = pytest.mark.looptime

NOTHING = Inventory(devices=[])
RESOURCES = [f"vendor.example/thing-{number}" for number in range(50)]


def short(resource: str) -> str:
    return resource.partition("/")[2]


def pool(resource: str) -> str:
    return f"{NODE}/{short(resource)}"


def things(resource: str, *names: str, health: Health | None = None) -> Inventory:
    return Inventory(devices=cameras(*(names or ("dev-0",)), pool=short(resource), health=health))


A, B, C = RESOURCES[:3]


@contextlib.asynccontextmanager
async def plugin(node: Node, *, alone: bool = True) -> AsyncIterator[DeviceManager]:
    """Start a plugin whose driver expects no endpoint. With `alone`, the API server has exactly the
    pools that it publishes."""
    async with node.plugin(endpoints=()) as manager:
        server = asyncio.create_task(api_server(manager)) if alone else None
        yield manager
        if server is not None:
            server.cancel()


async def api_server(manager: DeviceManager) -> None:
    while True:
        publication = manager.publication()
        if publication.complete:
            manager.observe_published({*publication.pools, *publication.held})
        await asyncio.sleep(1)


async def test_what_endpoints_list_besides_devices_is_kept_together(node: Node):
    def listed(resource: str, *, marked: bool) -> Inventory:
        return Inventory(
            devices=[Device(name="dev-0", pool=short(resource), prepare_again=marked)],
            rejected=[RejectedDevice(device=f"{resource}-1", reason="InUse")],
            policies=[PolicyOutcome(policy=resource)],
        )

    async with plugin(node) as manager:
        revisions = manager.endpoint_changes, manager.mark_changes, manager.stop_changes
        seen = [each.number for each in revisions]
        manager.replaced(A, listed(A, marked=True))
        manager.replaced(B, listed(B, marked=True))
        assert manager.marked == {(pool(A), "dev-0"), (pool(B), "dev-0")}
        manager.replaced(B, listed(B, marked=False))
        assert manager.marked == {(pool(A), "dev-0")}
        manager.stopped(A, "it ended")
        assert manager.marked == set(), "it cannot be called"
        assert [each.device for each in manager.rejected_by_drivers] == [f"{A}-1", f"{B}-1"]
        assert [each.policy for each in manager.policy_outcomes] == [A, B]
        manager.replaced(B, listed(B, marked=False))
        changes = [each.number - before for each, before in zip(revisions, seen, strict=True)]
        assert changes == [5, 4, 1], "one stop, and nothing new without marks"


# ------------------------------------------------------------ endpoints without devices


async def test_endpoints_without_devices_have_no_pool_and_are_not_stored(node: Node):
    async with plugin(node) as manager:
        for resource in (A, B):
            manager.replaced(resource, NOTHING)
        manager.replaced(C, things(C))
        await pass_time(2)
        assert shown(manager.publication()) == {pool(C): {"dev-0": []}}
        assert node.store.rows.keys() == {C}
        assert manager.stop_reason is None


async def test_a_pool_whose_devices_go_stays_empty_and_takes_them_back(node: Node):
    async with plugin(node) as manager:
        manager.replaced(A, things(A))
        manager.replaced(B, things(B))
        for inventory, devices in ((NOTHING, {}), (things(A), {"dev-0": []})) * 3:
            await pass_time(1)
            manager.replaced(A, inventory)
            await pass_time(0)
            assert shown(manager.publication()) == {pool(A): devices, pool(B): {"dev-0": []}}
        manager.replaced(A, NOTHING)
        await pass_time(2)
        assert node.store.rows[A].pools == {pool(A): ()}


async def test_an_empty_pool_is_there_after_a_restart_and_goes_with_its_endpoint(node: Node):
    async with plugin(node) as manager:
        manager.replaced(A, things(A))
        await pass_time(1)
        manager.replaced(A, NOTHING)
        await pass_time(2)
    async with plugin(node) as manager:
        assert manager.publication().held == {pool(A)}
        manager.replaced(A, NOTHING)
        assert shown(manager.publication()) == {pool(A): {}}
        await pass_time(60)
        manager.stopped(A, "its stream ended")
        await pass_time(299)
        assert shown(manager.publication()) == {pool(A): {}}
        await pass_time(5)
        assert shown(manager.publication()) == {}
        assert node.store.rows == {}
        assert not manager.known


# ------------------------------------------------------------ stop and return


async def test_one_that_stops_is_named_and_the_others_are_untouched(node: Node):
    async with plugin(node) as manager:
        for resource in (A, B):
            manager.replaced(resource, things(resource))
        await pass_time(1)
        manager.stopped(A, "its socket was removed")
        assert shown(manager.publication()) == {
            pool(A): {"dev-0": ["stopped"]},
            pool(B): {"dev-0": []},
        }
        found = {state.pool: (state.status, state.message) for state in manager.health_states()}
        assert found == {
            pool(A): ("unknown", f"endpoint {A} is unavailable: its socket was removed"),
            pool(B): ("unknown", ""),
        }
        assert manager.stop_reason == f"endpoint {A}: its socket was removed"
        await pass_time(299)
        manager.replaced(A, things(A, "dev-0", "dev-1"))
        assert shown(manager.publication())[pool(A)] == {"dev-0": [], "dev-1": []}
        assert manager.stop_reason is None


async def test_past_the_grace_its_pool_goes_alone_and_it_may_return(node: Node):
    async with plugin(node) as manager:
        for resource in (A, B):
            manager.replaced(resource, things(resource))
        await pass_time(60)
        manager.stopped(A, "its stream ended")
        await pass_time(305)
        assert shown(manager.publication()) == {pool(B): {"dev-0": []}}
        assert manager.publication().complete
        assert manager.capacity().inactive == frozenset()
        assert node.store.rows.keys() == {B}
        assert manager.stop_reason is None, "nobody waits for it any more"
        manager.replaced(A, things(A))
        await pass_time(2)
        assert shown(manager.publication()) == {pool(A): {"dev-0": []}, pool(B): {"dev-0": []}}
        assert node.store.rows.keys() == {A, B}


async def test_names_that_never_had_a_device_are_not_kept(node: Node):
    async with plugin(node) as manager:
        manager.replaced(A, things(A))
        await pass_time(400)
        for number in range(100):
            manager.reported(f"bad.example/{number}", HealthReport(devices={}))
            manager.stopped(f"bad.example/{number}", "it refuses connections")
            manager.replaced(f"empty.example/{number}", NOTHING)
            manager.stopped(f"empty.example/{number}", "its stream ended")
        assert manager.publication().complete, "a stranger does not hold up the others' removal"
        assert manager.stop_reason == "endpoint empty.example/0: its stream ended"
        await pass_time(301)
        assert manager.stop_reason is None
        manager.stopped(A, "its stream ended")
        await pass_time(305)
        assert shown(manager.publication()) == {}
        assert not manager.known


async def test_a_name_of_anothers_pool_is_refused_until_that_one_is_gone(node: Node):
    async with plugin(node) as manager:
        manager.replaced(A, things(A))
        manager.replaced(B, things(A, "dev-9"))
        assert shown(manager.publication()) == {pool(A): {"dev-0": []}}
        assert [*node.rejected[-1]] == [pool(A)]
        assert manager.rejected_count == 1
        await pass_time(1)
        manager.replaced(A, NOTHING)
        manager.replaced(B, things(A, "dev-9"))
        assert shown(manager.publication()) == {pool(A): {"dev-9": []}}
        await pass_time(1)
        manager.replaced(A, things(A))
        assert shown(manager.publication()) == {pool(A): {"dev-9": []}}


async def test_rejected_devices_of_one_endpoint_do_not_hide_those_of_another(node: Node):
    async with plugin(node) as manager:
        for round_ in range(MAX_REPORTED // 100 + 5):
            bad = [Device(name=f"BAD-{round_}-{n}", pool="flood") for n in range(100)]
            manager.replaced(A, Inventory(devices=bad))
            await pass_time(1)
        assert sum(map(len, node.rejected)) == MAX_REPORTED
        manager.replaced(B, Inventory(devices=cameras("BAD", pool=short(B))))
        assert [*node.rejected[-1]] == [f"{short(B)}/BAD"]


# ------------------------------------------------------------ restart


async def filled(node: Node) -> None:
    """Fill the store: run a plugin with all endpoints."""
    async with plugin(node) as manager:
        for resource in RESOURCES:
            manager.replaced(resource, things(resource))
        await pass_time(2)
    node.store.writes = 0


async def test_after_a_restart_those_that_return_change_nothing_and_the_others_are_tainted_later(
    node: Node,
):
    await filled(node)
    returned, missing = RESOURCES[:40], RESOURCES[40:]
    async with plugin(node) as manager:
        assert manager.publication().held == {pool(resource) for resource in RESOURCES}
        await pass_time(5)
        for resource in returned:
            manager.replaced(resource, things(resource))
        publication = manager.publication()
        assert publication.held == {pool(resource) for resource in missing}
        assert publication.pools.keys() == {pool(resource) for resource in returned}
        assert not publication.complete
        await pass_time(24)
        assert manager.publication() is publication
        assert node.store.writes == 0
        await pass_time(1)
        assert shown(manager.publication()) == {
            pool(resource): {"dev-0": [] if resource in returned else ["stopped"]}
            for resource in RESOURCES
        }
        assert manager.publication().complete
        await pass_time(300)
        assert manager.publication().pools.keys() == {pool(resource) for resource in returned}
        assert node.store.rows.keys() == set(returned)


async def test_pools_without_an_endpoint_are_not_deleted_in_the_start_grace(node: Node):
    node.store.rows[B] = StoredEndpoint(name=B, pools={pool(B): ("dev-0",)})
    async with plugin(node, alone=False) as manager:
        manager.replaced(B, things(B))
        await pass_time(29)
        assert not manager.publication().complete
        await pass_time(1)
        assert manager.publication().complete


# ------------------------------------------------------------ the store


async def test_endpoints_that_come_and_go_together_are_stored_together(node: Node):
    async with plugin(node) as manager:
        await pass_time(2)
        for resource in RESOURCES:
            manager.replaced(resource, things(resource))
        await pass_time(2)
        assert (node.store.writes, len(node.store.rows)) == (1, 50)
        for resource in RESOURCES:
            manager.stopped(resource, "its stream ended")
        await pass_time(2)
        assert node.store.writes == 2
        await pass_time(305)
        assert node.store.rows == {}
        assert node.store.writes <= 6
