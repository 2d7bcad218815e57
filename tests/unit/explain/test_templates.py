"""Whether claims of a template, or requests for a class, can be allocated at all."""

from dataclasses import replace

import pytest

from drakit_explain.cel.library import Library
from drakit_explain.codes import Code
from drakit_explain.devices import Amount, CapacityFacts, TaintFacts
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    Constraint,
    DeviceID,
    Request,
    SliceFacts,
    TemplateFacts,
)
from drakit_explain.queries import Verdicts, answered
from drakit_explain.selectors import Reads, bring_up_to_date
from drakit_explain.templates import class_problems, template_problems
from tests.fakes.world import ask_allocator, device, node, on, world_of

GPU = ClassFacts(name="gpu", uid="k", selectors=('device.driver == "d"',))
MODEL = 'device.attributes["d"].model == "a"'


def of(name, *devices, place="n1", **facts):
    facts = {"driver": "d", "pool": place, "place": on(place)} | facts
    return SliceFacts(name=name, uid=name, devices=devices, **facts)


def request(name="gpu", **facts):
    return Request(**{"name": name, "device_class": "gpu"} | facts)


def template(*requests, constraints=()):
    return TemplateFacts(
        namespace="lab", name="tpl", uid="t", requests=requests, constraints=tuple(constraints)
    )


def cluster(*facts):
    return world_of(GPU, node("n1"), node("n2"), *facts)


def problems(world, checked):
    expressions = world.texts(checked.requests)
    slices = [each.slice for each in world.reachable()]
    bring_up_to_date(world.selectors, Library(), expressions, slices)
    verdicts = Verdicts(world)
    return answered(verdicts, lambda: template_problems(checked, world, verdicts), ask_allocator)


def found(world, checked):
    return [each.code for each in problems(world, checked)]


ONE = of("s1", device("g0"))
TWO = of("s2", device("g0"), device("g1"), place="n2")
RED_BLUE = of("s1", device("g0", attributes={"c": "red"}), device("g1", attributes={"c": "blue"}))
SMALL = of("s1", device("g0", capacity=[CapacityFacts(name="memory", value="1Gi")]))
"""Smaller than requests ask for."""


@pytest.mark.parametrize(
    ("slices", "checked", "codes"),
    [
        pytest.param([ONE], template(request()), [], id="fits"),
        pytest.param(
            [ONE], template(request(device_class="none")), [Code.DEVICE_CLASS_MISSING], id="class"
        ),
        pytest.param([], template(request()), [Code.NO_DEVICE_PUBLISHED], id="no-device-at-all"),
        pytest.param(
            [ONE],
            template(request(selectors=("false",))),
            [Code.NO_DEVICE_PUBLISHED],
            id="no-match",
        ),
        pytest.param(
            [ONE, TWO], template(request(count=3)), [Code.NO_DEVICE_PUBLISHED], id="count-of-a-node"
        ),
        pytest.param(
            [ONE], template(request("a"), request("b")), [Code.REQUESTS_COMPETE], id="compete"
        ),
        pytest.param(
            [SMALL],
            template(request(capacity=(Amount("memory", "2Gi"),))),
            [Code.NO_DEVICE_PUBLISHED],
            id="capacity",
        ),
        pytest.param(
            [RED_BLUE],
            template(request(count=2), constraints=[Constraint(attribute="d/c")]),
            [Code.CONSTRAINT_NOT_MET],
            id="constraint",
        ),
        pytest.param(
            [replace(ONE, pool_slices=2)],
            template(request()),
            [Code.NO_DEVICE_PUBLISHED],
            id="incomplete-pool-counts-as-empty",
        ),
        pytest.param(
            [of("s1", device("g0", taints=(TaintFacts(key="k", effect="NoSchedule"),)))],
            template(request()),
            [],
            id="taints-do-not-matter",
        ),
        pytest.param(
            [ONE],
            template(request(selectors=(MODEL,))),
            [Code.SELECTOR_FAILED],
            id="selector-fails",
        ),
        pytest.param(
            [ONE, of("s2", device("g0", attributes={"model": "a"}), place="n2")],
            template(request(selectors=(MODEL,))),
            [Code.SELECTOR_FAILED],
            id="selector-fails-on-one-node-and-fits-on-another",
        ),
        pytest.param(
            [ONE, of("s2", device("g0"), device("g0"), place="n2")],
            template(request(count=0)),
            [],
            id="all-beside-an-invalid-pool-is-undecided",
        ),
    ],
)
def test_what_is_wrong_with_a_template(slices, checked, codes):
    assert found(cluster(*slices), checked) == codes


