"""The objects of `make hostile`: without claims, or too large to be stored, they do no harm."""

import re

import pytest

from bench.attacks import ATTACKS, LEVELS, innocent, scene

MAX_OBJECT = 1.5 * 2**20
"""The maximum size of a request to etcd."""

_CLAIM_NAME = re.compile(r'"resourceClaimName":"([^"]+)"')


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack(attack, number):
    namespaces = attack.namespaces(number)
    items = list(attack.items_of(namespaces))
    names = [each[:3] for each in items]
    assert len(set(names)) == len(names)
    assert {each.namespace for each in items} - {""} == set(namespaces)
    assert max(len(each.text.encode()) for each in items) < MAX_OBJECT
    claims = {each[1:3] for each in items if each.resource == "resourceclaims"}
    used = [
        {(each.namespace, name) for name in _CLAIM_NAME.findall(each.text)}
        for each in items
        if each.resource == "pods"
    ]
    assert len(used) >= number
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
