"""Devices by state, of drivers and classes; the operator and `kubectl drakit devices` agree."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from drakit_cli.kubectl.devices import pool_rows
from drakit_cli.kubectl.gather import Gathered
from drakit_explain.cel.library import Library
from drakit_explain.counts import STATES, Numbers, count
from drakit_explain.devices import TaintFacts
from drakit_explain.model import ClassFacts, DeviceID, Share, TaintRuleFacts
from drakit_explain.selectors import bring_up_to_date
from tests.fakes.world import device, holding, node, slice_on, world_of

KEYS = ("drakit.dev/gone", "drakit.dev/unhealthy", "drakit.dev/stopped", "example.com/hot")


def tainted(key):
    return (TaintFacts(key=key, effect="NoSchedule"),)


def numbers_of(world):
    numbers = Numbers()
    for _ in count(world, numbers):
        pass
    return numbers


def test_the_states_of_each_driver_and_class():
    fast = {"model": "fast"}
    devices = [device("free", attributes=fast), device("held"), device("shared", shareable=True)]
    devices += [device(key, taints=tainted(key)) for key in KEYS]
    world = world_of(
        *(node("n1"), node("n2")),
        slice_on("n1", *devices, device("ruled", attributes=fast)),
        replace(slice_on("n2", device("a")), driver="other", pool_slices=2),
        holding("mine", "held", KEYS[1], "lost"),
        replace(
            holding("part"), shares=(Share(device=DeviceID("d", "n1", "shared")),), allocated=True
        ),
        TaintRuleFacts(name="r", uid="r", taint=tainted("example.com/x")[0], device="ruled"),
        ClassFacts(name="all", uid="1"),
        ClassFacts(name="fast", uid="2", selectors=('device.attributes["d"].?model == "fast"',)),
    )
    assert "fast" not in numbers_of(world).classes  # its selector is not evaluated yet
    selector = 'device.driver == "d" && device.attributes["d"].model == "fast"'
    world.apply(ClassFacts(name="fast", uid="2", selectors=(selector,)))
    slices = [each.slice for each in world.reachable()]
    bring_up_to_date(world.selectors, Library(), [selector], [*slices, *world.slices()])
    found = numbers_of(world)
    assert found.drivers == {
        "d": {"free": 1, "allocated": 2, "tainted": 2, "unhealthy": 2, "gone": 2},
        "other": {"free": 0, "allocated": 0, "tainted": 0, "unhealthy": 1, "gone": 0},
    }
    assert found.classes["fast"] == Counter(dict.fromkeys(STATES, 0), free=1, tainted=1)
    assert found.classes["all"].total() == 9


@pytest.mark.parametrize("seed", range(60))
def test_the_numbers_are_those_of_the_command(seed):
    chance = random.Random(seed)
    facts = []
    for place in ("n1", "n2", "n3"):
        if chance.random() < 0.9:
            facts.append(node(place))
        devices = [
            device(name, taints=tainted(chance.choice(KEYS)) if chance.random() < 0.4 else ())
            for name in "abcde"[: chance.randrange(6)]
        ]
        of = replace(slice_on(place, *devices), pool_slices=chance.choice((1, 1, 1, 2)))
        facts.append(replace(of, driver=chance.choice("de")))
        if chance.random() < 0.3:
            facts.append(replace(of, name=f"old-{place}", uid="o", generation=0))
    left = {f"n{number}": set("abcdef") for number in range(1, 5)}
    for number in range(chance.randrange(5)):
        pool = chance.choice(sorted(name for name in left if len(left[name]) > 1))
        names = chance.sample(sorted(left[pool]), chance.randrange(1, 3))
        left[pool] -= set(names)
        facts.append(holding(f"c{number}", *names, pool=pool))
    if chance.random() < 0.5:
        taint = tainted("example.com/rule")[0]
        where = chance.choice(({"device": "a"}, {"pool": "n1"}, {"driver": "d"}))
        facts.append(TaintRuleFacts(name="r", uid="r", taint=taint, **where))
    world = world_of(*facts)
    shown: dict[str, Counter[str]] = {}
    for row in pool_rows(Gathered(world=world)):
        shown.setdefault(row.identity.driver, Counter()).update(row.numbers)
    found = numbers_of(world).drivers
    assert {name: dict(each) for name, each in found.items()} == {
        name: dict(each) for name, each in shown.items()
    }
