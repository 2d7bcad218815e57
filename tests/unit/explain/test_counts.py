"""Devices by state, of drivers and classes; the operator and `kubectl drakit devices` agree."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from drakit_cli.kubectl.devices import pool_rows
from drakit_cli.kubectl.gather import Gathered
from drakit_explain.cel.library import Library
from drakit_explain.counts import MAX_NAMES, OTHERS, STATES, Numbers, count
from drakit_explain.devices import TaintFacts
from drakit_explain.model import (
    ClassFacts,
    DeviceID,
    PodClaim,
    PodFacts,
    Share,
    TaintRuleFacts,
)
from drakit_explain.pending import count_waiting
from drakit_explain.reports import HOSTDEV
from drakit_explain.selectors import bring_up_to_date
from tests.fakes.world import claim, device, holding, node, request, slice_on, world_of

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


def waiting_in(world):
    found = {}
    for _ in count_waiting(world, found):
        pass
    return found


def waiting(name, *claims, **facts):
    of_pod = tuple(PodClaim(name=each, claim=each) for each in claims)
    return PodFacts(namespace="lab", name=name, uid=name, claims=of_pod, **facts)


def test_the_pods_that_wait_for_devices_of_each_class():
    def wanting(name, *classes):
        requests = [request(each, device_class=each) for each in classes]
        return claim(*requests, name=name)

    alternatives = (request("a", device_class="gpu"), request("b", device_class="nic"))
    world = world_of(
        *(ClassFacts(name=name, uid=name) for name in ("gpu", "nic", "unused")),
        *(wanting("gpu", "gpu"), wanting("both", "gpu", "nic"), wanting("unknown", "no-class")),
        claim(request("either", alternatives=alternatives), name="either"),
        holding("held", "a"),
        waiting("one", "gpu"),
        waiting("two", "both", "held"),
        waiting("three", "unknown"),
        waiting("four", "either"),
        waiting("has-devices", "held"),
        waiting("gated", "gpu", gated=True),
        waiting("placed", "gpu", node="n1"),
        waiting("going", "gpu", deleting=True),
        waiting("ended", "gpu", phase="Failed"),
    )
    assert waiting_in(world) == {
        "gpu": {"one", "two", "four"},
        "nic": {"two", "four"},
        "unused": set(),
        OTHERS: {"three"},
    }


def test_pods_that_wait_for_classes_beyond_the_first_count_together():
    names = [f"c{number:03}" for number in range(MAX_NAMES + 2)]
    world = world_of(
        *(ClassFacts(name=name, uid=name) for name in names),
        *(claim(request(device_class=name), name=name) for name in names),
        *(waiting(f"pod-{name}", name) for name in names),
    )
    found = waiting_in(world)
    assert found[OTHERS] == {f"pod-{name}" for name in names[MAX_NAMES:]}
    assert len(found) == MAX_NAMES + 1


def published(name, policy, **facts):
    return device(name, attributes={"path": f"/dev/{name}", "policy": policy}, **facts)


def host_devices(place, *devices):
    return replace(slice_on(place, *devices), driver=HOSTDEV)


def test_the_states_of_each_policy():
    qualified = device("full", attributes={f"{HOSTDEV}/policy": "cameras"})
    held = [DeviceID(HOSTDEV, "n1", each) for each in ("s2", "s4")]
    world = world_of(
        *(node("n1"), node("n2")),
        host_devices(
            "n1",
            *(published("s1", "serial"), published("c1", "cameras"), published("s2", "serial")),
            published("s3", "serial", taints=tainted("drakit.dev/unhealthy")),
            published("s4", "serial", taints=tainted("drakit.dev/gone")),
            qualified,
        ),
        host_devices("n2", published("s1", "serial"), published("c1", "cameras")),
        replace(slice_on("n1", published("theirs", "serial")), name="theirs", uid="theirs"),
        replace(holding("mine"), devices=tuple(held)),
        TaintRuleFacts(
            name="r", uid="r", taint=tainted("example.com/x")[0], driver=HOSTDEV, pool="n2"
        ),
    )
    assert numbers_of(world).policies == {
        "cameras": {"free": 2, "allocated": 0, "tainted": 1, "unhealthy": 0, "gone": 0},
        "serial": {"free": 1, "allocated": 1, "tainted": 1, "unhealthy": 1, "gone": 1},
    }


def test_a_hundred_classes_and_policies_have_numbers_of_their_own():
    names = [f"p{number:03}" for number in range(MAX_NAMES + 2)]
    world = world_of(
        node("n1"),
        host_devices("n1", *[published(f"d{name}", name) for name in reversed(names)]),
        *[ClassFacts(name=name, uid=name) for name in reversed(names)],
    )
    found = numbers_of(world)
    assert list(found.classes) == names[:MAX_NAMES]
    assert list(found.policies) == [*names[:MAX_NAMES], OTHERS]
    assert found.policies[OTHERS]["free"] == 2
    assert found.drivers[HOSTDEV]["free"] == len(names)


def test_the_drivers_with_most_devices_have_numbers_of_their_own():
    names = [f"d{number:03}" for number in range(MAX_NAMES + 2)]
    slices = [published_by(name, number=1 + (position >= 2)) for position, name in enumerate(names)]
    found = numbers_of(world_of(node("n1"), *slices)).drivers
    assert list(found) == [*names[2:], OTHERS]
    assert found[OTHERS] == {"free": 2, "allocated": 0, "tainted": 0, "unhealthy": 0, "gone": 0}


def published_by(driver, *, number):
    """A slice of node n1 with some devices."""
    devices = tuple(device(f"g{each}") for each in range(number))
    return replace(slice_on("n1", *devices), name=driver, driver=driver, pool=driver)


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
        taint = tainted(chance.choice(KEYS))[0]
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
