"""A driver with policies in the homes of a class in Python: policies, held devices and labels reach
it, and what it made of them comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from drakit.device import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimReference,
    Edits,
    HeldDevice,
    HeldNode,
    Inventory,
    PolicyConflict,
    PolicyOutcome,
)
from drakit.driver import PolicyResource
from drakit_driver.runtime import endpoint as endpoint_module
from drakit_driver.runtime.contract import EndpointContext
from drakit_nodeplugin.endpoints.backend import connection
from drakit_nodeplugin.endpoints.backend.connection import BackendSource
from drakit_nodeplugin.host.policies import PolicyWatch
from tests.fakes.lamps import LAMPS, Lamps
from tests.fakes.node import StaticNode
from tests.unit.driverprocess.conftest import loaded, serving
from tests.unit.endpoints import camera
from tests.unit.endpoints.backend.conftest import ANY, Found, allowed_backends
from tests.unit.endpoints.camera import NODE, running, until
from tests.unit.homes.homes import PLUGIN, PROCESS
from tests.unit.host.test_policy_watch import Api, body

RESOURCE = {"group": "lamps.example.com", "version": "v1", "plural": "lamppolicies"}
CLAIM = ClaimReference(namespace="lab", name="desk", uid="uid-a")
NODES = (
    HeldNode(type="c", major=188, minor=0, identity="usb:a"),
    HeldNode(type="c", major=None, minor=None, identity="usb:b", current=False),
)


class World:
    """A node plugin's view of one driver with policies, and the driver."""

    def __init__(self, kind: str, directory, found: Found, api: Api) -> None:
        self.kind = kind
        self.api = api
        self.found = found
        self.path = found.parent / "lamps" / "driver.sock"
        self.listener = camera.Listener(LAMPS)
        self.made: list[Lamps] = []
        """The driver's objects."""
        self.driver, self.node = loaded(Lamps)
        self.driver = replace(self.driver, make=self._make)
        self.source = self.driver if kind == PLUGIN else BackendSource(LAMPS, found.directory)
        self.feed = endpoint_module.PolicyFeed()
        session = asyncio.get_running_loop().create_future()
        session.set_result(api)
        assert self.source.traits.policies is not None
        self.watch = PolicyWatch(
            LAMPS, self.source.traits.policies, directory=directory, session=session, feed=self.feed
        )
        context = EndpointContext(listener=self.listener, node=NODE, policies=self.feed)
        self.endpoint = self.source.endpoint(context)

    def _make(self) -> Lamps:
        self.made.append(Lamps(None, self.node))
        return self.made[-1]

    @asynccontextmanager
    async def process(self) -> AsyncIterator[None]:
        """Run the process of the driver, if it has one."""
        async with AsyncExitStack() as stack:
            if self.kind == PROCESS:
                await stack.enter_async_context(serving(self.driver, self.node, self.path))
            yield

    @asynccontextmanager
    async def started_again(self) -> AsyncIterator[None]:
        """End the driver, and start it again."""
        before = len(self.listener.inventories)
        self.path.unlink(missing_ok=True)
        await self.endpoint.connection.close()
        async with self.process():
            await until(lambda: len(self.listener.inventories) > before)
            yield

    @property
    def devices(self) -> list[str]:
        """The names in the newest inventory."""
        return (self.listener.inventories or [[]])[-1]

    @property
    def inventory(self) -> Inventory:
        return [each for each in self.listener.told if isinstance(each, Inventory)][-1]


@pytest.fixture(params=[PLUGIN, PROCESS])
async def world(request, sockets, quick, tmp_path, monkeypatch) -> AsyncIterator[World]:
    monkeypatch.setattr(endpoint_module, "POLICIES_PACE_SECONDS", 0.0)
    monkeypatch.setattr(connection, "HELD_PACE_SECONDS", 0.0)
    monkeypatch.setattr(connection, "LABELS_SECONDS", 0.05)
    (sockets.parent / "lamps").mkdir()
    found = Found(
        sockets.parent, allowed_backends(lamps={**ANY, "env": ["LAMP*"], "policies": RESOURCE})
    )
    world = World(request.param, tmp_path, found, Api(body("hall", 2), body("porch", 1)))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(found.watched())
        await stack.enter_async_context(running(world.endpoint))
        task = asyncio.create_task(world.watch.run())
        yield world
        task.cancel()
        await asyncio.wait({task})


@pytest.fixture
async def driver(world):
    """The driver's object."""
    async with world.process():
        await until(lambda: world.devices == ["hall-0", "hall-1", "porch-0"])
        yield world.made[0]


async def test_policies_reach_the_driver_and_its_outcomes_come_back(world, driver):
    world.api.send("MODIFIED", body("hall", 5, generation=2, version="3"))
    await until(lambda: len(world.devices) == 5)
    assert world.inventory.policies == (
        PolicyOutcome(policy="hall", matched=5, published=4),
        PolicyOutcome(policy="porch", matched=1, published=1),
    )
    (rejected,) = world.inventory.rejected
    assert (rejected.device, rejected.reason) == ("/lamps/hall/4", "TooMany")
    assert [each.generation for each in world.watch.states()] == [2, 1]
    for name in ("hall", "porch"):
        world.api.send("DELETED", body(name, 1, version="4"))
    await until(lambda: world.devices == [])


