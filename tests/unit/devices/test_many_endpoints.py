"""
A driver with an unknown number of endpoints, as with device plugins. Each has its own pool, appears
and disappears independently, and does not affect the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

import pytest

from drakit import Health
from drakit.device import Device, Inventory, LeftOut, PolicyOutcome
from drakit_nodeplugin.devices.endpoint_state import MAX_REPORTED
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.endpoints.contract import DeviceKey, HealthReport
from drakit_nodeplugin.slices.publisher import SlicePublisher
from drakit_nodeplugin.state.records import StoredEndpoint
from tests.fakes.kube import FakeApiServer
from tests.unit.devices.conftest import DRIVER, NODE, SETTINGS, Node, cameras, pass_time, shown
from tests.unit.slices.conftest import NODES, SLICES, Link

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
            left_out=[LeftOut(device=f"{resource}-1", reason="InUse")],
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
        assert [each.device for each in manager.left_out_by_drivers] == [f"{A}-1", f"{B}-1"]
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
            pool(A): ("unknown", f"endpoint {A} is stopped: its socket was removed"),
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
        assert [*node.left_out[-1]] == [pool(A)]
        assert manager.left_out_count == 1
        await pass_time(1)
        manager.replaced(A, NOTHING)
        manager.replaced(B, things(A, "dev-9"))
        assert shown(manager.publication()) == {pool(A): {"dev-9": []}}
        await pass_time(1)
        manager.replaced(A, things(A))
        assert shown(manager.publication()) == {pool(A): {"dev-9": []}}


async def test_left_out_devices_of_one_endpoint_do_not_hide_those_of_another(node: Node):
    async with plugin(node) as manager:
        for round_ in range(MAX_REPORTED // 100 + 5):
            bad = [Device(name=f"BAD-{round_}-{n}", pool="flood") for n in range(100)]
            manager.replaced(A, Inventory(devices=bad))
            await pass_time(1)
        assert sum(map(len, node.left_out)) == MAX_REPORTED
        manager.replaced(B, Inventory(devices=cameras("BAD", pool=short(B))))
        assert [*node.left_out[-1]] == [f"{short(B)}/BAD"]


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


async def test_a_removal_that_was_begun_is_finished_after_a_restart(node: Node):
    node.store.rows[A] = StoredEndpoint(
        name=A, pools={pool(A): ("dev-0",)}, stopped_at=node.epoch - 400, removing=True
    )
    node.store.rows[B] = StoredEndpoint(name=B, pools={pool(B): ("dev-0",)})
    async with plugin(node) as manager:
        manager.replaced(B, things(B))
        await pass_time(29)
        assert A in node.store.rows, "whose pool it is, is not known of all before"
        await pass_time(3)
        assert shown(manager.publication()) == {pool(B): {"dev-0": []}}
        assert node.store.rows.keys() == {B}


@pytest.mark.parametrize(
    ("stored", "seconds"),
    [
        pytest.param(True, 30, id="an-endpoint-that-was-just-not-stored-has-the-start-grace"),
        pytest.param(False, 300, id="where-nothing-is-stored-all-have-the-grace-of-a-stop"),
    ],
)
async def test_unknown_pools_are_not_deleted_at_once(node: Node, stored: bool, seconds: int):
    if stored:
        node.store.rows[B] = StoredEndpoint(name=B, pools={pool(B): ("dev-0",)})
    async with plugin(node, alone=False) as manager:
        manager.replaced(B, things(B))
        await pass_time(seconds - 1)
        assert not manager.publication().complete
        await pass_time(1)
        assert manager.publication().complete


# ------------------------------------------------------------ the store, and slices


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


class Cluster:
    """A manager that publishes to an API server."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.server = FakeApiServer()
        self.server.store(f"{NODES}/{NODE}", {"metadata": {"uid": "node-uid"}})
        self.link = Link(self.server)

    @contextlib.asynccontextmanager
    async def plugin(self) -> AsyncIterator[DeviceManager]:
        session: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        session.set_result(self.link)
        async with self.node.plugin(endpoints=()) as manager:
            publisher = SlicePublisher(
                manager=manager,
                session=session,
                node=NODE,
                on_left_out=self.node.left_out.append,
                on_name_taken=lambda note: None,
                on_dropped=lambda note: None,
                on_write=lambda verb, seconds, ok: None,
            )
            task = asyncio.create_task(publisher.run())
            await pass_time(0)
            yield manager
            assert not task.done(), task.result()
            task.cancel()
            await asyncio.wait({task})

    def writes(self) -> list[str]:
        """Return the methods of the writes since the last call."""
        methods = [method for _, method, _ in self.link.writes]
        self.link.writes.clear()
        return methods

    def slices(self) -> Mapping[str, Collection[str]]:
        return {
            body["spec"]["pool"]["name"]: [each["name"] for each in body["spec"].get("devices", ())]
            for body in self.server.objects(SLICES)
        }


ALL = {pool(resource): ["dev-0"] for resource in RESOURCES}


async def test_many_pools_that_come_at_once_are_a_slice_each_and_a_second(node: Node):
    cluster = Cluster(node)
    async with cluster.plugin() as manager:
        for resource in RESOURCES:
            manager.replaced(resource, things(resource))
        await pass_time(2)
        assert cluster.slices() == ALL
        assert cluster.writes() == ["POST"] * 50
        nodes = [path for _, path in cluster.link.asked if path.startswith(NODES)]
        assert len(nodes) == 1, "the Node is read once for all of them"
        word = HealthReport(devices={DeviceKey(short(A), "dev-0"): Health.unhealthy("too hot")})
        manager.reported(A, word)
        await pass_time(5)
        assert cluster.writes() == ["PUT"], "a change of one pool is no write of another"


async def test_a_restart_without_a_change_writes_nothing(node: Node):
    cluster = Cluster(node)
    async with cluster.plugin() as manager:
        for resource in RESOURCES:
            manager.replaced(resource, things(resource))
        await pass_time(3)
    cluster.writes()
    async with cluster.plugin() as manager:
        for resource in RESOURCES:
            await pass_time(0.5)
            manager.replaced(resource, things(resource))
        await pass_time(30)
        assert cluster.writes() == []
        assert cluster.slices() == ALL


async def test_a_pool_that_empties_keeps_its_slice_and_one_of_a_lost_endpoint_is_deleted(
    node: Node,
):
    cluster = Cluster(node)
    async with cluster.plugin() as manager:
        for resource in (A, B):
            manager.replaced(resource, things(resource))
        await pass_time(3)
        cluster.writes()
        manager.replaced(A, NOTHING)
        await pass_time(3)
        manager.replaced(A, things(A))
        await pass_time(3)
        manager.replaced(A, NOTHING)
        await pass_time(3)
        assert cluster.writes() == ["PUT"] * 3
        assert cluster.slices() == {pool(A): [], pool(B): ["dev-0"]}
        await pass_time(300)
        manager.stopped(B, "its stream ended")
        await pass_time(290)
        assert cluster.writes() == ["PUT"]
        await pass_time(20)
        assert cluster.writes() == ["DELETE"]
        assert cluster.slices() == {pool(A): []}
        assert node.store.rows.keys() == {A}


async def test_an_expected_driver_without_devices_has_an_empty_pool(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, NOTHING)
        assert shown(manager.publication()) == {NODE: {}}
        manager.stopped(DRIVER, "it ended")
        assert manager.stop_reason == "it ended"


def test_the_graces_of_these_tests():
    grace = (SETTINGS.start_grace_period, SETTINGS.endpoint_stop_grace_period)
    assert grace == (30.0, 300.0)
