"""Shared helpers of the slice tests: short forms of desired pools, and a pool at an API server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from drakit.device import CounterSet, Device
from drakit_formats.resource.objects import Object
from drakit_nodeplugin.changes import Revision
from drakit_nodeplugin.devices.model import (
    DesiredDevice,
    DesiredPool,
    Publication,
    PublishedTaints,
    StampedTaint,
)
from drakit_nodeplugin.slices.contents import StoredSlice
from drakit_nodeplugin.slices.packing import PackingLimits
from drakit_nodeplugin.slices.plan import Plan, PoolIdentity, planning

DRIVER, NODE = "camera.example.com", "node-1"
SMALL = PackingLimits(max_devices=4, fill_devices=3, max_counter_sets=2)
POOL = PoolIdentity(driver=DRIVER, node=NODE, node_uid="node-uid", pool=NODE)


def taint(key: str = "drakit.dev/unhealthy", *, at: int = 1_700_000_000) -> StampedTaint:
    return StampedTaint(key=key, value="", effect="NoSchedule", added_at=at)


def device(name: str, *taints: StampedTaint, **fields: Any) -> DesiredDevice:
    values = {"attributes": {"model": "x"}, "capacity": {"size": "1024Mi"}} | fields
    return DesiredDevice(name=name, device=Device(name=name, **values), taints=taints)


def named(name: str, *taints: StampedTaint) -> DesiredDevice:
    """Return a device of which only the name is known."""
    return DesiredDevice(name=name, device=None, taints=taints)


def pool(*devices: DesiredDevice | str, **fields: Any) -> DesiredPool:
    full = (device(each) if isinstance(each, str) else each for each in devices)
    return DesiredPool(devices=tuple(full), **fields)


def many(count: int, *taints: StampedTaint, start: int = 0) -> tuple[DesiredDevice, ...]:
    return tuple(device(f"dev-{i}", *taints) for i in range(start, start + count))


def counter_set(name: str, amount: str = "8") -> CounterSet:
    return CounterSet(name=name, counters={"memory": amount})


class Interrupted(Exception):
    """Raised before the last write of a plan."""


class PoolServer:
    """
    A pool at an API server after the writes of plans, and their number.

    After each write, it checks the pool like the scheduler: a complete pool must be consistent.
    """

    def __init__(self, identity: PoolIdentity = POOL, limits: PackingLimits | None = None) -> None:
        self.identity = identity
        self.limits = limits
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 0

    def stored(self) -> list[StoredSlice]:
        return [StoredSlice.of(body) for body in self.slices.values()]

    def plan(self, wanted: DesiredPool, **options: Any) -> Plan:
        steps = planning(
            wanted, identity=self.identity, stored=self.stored(), limits=self.limits, **options
        )
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    def publish(
        self, wanted: DesiredPool, *, writes: int | None = None, **options: Any
    ) -> tuple[int, int, int]:
        """Make the writes, or the first few of them: creates, updates, deletes."""
        todo = self.plan(wanted, **options)
        left = writes if writes is not None else 10**6
        for each in todo.delete[:left]:
            del self.slices[each.name]
            self.look()
        left = max(0, left - len(todo.delete))
        for write in [*todo.replace, *todo.create][:left]:
            body = write.body()
            old = self.slices.get(write.name)
            assert (write.stored is None) == (old is None), "a create is for what is not there"
            if old is not None:
                assert body["metadata"]["resourceVersion"] == old["metadata"]["resourceVersion"]
            self.store(body)
            self.look()
        return len(todo.create), len(todo.replace), len(todo.delete)

    def store(self, body: dict[str, Any]) -> None:
        self.version += 1
        name = body["metadata"]["name"]
        metadata = body["metadata"] | {"resourceVersion": str(self.version), "uid": f"uid-{name}"}
        spec = dict(body["spec"])
        assert not {"devices", "sharedCounters"} <= spec.keys(), "the API server takes one alone"
        spec["devices"] = [_normal(each) for each in spec.get("devices", ())]
        self.slices[name] = body | {"metadata": metadata, "spec": spec}

    def current(self) -> list[dict[str, Any]]:
        """The slices that count, in the order of their names."""
        top = max((body["spec"]["pool"]["generation"] for body in self.slices.values()), default=0)
        bodies = [b for b in self.slices.values() if b["spec"]["pool"]["generation"] == top]
        return sorted(bodies, key=lambda body: body["metadata"]["name"])

    def look(self) -> None:
        """Check what the API server and the scheduler would find."""
        limits = self.limits or PackingLimits()
        for body in self.slices.values():
            devices, sets = body["spec"]["devices"], body["spec"].get("sharedCounters", [])
            assert len(devices) <= limits.max_devices
            assert len(sets) <= limits.max_counter_sets
            assert not (devices and sets), "devices and counter sets never share a slice"
        current = self.current()
        counts = {body["spec"]["pool"]["resourceSliceCount"] for body in current}
        if counts == {len(current)}:
            names = [each["name"] for body in current for each in body["spec"]["devices"]]
            assert len(names) == len(set(names)), "a pool that is whole has each device once"

    def published(self) -> dict[str, str]:
        """Return the slice of each device, as the scheduler sees a complete pool."""
        current = self.current()
        assert len(current) == len(self.slices)
        assert {b["spec"]["pool"]["resourceSliceCount"] for b in current} == {len(current)}
        return {
            each["name"]: body["metadata"]["name"]
            for body in current
            for each in body["spec"]["devices"]
        }

    def bodies(self) -> dict[str, Object]:
        return {each["name"]: each for body in self.current() for each in body["spec"]["devices"]}

    def sets(self) -> dict[str, str]:
        return {
            each["name"]: body["metadata"]["name"]
            for body in self.current()
            for each in body["spec"].get("sharedCounters", ())
        }

    @property
    def generation(self) -> int:
        return self.current()[0]["spec"]["pool"]["generation"]


def _normal(body: Mapping[str, Any]) -> dict[str, Any]:
    """Write quantities as an API server does."""
    new = dict(body)
    if new.get("capacity", {}).get("size") == {"value": "1024Mi"}:
        new["capacity"] = new["capacity"] | {"size": {"value": "1Gi"}}
    return new


class LateRevision(Revision):
    """A revision whose readers may wake late, because their order is undefined."""

    late_seconds = 0.0

    async def after(self, seen: int) -> int:
        number = await super().after(seen)
        if self.late_seconds:
            await asyncio.sleep(self.late_seconds)
        return number


class FakeSource:
    """A device manager with the publication that a test sets."""

    def __init__(self, driver: str = DRIVER) -> None:
        self.driver = driver
        self.revision = LateRevision()
        self._publication = Publication(pools={})
        self.adopted: list[Mapping[tuple[str, str], PublishedTaints]] = []
        """The taints that were published, at each start."""
        self.pools: list[set[str]] = []
        """The pools of the API server, as reported."""

    def adopt(self, published: Mapping[tuple[str, str], PublishedTaints]) -> None:
        self.adopted.append(published)

    def observe_published(self, pools: Iterable[str]) -> None:
        self.pools.append(set(pools))

    def publication(self) -> Publication:
        return self._publication

    def publish(
        self,
        pools: Mapping[str, DesiredPool] | DesiredPool,
        *,
        held: Iterable[str] = (),
        complete: bool = True,
    ) -> None:
        pools = {NODE: pools} if isinstance(pools, DesiredPool) else pools
        self._publication = Publication(pools=pools, held=frozenset(held), complete=complete)
        self.revision.advance()
