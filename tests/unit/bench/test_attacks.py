"""The objects of `make hostile`: without claims, or too large to be stored, they do no harm."""

import re

import pytest

from bench.attacks import ATTACKS, LEVELS, innocent, scene

MAX_OBJECT = 1.5 * 2**20
"""The limit of etcd for a request."""

_CLAIM_NAME = re.compile(r'"resourceClaimName":"([^"]+)"')


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack(attack):
    items = list(attack.items(attack.name))
    names = [each[:3] for each in items]
    assert len(set(names)) == len(names)
    assert {each.namespace for each in items} <= {attack.name, ""}
    assert max(len(each.text.encode()) for each in items) < MAX_OBJECT
    claims = {each.name for each in items if each.resource == "resourceclaims"}
    used = [set(_CLAIM_NAME.findall(each.text)) for each in items if each.resource == "pods"]
    assert used
    assert all(each and each <= claims for each in used)


def test_nested_objects_are_too_deep_in_every_kind():
    (attack,) = (each for each in ATTACKS if each.name == "nested")
    deep = {each.resource for each in attack.items("ns") if '{"f:x":' * LEVELS in each.text}
    assert deep == {
        "deviceclasses",
        "nodedevicereports",
        "nodes",
        "pods",
        "resourceclaims",
        "resourceclaimtemplates",
        "resourceslices",
    }


def test_names_of_attacks_do_not_meet_those_of_the_scene():
    names = {each[:3] for each in (*scene(), *innocent("innocent", "p0"))}
    assert not any(each[:3] in names for attack in ATTACKS for each in attack.items(attack.name))
