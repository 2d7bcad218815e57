"""
Random histories of a node: inventories with fallbacks in several pools, rejected devices, claims,
stops, restarts, reboots and upgrades of the API server.

After each step, all slices are as the inventory and the claims say: a held device stays published
as it was listed or published last, tainted if the published inventory lacks it, and the other pools
do not change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import Any

import pytest

from drakit import Capacity, Device
from drakit.device import CounterSet, Inventory, Taint
from drakit_driver.runtime.contract import DeviceKey
from drakit_formats.resource.device import Feature, device_body, without
from drakit_formats.resource.nodes import pool_name
from drakit_nodeplugin.config import DeviceHealthSettings
from drakit_nodeplugin.devices.endpoint_state import EndpointState, GracePeriods, Phase
from drakit_nodeplugin.devices.pool_state import DriverState
from drakit_nodeplugin.devices.taints import GONE
from drakit_nodeplugin.slices.contents import choose
from drakit_nodeplugin.state.records import checksum, dump, load_endpoint
from tests.unit.devices.conftest import DRIVER, NODE

HISTORIES, STEPS = 2000, 14
POOLS = ("", "usb")
NAMES = "abst"
BAD = "no name"
START, STOP = 30.0, 300.0
Body = dict[str, Any]


@dataclass
class Host:
    """A node: its driver, its API server and its claims."""

    random: Random
    now: float = 0.0
    drops: frozenset[Feature] = frozenset()
    devices: dict[str, dict[str, tuple[str, int]]] = field(
        default_factory=lambda: {pool: {} for pool in POOLS}
    )
    """Kind and version of each device."""
    has_fallback: bool = False
    held: set[DeviceKey] = field(default_factory=set)
    slices: dict[str, dict[str, Body]] = field(default_factory=dict)
    forms: dict[DeviceKey, list[Body]] = field(default_factory=dict)
    """The last forms of each device, in the inventory and in its fallback."""
    published: dict[DeviceKey, Body] = field(default_factory=dict)
    """The held devices as they were published last."""

    def __post_init__(self) -> None:
        if self.random.random() < 0.5:
            self.drops = frozenset({Feature.MULTIPLE_ALLOCATIONS})
        self.has_fallback = self.random.random() < 0.8
        self.start()

    def start(self) -> None:
        self.driver = DriverState(
            node=NODE,
            open_ended=False,
            timing=DeviceHealthSettings(),
            gone_eviction_seconds=10.0,
            now=lambda: self.now,
            wall_clock=lambda: 1.7e9 + self.now,
        )
        grace = GracePeriods(stop_seconds=STOP)
        grace.begin(self.now, start_seconds=START, known=True)
        self.endpoint = EndpointState(DRIVER, self.driver, grace)

    # ------------------------------------------------------------ steps

    def list_devices(self) -> None:
        """
        Change the inventory in one pool, and list it.

        As that of hostdev, it has a fallback while it shares a device.
        """
        before, was_present = self.slices, self.endpoint.phase is Phase.PRESENT
        changed, random = self.random.choice(POOLS), self.random
        for name in random.sample(NAMES, random.randint(1, 3)):
            self.devices[changed][name] = random.choice(KINDS[name]), random.randint(0, 2)
        listed = [
            made(name, pool, *kind)
            for pool, devices in self.devices.items()
            for name, kind in devices.items()
        ]
        is_shared = any(each.capacity for devices, _ in listed for each in devices)
        forms: dict[DeviceKey, list[Body]] = {}
        for each in chain.from_iterable(chain.from_iterable(listed)):
            if BAD in each.attributes:
                continue
            key = DeviceKey(pool_name(NODE, each.pool), each.name)
            kept = [body for body in (each, without(each, self.drops)) if body is not None]
            forms.setdefault(key, []).extend(map(device_body, kept))
        self.forms |= forms
        self.endpoint.replace(
            Inventory(
                devices=[each for devices, _ in listed for each in devices],
                counter_sets=[
                    CounterSet(name="card", pool=pool, counters={"slots": "9"}) for pool in POOLS
                ],
                fallback=[each for _, copies in listed for each in copies]
                if self.has_fallback and is_shared
                else None,
            ),
            taken=(),
        )
        self.publish()
        if was_present:
            (other,) = {pool_name(NODE, pool) for pool in POOLS} - {pool_name(NODE, changed)}
            assert self.slices[other] == before[other]

    def hold(self) -> None:
        """Prepare a claim for a published device, if one is free."""
        if self.endpoint.phase is not Phase.PRESENT:
            return
        gone = {*self.endpoint.gone()}
        every = [DeviceKey(pool, name) for pool, each in self.slices.items() for name in each]
        if free := [each for each in every if each not in gone]:
            key = self.random.choice(free)
            self.held.add(key)
            self.follow_claims()

    def release(self) -> None:
        if self.held:
            self.held.remove(self.random.choice(sorted(self.held)))
            self.follow_claims()

    def stop(self) -> None:
        self.endpoint.stop("it ended")

    def pass_time(self) -> None:
        self.now += self.random.choice([1, 12, 31])
        self.endpoint.age()

    def restart(self) -> None:
        row = self.endpoint.row()
        self.now += 2
        self.start()
        if row is not None:
            body = dump(row)
            self.endpoint.restore(load_endpoint(DRIVER, body, expected=checksum(body)))
        self.follow_claims()

    def reboot(self) -> None:
        """Restart, perhaps on other hardware; the kubelet has deleted the slices."""
        self.restart()
        self.slices = {}

    def upgrade(self) -> None:
        """Let the API server have all features: it gets the inventory, no longer the fallback."""
        self.drops = frozenset()

    # ------------------------------------------------------------ what follows from each

    def follow_claims(self) -> None:
        used: dict[str, set[str]] = {}
        for key in self.held:
            used.setdefault(key.pool, set()).add(key.name)
        self.driver.in_use = used
        self.endpoint.follow_claims()

    def publish(self) -> None:
        """Write the slices that the publisher would write."""
        endpoint = self.endpoint
        endpoint.let_go([key for key in endpoint.gone() if key not in self.held])
        if endpoint.phase is Phase.AWAITED:
            return
        before, self.slices = self.slices, {}
        for name, state in endpoint.pools.items():
            desired = endpoint.desired(state)
            assert desired is not None
            chosen = choose(desired, self.drops)
            if endpoint.phase is Phase.PRESENT:
                has_shared = any(d.device and d.device.capacity for d in desired.devices)
                is_replaced = self.drops and has_shared and desired.fallback is not None
                listed = state.content.fallback if is_replaced else state.content.devices
                tainted = {
                    each.name
                    for each in chosen.devices.values()
                    if any(taint.key == GONE for taint in each.taints)
                }
                assert tainted == chosen.devices.keys() - listed.keys()
            known = before.get(name, {})
            self.slices[name] = {
                each.name: known[each.name] if each.device is None else device_body(each.device)
                for each in chosen.devices.values()
                if each.device is not None or each.name in known
            }
            consumed = {
                consumption["counterSet"]
                for body in self.slices[name].values()
                for consumption in body.get("consumesCounters", ())
            }
            assert consumed <= chosen.counter_sets.keys() or chosen.keeps_counter_sets

    def check(self) -> None:
        assert self.endpoint.failed == {}
        if self.endpoint.phase is Phase.AWAITED:
            return
        bodies = {key: self.slices[key.pool][key.name] for key in self.held}
        for key, body in bodies.items():
            assert body in self.forms[key] or body == self.published[key], key
        self.published = bodies


WHOLE, SHARED = (
    ("whole", "partition", "rejected", "none", "none"),
    ("shared", "shared", "whole", "none"),
)
KINDS = {"a": WHOLE, "b": WHOLE, "s": SHARED, "t": SHARED}
"""A name means the same hardware in the inventory and in its fallback, or is in one of them."""


def made(name: str, pool: str, kind: str, version: int) -> tuple[list[Device], list[Device]]:
    """Return a device of a kind, and what a fallback has in place of it."""
    facts: dict[str, Any] = {"name": name, "pool": pool, "attributes": {"model": f"v{version}"}}
    match kind:
        case "whole":
            lens = Taint(key="x.example/lens", effect="NoSchedule")
            whole = Device(**facts, taints=(lens,) * (version > 0))
            return [whole], [whole]
        case "shared":
            users = {"users": Capacity(value=str(version + 1), default="1")}
            shared = Device(**facts, capacity=users, allow_multiple_allocations=True)
            names = [f"{name}-{user}" for user in range(version + 1)]
            return [shared], [Device(**facts | {"name": copy}) for copy in names]
        case "partition":
            part = Device(**facts, consumes={"card": {"slots": "1"}})
            return [part], [Device(**facts | {"attributes": {"model": "whole"}})]
        case "rejected":
            return [Device(name=name, pool=pool, attributes={BAD: 1})], []
        case _:
            return [], []


STEPS_AND_WEIGHTS = {
    Host.list_devices: 6,
    Host.hold: 4,
    Host.release: 1,
    Host.stop: 1,
    Host.pass_time: 2,
    Host.restart: 1,
    Host.reboot: 1,
    Host.upgrade: 1,
}


@pytest.mark.parametrize("part", range(4))
def test_held_devices_stay_as_they_were_and_other_pools_do_not_change(part: int):
    for number in range(part, HISTORIES, 4):
        random = Random(number)
        host = Host(random)
        steps = random.choices([*STEPS_AND_WEIGHTS], [*STEPS_AND_WEIGHTS.values()], k=STEPS)
        host.list_devices()
        for done, step in enumerate(steps):
            try:
                step(host)
                host.publish()
                host.check()
            except Exception as error:
                names = [each.__name__ for each in steps[: done + 1]]
                raise AssertionError(f"history {number}: {names}") from error