@pytest.mark.parametrize("minor", [34, 35])
def test_an_incomplete_pool_is_named_where_it_counts_as_empty(minor):
    world = cluster(replace(ONE, pool_slices=2))
    world.minor = minor
    named = [
        each.sentence.endswith("(not counted: pool n1 on node n1, 1 of 2 slices)")
        for each in problems(world, template(request()))
    ]
    assert named == ([True] if minor == 35 else [])


@pytest.mark.parametrize("number", [65, 1000])
def test_many_nodes_with_equal_devices(number):
    names = [f"m{index}" for index in range(number)]
    slices = [of(f"s-{name}", device("g0"), place=name) for name in names]
    world = world_of(GPU, *(node(name) for name in names), *slices)
    assert found(world, template(request("a"), request("b"))) == [Code.REQUESTS_COMPETE]


@pytest.mark.parametrize("slices", [[], [ONE]], ids=["no-device", "a-device"])
def test_a_selector_that_does_not_compile(slices):
    world = cluster(*slices)
    world.selectors.learn({"bad": Reads(error="syntax error")})
    (reason,) = problems(world, template(request(selectors=("bad",))))
    assert reason.code is Code.SELECTOR_FAILED
    assert "its selector does not compile: syntax error; correct it" in reason.sentence
    world.apply(replace(GPU, selectors=("bad",)))
    assert problems(world, template(request())) == [], "it is reported about the class"
    assert [each.code for each in class_problems(world.device_class("gpu"), world)] == [
        Code.SELECTOR_FAILED
    ]


def test_devices_that_claims_hold_count():
    holder = ClaimFacts(
        namespace="lab", name="c", uid="c", allocated=True, devices=(DeviceID("d", "n1", "g0"),)
    )
    assert found(cluster(ONE, holder), template(request())) == []


def test_a_selector_that_is_not_evaluated_allows_no_conclusion():
    world = cluster(ONE)
    assert template_problems(template(request()), world, Verdicts(world)) == []


def test_only_a_missing_class_is_certain_at_once():
    assert [
        each.transient for each in problems(cluster(), template(request(device_class="none")))
    ] == [""]
    assert all(each.transient for each in problems(cluster(), template(request())))


def test_more_devices_than_an_allocation_can_list():
    devices = [device(f"g{number}") for number in range(40)]
    (reason,) = problems(cluster(replace(ONE, devices=devices)), template(request(count=33)))
    assert (reason.code, reason.sentence) == (
        Code.REQUESTS_COMPETE,
        "ResourceClaimTemplate lab/tpl: it asks for 33 devices, but an allocation can list only "
        "32; "
        "reduce the requests",
    )


def test_the_sentence_names_the_remedy():
    (reason,) = problems(cluster(ONE, TWO), template(request(count=3)))
    assert reason.sentence == (
        'ResourceClaimTemplate lab/tpl: request "gpu" asks for 3 devices of DeviceClass "gpu" on '
        "one node, and no node publishes more than 2 that match; lower count or add devices to "
        "one node"
    )


@pytest.mark.parametrize(
    ("selectors", "slices", "codes"),
    [
        pytest.param(('device.driver == "d"',), [ONE], [], id="matches"),
        pytest.param(('device.driver == "x"',), [ONE], [Code.NO_DEVICE_PUBLISHED], id="none"),
        pytest.param(('device.driver == "x"',), [], [Code.NO_DEVICE_PUBLISHED], id="no-slices"),
        pytest.param((MODEL,), [ONE], [Code.SELECTOR_FAILED], id="missing-key"),
        pytest.param(
            ('device.driver == "d" && false',),
            [replace(ONE, pool_slices=2)],
            [Code.NO_DEVICE_PUBLISHED],
            id="incomplete-pool-counts-as-empty",
        ),
        pytest.param(
            ('device.driver == "x"',),
            [replace(ONE, pool_slices=2)],
            [Code.NO_DEVICE_PUBLISHED],
            id="incomplete-pool-of-another-driver",
        ),
    ],
)
def test_what_is_wrong_with_a_class(selectors, slices, codes):
    checked = ClassFacts(name="c", uid="c", selectors=selectors)
    world = cluster(*slices, checked)
    found = [each.slice for each in world.reachable()]
    bring_up_to_date(world.selectors, Library(), selectors, found)
    reasons = class_problems(checked, world)
    assert [each.code for each in reasons] == codes
    assert all(each.transient and each.regarding.kind == "DeviceClass" for each in reasons)


def test_a_selector_that_fails_is_corrected_as_for_a_pod():
    named = of("s1", device("g0", attributes={"modle": "a"}))
    (reason,) = problems(cluster(named), template(request(selectors=(MODEL,))))
    assert "; device g0 has modle, so check the spelling of model; " in reason.text
