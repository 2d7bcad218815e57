"""
Random sequences of events from drivers, kubelets, admins and clocks for a manager.

A small model, and a publisher that writes at once, follow the events. After each step the slices
must be as the model expects. During a removal, which the model does not decide, nothing is
compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import looptime
from hypothesis import given, settings
from hypothesis import strategies as st

from drakit import Device, Health
from drakit.device import Inventory
from drakit_nodeplugin.config import DeviceHealthSettings, Devices
from drakit_nodeplugin.devices.manager import DeviceManager
from tests.unit.devices.conftest import (
    DRIVER,
    NODE,
    Node,
    pass_time,
    published,
    report,
    taint_words,
)

WORDS = {
    "ok": Health.healthy(),
    "bad": Health.unhealthy("too hot"),
    "broken": Health.unhealthy("off the bus", evict_pods=True),
    "unknown": Health.unknown(),
}

SETTINGS = Devices(
    endpoint_stop_grace_period=20.0,
    start_grace_period=6.0,
    gone_eviction_delay=5.0,
    health=DeviceHealthSettings(recovery_period=5.0, eviction_delay=2.0, timeout=30.0),
)

START_GRACE = SETTINGS.start_grace_period
STOP_GRACE = SETTINGS.endpoint_stop_grace_period
RECOVERY = SETTINGS.health.recovery_period
EVICTION = SETTINGS.health.eviction_delay
GONE_EVICTION = SETTINGS.gone_eviction_delay
SILENCE = 60.0

names = st.sampled_from("ab")
sleep = st.tuples(st.just("sleep"), st.sampled_from([1, 2, 3, 4, 5, 6, 14, 20, 23, 59]))
listing = st.tuples(st.just("list"), st.sets(names, min_size=1).map(sorted))
withdrawing = st.tuples(st.just("withdraw"), st.sets(names, min_size=1).map(sorted))
listing_all = st.tuples(st.just("list"), st.just(["a", "b"]))
stop = st.tuples(st.just("stop"), st.none())
reporting = st.tuples(st.just("report"), st.tuples(names, st.sampled_from(sorted(WORDS))))
report_more = st.tuples(st.just("report"), st.tuples(names, st.sampled_from(["ok", "broken"])))
hold = st.tuples(st.just("hold"), names)
restart = st.tuples(st.just("restart"), st.sampled_from([0, 10, 50]))
ready = st.tuples(st.just("ready"), st.booleans())
wipe = st.tuples(st.just("wipe"), st.none())

lives = st.lists(st.one_of(sleep, sleep, listing_all, stop, restart, ready, wipe), min_size=10)
healths = st.lists(
    st.one_of(
        sleep,
        sleep,
        listing,
        withdrawing,
        listing_all,
        stop,
        reporting,
        report_more,
        reporting,
        report_more,
        hold,
        restart,
    ),
    min_size=10,
)


@dataclass
class Sick:
    """An unhealthy device in the model."""

    evicting: bool = False
    well: float = 0.0
    well_since: float | None = None
    broken_since: float | None = None
    said: bool = True
    silent_since: float | None = None


@dataclass
class Model:
    """The expected state."""

    started: float = 0.0
    listed: bool = False
    away_since: float | None = None
    ready_since: float | None = 0.0
    stop_stored: bool = False
    devices: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    asking: set[str] = field(default_factory=set)
    """Devices whose pods are evicted when they are gone; of all devices, "b" asks for that."""
    evict_at: dict[str, float] = field(default_factory=dict)
    evicted: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    sick: dict[str, Sick] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)

    @property
    def present(self) -> bool:
        return self.listed and self.away_since is None

    def pass_time(self, now: float) -> None:
        self.evicted |= {name for name, at in self.evict_at.items() if now >= at}
        for name, sick in list(self.sick.items()):
            if sick.well_since is not None and sick.well + now - sick.well_since >= RECOVERY:
                del self.sick[name]
            if sick.silent_since is not None and now - sick.silent_since >= SILENCE:
                del self.sick[name]
            if sick.broken_since is not None and now - sick.broken_since >= EVICTION:
                sick.evicting = True

    def report(self, name: str, word: str, now: float) -> None:
        if word in ("bad", "broken"):
            sick = self.sick.setdefault(name, Sick())
            sick.well, sick.well_since = 0.0, None
            sick.said, sick.silent_since = True, None
            if word == "bad":
                sick.broken_since = None
            elif sick.broken_since is None:
                sick.broken_since = now
        elif (sick := self.sick.get(name)) is not None:
            sick.broken_since = None
            sick.said, sick.silent_since = True, None
            if word == "ok" and sick.well_since is None:
                sick.well_since = now
            if word == "unknown" and sick.well_since is not None:
                sick.well, sick.well_since = sick.well + now - sick.well_since, None

    def taints(self, name: str) -> list[str]:
        found = ["stopped"] if self.away_since is not None else []
        if (sick := self.sick.get(name)) is not None:
            found += ["unhealthy"] + ["unhealthy:NoExecute"] * sick.evicting
        gone = "gone:NoExecute" if name in self.evicted else "gone"
        return found + [gone] * (name in self.gone)

    def plan_evictions(self, listed: set[str], now: float, *, withdrawn: bool) -> None:
        self.asking = (listed & {"b"}) | (self.asking & self.gone)
        due = set() if withdrawn else self.gone & self.asking
        self.evicted &= due
        at = now + GONE_EVICTION
        self.evict_at = {name: self.evict_at.get(name, at) for name in due - self.evicted}

    def mark_unavailable(self, name: str, now: float) -> None:
        said = self.sick[name].said
        self.report(name, "unknown", now)
        self.sick[name].said = said


class World:
    """A node, the plugin on it, and the slices."""

    def __init__(self) -> None:
        self.node = Node()
        self.model = Model()
        self.slices: dict[str, dict[str, list[str]]] = {}
        self.manager: DeviceManager | None = None
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.manager = self.node.manager(settings=SETTINGS)
        await self.manager.restore()
        self.manager.adopt(
            {
                (pool, name): published(*taints)
                for pool, devices in self.slices.items()
                for name, taints in devices.items()
                if taints
            }
        )
        self.task = asyncio.create_task(self.manager.run())

    async def end(self) -> None:
        assert self.task is not None
        assert not self.task.done()
        self.task.cancel()
        await asyncio.wait({self.task})

    def publish(self) -> None:
        assert self.manager is not None
        publication = self.manager.publication()
        if publication.complete:
            named = publication.pools.keys() | publication.held
            self.slices = {name: pool for name, pool in self.slices.items() if name in named}
        for name, pool in publication.pools.items():
            self.slices[name] = {each.name: taint_words(each.taints) for each in pool.devices}
        self.manager.observe_published(self.slices.keys())

    async def do(self, what: str, how: Any) -> None:
        assert self.manager is not None
        model, now = self.model, asyncio.get_running_loop().time()
        model.pass_time(now)
        match what:
            case "sleep":
                await pass_time(how)
            case "list" | "withdraw":
                devices = [Device(name=name, evict_if_gone=name == "b") for name in how]
                withdrawn = {"a", "b"} - {*how} if what == "withdraw" else ()
                self.manager.replaced(DRIVER, Inventory(devices=devices, withdrawn=withdrawn))
                await pass_time(0)
                returned = not model.present
                model.listed, model.away_since, model.stop_stored = True, None, False
                back = model.gone & set(how)
                vanished = (model.devices - set(how)) & model.held - model.gone
                for name in vanished & model.sick.keys():
                    model.mark_unavailable(name, now)
                model.gone = (model.devices - set(how)) & model.held
                model.plan_evictions(set(how), now, withdrawn=what == "withdraw")
                model.devices = set(how) | model.gone
                model.sick = {n: sick for n, sick in model.sick.items() if n in model.devices}
                for name, sick in model.sick.items():
                    if name in how and (returned or name in back) and not sick.said:
                        sick.silent_since = now
            case "hold":
                model.held.add(how)
                self.node.store.used = {NODE: model.held}
            case "stop":
                self.manager.stopped(DRIVER, "it ended")
                if model.present:
                    model.away_since, model.stop_stored = now, True
                    model.evict_at.clear()
                    for name in model.sick:
                        model.mark_unavailable(name, now)
            case "report":
                name, word = how
                self.manager.reported(DRIVER, report(**{name: WORDS[word]}))
                if model.present and name in model.devices - model.gone:
                    model.report(name, word, now)
            case "restart":
                await pass_time(2)  # until the store has got what there was
                self.publish()
                await self.end()
                await asyncio.sleep(how)
                model.pass_time(now + 2)
                model.stop_stored |= not model.listed and now + 2 >= model.started + START_GRACE
                now = model.started = asyncio.get_running_loop().time()
                model.listed = False
                if not model.stop_stored:
                    model.away_since = now
                published = self.slices.get(NODE, {})
                model.evict_at.clear()
                model.evicted = {n for n, taints in published.items() if "gone:NoExecute" in taints}
                model.sick = {
                    name: Sick(evicting="unhealthy:NoExecute" in taints, said=False)
                    for name, taints in published.items()
                    if "unhealthy" in taints
                }
                model.ready_since = model.ready_since if self.node.ready else None
                await self.start()
            case "ready":
                self.node.ready = how  # those that were ready stay ready until the restart
                if how:
                    self.manager.set_sources_ready()
                    model.ready_since = now if model.ready_since is None else model.ready_since
            case "wipe":
                self.slices.clear()
            case _:
                raise AssertionError(what)

    def check(self) -> None:
        model, now = self.model, asyncio.get_running_loop().time()
        assert self.manager is not None
        model.pass_time(now)
        before = {name: dict(devices) for name, devices in self.slices.items()}
        self.publish()
        capacity = self.manager.capacity()
        if not capacity.pools and not capacity.inactive:
            model.devices, model.sick, model.gone = set(), {}, set()
        expected = {NODE: {name: model.taints(name) for name in model.devices}}
        grace_over = now >= model.started + START_GRACE
        if model.present:
            assert self.slices == expected
        elif not model.devices or model.away_since is None:
            assert self.slices.keys() <= {NODE}
        elif now < model.away_since + STOP_GRACE:
            if grace_over or model.listed:
                assert self.slices == expected
            else:
                assert self.slices == before
        elif not grace_over and not model.listed:
            assert self.slices == before
        elif (
            model.ready_since is not None
            and now
            >= max(model.away_since + STOP_GRACE, model.started + START_GRACE, model.ready_since)
            + 3
        ):
            assert self.slices == {}
            assert self.manager.publication().pools == {}


async def walk(path: Sequence[tuple[str, Any]]) -> None:
    world = World()
    await world.start()
    try:
        for what, how in path:
            await world.do(what, how)
            world.check()
    finally:
        await world.end()


@settings(deadline=None, max_examples=200, derandomize=True)
@given(path=st.one_of(lives, healths))
def test_slices_are_what_the_model_predicts(path: list[tuple[str, Any]]):
    loop = looptime.new_event_loop(start=0)
    try:
        loop.run_until_complete(walk(path))
    finally:
        loop.close()
