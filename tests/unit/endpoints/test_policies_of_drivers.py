"""Delivery of policies to a driver, and refused policies."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from drakit import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimReference,
    DeviceNode,
    DriverError,
    Edits,
    HeldDevice,
    HeldNode,
    Policy,
)
from drakit_driver.runtime import calls, thread
from drakit_driver.runtime import endpoint as endpoint_module
from drakit_driver.runtime.contract import traits_of
from drakit_driver.runtime.policies import STORED_SECONDS, PolicyFeed
from drakit_driver.runtime.thread import PythonConnector
from tests.fakes.lamps import LampPolicy, Lamps
from tests.fakes.node import StaticNode
from tests.unit.endpoints.camera import until

CREATED = datetime(2026, 1, 1, tzinfo=UTC)


def policy(name: str, lamps: int = 1, room: str = "") -> dict[str, Policy[LampPolicy]]:
    spec = LampPolicy(lamps=lamps, room=room)
    return {name: Policy(name=name, created=CREATED, generation=1, spec=spec)}


def ref(name: str) -> ClaimReference:
    return ClaimReference(namespace="default", name=name, uid=f"uid-{name}")


def claim(name: str) -> AllocatedClaim:
    device = AllocatedDevice(name=name, pool="", request="main")
    return AllocatedClaim(claim=ref(name), devices=(device,))


def held(minor: int) -> HeldNode:
    return HeldNode(type="c", major=188, minor=minor, identity="usb:a")


class Rig:
    def __init__(self) -> None:
        self.feed = PolicyFeed()
        self.kind = Lamps
        self.connector = PythonConnector(
            Lamps.name, self.make, traits_of(Lamps), policies=self.feed
        )
        self.connections: list = []

    def make(self):
        return self.kind(None, StaticNode(name="node-1"))

    async def connect(self):
        connection = await self.connector.connect()
        self.connections.append(connection)
        return connection, connection.inventories()


@pytest.fixture
async def rig(monkeypatch):
    monkeypatch.setattr(endpoint_module, "POLICIES_PACE_SECONDS", 0.0)
    rig = Rig()
    yield rig
    for connection in rig.connections:
        await connection.close()


async def names(updates) -> list[str]:
    async with asyncio.timeout(20):
        return [device.name for device in (await anext(updates)).devices]


async def test_a_driver_lists_its_devices_only_once_its_policies_are_known(rig):
    connection, updates = await rig.connect()
    waiting = asyncio.ensure_future(anext(updates))
    await asyncio.wait({waiting}, timeout=0.2)
    assert not waiting.done()
    assert connection.unavailable.startswith("its policies are unknown: the API server has not")

    rig.feed.offer(policy("hall", 2))
    inventory = await waiting
    assert [device.name for device in inventory.devices] == ["hall-0", "hall-1"]
    assert connection.unavailable is None
    assert rig.feed.in_force.keys() == {"hall"}


async def test_the_numbers_that_a_call_returns_are_held_at_once(rig):
    class Serial(Lamps):
        async def prepare(self, claim, device) -> Edits:
            tty = DeviceNode(path="/dev/tty", type="c", major=188, minor=0, identity="usb:a")
            return Edits(device_nodes=(tty, DeviceNode(path="/dev/null")))

    rig.kind = Serial
    rig.feed.offer(policy("hall", 2))
    connection, updates = await rig.connect()
    await names(updates)
    admin = replace(claim("hall-1").devices[0], admin_access=True)
    await connection.prepare([claim("hall-0")])
    await connection.prepare([replace(claim("hall-1"), devices=(admin,))])
    assert rig.feed.held() == {
        "hall-0": HeldDevice(claims=(ref("hall-0"),), nodes=(held(0),)),
        "hall-1": HeldDevice(claims=(ref("hall-1"),)),
    }


def of(claim: str, *nodes: HeldNode) -> HeldDevice:
    """A device that a claim holds."""
    return HeldDevice(claims=(ref(claim),), nodes=nodes)


async def test_a_claim_that_is_prepared_again_holds_its_new_and_its_old_numbers():
    feed = PolicyFeed()
    feed.stored({"tty": {ref("a"): of("a", held(0))}})
    feed.prepared(ref("a"), "tty", of("a", held(1)))
    old = replace(held(0), current=False)
    expected = {"tty": HeldDevice(claims=(ref("a"),), nodes=(held(1), old))}
    assert feed.held() == expected
    feed.stored({"tty": {ref("a"): of("a", held(0))}})  # read before the new row was written
    assert feed.held() == expected
    feed.stored({"tty": {ref("a"): of("a", held(1), old)}})
    assert feed.held() == expected
    feed.stored({"tty": {ref("b"): of("b", held(0))}})
    assert feed.held() == {"tty": HeldDevice(claims=(ref("b"),), nodes=(held(0),))}


async def test_a_number_that_is_current_for_one_of_several_claims_is_current():
    feed = PolicyFeed()
    old = replace(held(0), current=False)
    feed.stored({"tty": {ref("a"): of("a", held(1), old), ref("b"): of("b", held(0))}})
    assert feed.held() == {"tty": HeldDevice(claims=(ref("a"), ref("b")), nodes=(held(1), held(0)))}


@pytest.mark.looptime
async def test_a_prepared_device_whose_claim_is_never_stored_is_released():
    feed = PolicyFeed()
    feed.prepared(ref("a"), "hall-0", of("a"))
    await asyncio.sleep(STORED_SECONDS - 1)
    assert feed.held().keys() == {"hall-0"}
    await asyncio.sleep(2)
    assert feed.held() == {}


async def test_a_device_stays_held_while_it_passes_from_one_claim_to_the_next():
    feed = PolicyFeed()
    feed.stored({"hall-0": {ref("a"): of("a")}})
    feed.prepared(ref("b"), "hall-0", of("b"))
    feed.stored({})  # read after the first claim was released, before the second one was stored
    assert feed.held() == {"hall-0": HeldDevice(claims=(ref("b"),))}


async def test_the_driver_gets_the_last_of_many_changes(rig, monkeypatch):
    monkeypatch.setattr(endpoint_module, "POLICIES_PACE_SECONDS", 0.2)
    applied = []
    rig.feed.on_applied = lambda: applied.append(len(rig.feed.in_force))
    rig.feed.offer({})
    await rig.connect()
    for count in range(1, 1001):
        rig.feed.offer(policy("hall") | {f"p{n}": policy("x")["x"] for n in range(count % 7)})
        if count % 100 == 0:
            await asyncio.sleep(0)
    last = rig.feed._offered
    await until(lambda: rig.feed.in_force is last)
    assert len(applied) <= 3


async def test_a_driver_that_fails_or_hangs_keeps_its_previous_policies(rig, monkeypatch):
    monkeypatch.setattr(calls, "POLICIES_SECONDS", 0.1)

    class Bad(Lamps):
        policy_resource = Lamps.policy_resource

        async def apply_policies(self, policies):
            if "hangs" in policies:
                await asyncio.Event().wait()
            if "fails" in policies:
                raise KeyError("lamps")
            super().apply_policies(policies)

    rig.kind = Bad
    rig.feed.offer(policy("hall"))
    _, updates = await rig.connect()
    assert await names(updates) == ["hall-0"]
    rig.feed.offer(policy("hangs"))
    await until(lambda: rig.feed.refusal)
    assert rig.feed.refusal == "driver lamps.example.com did not apply its policies in 0 s"
    rig.feed.offer(policy("fails"))
    await until(lambda: "failed in apply_policies: KeyError" in rig.feed.refusal)
    assert rig.feed.in_force.keys() == {"hall"}


async def test_a_driver_that_refuses_its_first_policies_lists_nothing_and_is_asked_again(
    rig, monkeypatch
):
    monkeypatch.setattr(endpoint_module, "POLICIES_RETRY_SECONDS", 0.05)
    asked = []

    class Slow(Lamps):
        def apply_policies(self, policies):
            asked.append(policies)
            if len(asked) < 3:
                raise DriverError("the bus is not ready")
            super().apply_policies(policies)

    rig.kind = Slow
    monkeypatch.setattr(thread, "LIST_SECONDS", 0.0)
    rig.feed.offer(policy("hall"))
    connection, updates = await rig.connect()
    await until(lambda: rig.feed.refusal)
    assert connection.unavailable == (
        "it refuses its policies: driver lamps.example.com: the bus is not ready"
    )
    assert await names(updates) == ["hall-0"]
    assert (len(asked), rig.feed.refusal) == (3, None)