async def test_conflicts_come_back(world, driver):
    for name, version in (("hall", "3"), ("porch", "4")):
        changed = body(name, 1, generation=2, version=version)
        changed["spec"]["room"] = "attic"
        world.api.send("MODIFIED", changed)
    conflict = PolicyConflict(device="attic", policy="hall")
    await until(lambda: world.inventory.policies[-1].conflicts == (conflict,))


async def test_an_invalid_policy_keeps_its_last_applied_version(world, driver):
    world.api.send("MODIFIED", body("hall", -1, generation=2, version="3"))
    world.api.send("MODIFIED", body("porch", 2, generation=2, version="4"))
    await until(lambda: world.devices == ["hall-0", "hall-1", "porch-0", "porch-1"])
    hall, porch = world.watch.states()
    assert (hall.observed_generation, hall.generation, porch.generation) == (2, 1, 2)
    assert hall.problem == (
        "spec.lamps: Input should be greater than or equal to 0 (generation 1 stays in effect)"
    )


async def test_refused_policies_leave_the_previous_ones_after_a_restart_as_well(world, driver):
    changed = body("hall", 3, generation=2, version="3")
    changed["spec"]["room"] = "cellar"
    world.api.send("MODIFIED", changed)
    text = "driver lamps.example.com: spec.room: the cellar has no lamps; choose another room"
    await until(lambda: world.watch.refusal == text)
    assert driver.policies["hall"].spec.lamps == 2
    async with world.started_again():
        assert world.devices == ["hall-0", "hall-1", "porch-0"], "before it refuses the others"
        await until(lambda: world.watch.refusal == text)
        world.api.send("MODIFIED", body("hall", 1, generation=3, version="4"))
        await until(lambda: world.devices == ["hall-0", "porch-0"])
        await until(lambda: world.watch.refusal is None)


async def test_held_devices_reach_the_driver(world, driver):
    held = {"hall-0": HeldDevice(claims=(CLAIM,), nodes=NODES)}
    world.feed.stored({"hall-0": {CLAIM: held["hall-0"]}})
    await until(lambda: driver.held_devices() == held)
    world.feed.stored({})
    await until(lambda: driver.held_devices() == {})


async def test_a_device_counts_as_held_as_soon_as_it_is_prepared(world, driver):
    """Before the checkpoint is read again: another policy could take the device until then."""
    items = [
        AllocatedClaim(
            claim=replace(CLAIM, uid=name),
            devices=(AllocatedDevice(name=name, pool=NODE, request="main"),),
        )
        for name in ("hall-0", "missing-0")
    ]
    answers = await world.endpoint.prepare(items)
    assert [each.edits for each in answers["hall-0"]] == [Edits(env={"LAMP": "hall-0"})]
    assert isinstance(answers["missing-0"], Exception), "and is not held"
    held = {"hall-0": HeldDevice(claims=(items[0].claim,))}
    assert driver.held_devices() == world.feed.held() == held
    world.feed.stored({"hall-0": {items[0].claim: held["hall-0"]}})
    world.feed.stored({})
    assert world.feed.held() == {}


async def test_labels_reach_the_driver_when_they_change(world, driver):
    if world.kind == PLUGIN:
        pytest.skip("a class in the node plugin has the node plugin's own view of the node")
    assert driver.node.labels is None
    labels = {"room": "attic", "empty": ""}
    world.found.directory.node = StaticNode(name=NODE, labels=labels)
    await world.endpoint.connection.close()
    await until(lambda: driver.node.labels == labels)


async def test_a_driver_that_starts_again_gets_policies_and_held_devices(world, driver):
    world.feed.stored({"porch-0": {CLAIM: HeldDevice(claims=(CLAIM,))}})
    async with world.started_again():
        assert world.devices == ["hall-0", "hall-1", "porch-0"]
        assert world.made[-1] is not driver
        assert world.made[-1].held_devices().keys() == {"porch-0"}, "known from the start"


@pytest.mark.parametrize(
    ("policies", "named"),
    [(None, "none"), ({**RESOURCE, "version": "v2"}, "lamppolicies.lamps.example.com/v2")],
    ids=["none", "another"],
)
async def test_an_entry_with_other_policies_is_named_with_the_remedy(
    policies, named, sockets, quick
):
    (sockets.parent / "lamps").mkdir()
    found = Found(sockets.parent, allowed_backends(lamps={**ANY, "policies": policies}))
    async with serving(*loaded(Lamps), sockets.parent / "lamps" / "driver.sock"), found.watched():
        await until(lambda: found.notes)
    assert found.notes[0].endswith(
        "its policies are lamppolicies.lamps.example.com/v1, but those of backends.allowed.lamps "
        f"are {named}; correct the field policies of the entry"
    )


def test_a_resource_of_policies_is_that_of_the_entry(sockets):
    assert Lamps.policy_resource == PolicyResource(**RESOURCE)
