"""Fields that an API server drops or refuses without a feature, and devices without them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drakit import Device
from drakit.device import Capacity, Taint
from drakit_formats.resource.device import (
    Feature,
    Refusal,
    device_body,
    dropped_from_slice,
    refusal,
    without,
)
from drakit_formats.resource.inventory import device_problems

FULL = Device(
    name="c",
    attributes={"x": 1, "l": ("a", "b")},
    capacity={"m": Capacity(value="8", default="1"), "size": "1Gi"},
    allow_multiple_allocations=True,
    consumes={"s": {"m": "1"}},
    taints=(Taint(key="x.y/z", effect="None"),),
)
BODY = device_body(FULL, taints=[{"key": "x.y/z", "effect": "None"}])


def stored(*dropped: str, **changed: object) -> dict:
    return {key: value for key, value in BODY.items() if key not in dropped} | changed


@pytest.mark.parametrize(
    ("answer", "features"),
    [
        pytest.param(stored(), set(), id="nothing"),
        pytest.param(stored("taints"), {Feature.TAINTS}, id="taints"),
        pytest.param(stored(taints=[]), {Feature.TAINTS}, id="empty-taints"),
        pytest.param(stored("consumesCounters"), {Feature.COUNTERS}, id="counters"),
        pytest.param(
            stored("allowMultipleAllocations"), {Feature.MULTIPLE_ALLOCATIONS}, id="sharing"
        ),
        pytest.param(
            stored(capacity={"m": {"value": "8"}, "size": {"value": "1Gi"}}),
            {Feature.MULTIPLE_ALLOCATIONS},
            id="request-policy",
        ),
        pytest.param(
            stored(attributes={"x": {"int": 1}, "l": {}}), {Feature.LIST_ATTRIBUTES}, id="list"
        ),
        pytest.param(
            stored(attributes={"x": {"int": 1}}), {Feature.LIST_ATTRIBUTES}, id="list-and-name"
        ),
        pytest.param(
            stored(attributes={"l": {"strings": ["a", "b"]}}), {Feature.OTHER}, id="an-attribute"
        ),
        pytest.param(stored(capacity={}), {Feature.OTHER}, id="capacities"),
        pytest.param(
            stored(taints=[{"key": "another", "effect": "None"}]), set(), id="changed-by-somebody"
        ),
        pytest.param(
            stored("taints", "consumesCounters"), {Feature.TAINTS, Feature.COUNTERS}, id="several"
        ),
    ],
)
def test_what_was_dropped_of_a_device(answer, features):
    assert dropped_from_slice(spec(devices=[BODY]), spec(devices=[answer])) == features


def test_a_field_that_we_know_no_gate_of():
    sent, answer = {"name": "c", "newField": {"a": 1}}, {"name": "c"}
    (feature,) = dropped_from_slice(spec(devices=[sent]), spec(devices=[answer]))
    assert feature is Feature.OTHER
    assert feature.gate == ""


def test_each_feature_has_its_gate():
    assert {feature.gate for feature in Feature if feature is not Feature.OTHER} == {
        "DRADeviceTaints",
        "DRAPartitionableDevices",
        "DRAListTypeAttributes",
        "DRAConsumableCapacity",
    }


def spec(**fields: object) -> dict:
    return {"spec": fields}


def test_what_was_dropped_of_a_slice():
    sent = spec(devices=[BODY, {"name": "d", "taints": [{"key": "k"}]}])
    answer = spec(devices=[{"name": "d"}, stored("consumesCounters")])
    assert dropped_from_slice(sent, answer) == {Feature.TAINTS, Feature.COUNTERS}
    assert dropped_from_slice(sent, sent) == frozenset()


def test_counter_sets_that_were_dropped():
    sent = spec(sharedCounters=[{"name": "s", "counters": {"m": {"value": "1"}}}])
    assert dropped_from_slice(sent, spec()) == {Feature.COUNTERS}


def test_a_device_that_is_not_in_the_answer_proves_nothing():
    assert dropped_from_slice(spec(devices=[BODY]), spec(devices=[])) == frozenset()


def cause(field: str, message: str = "no") -> dict:
    return {"reason": "FieldValueInvalid", "message": message, "field": field}


# As 1.36 answers.
@pytest.mark.parametrize(
    ("field", "found"),
    [
        pytest.param(
            "spec.devices[1].attributes[l]",
            Refusal(features=frozenset({Feature.LIST_ATTRIBUTES})),
            id="list-without-its-values",
        ),
        pytest.param(
            "spec.devices[1].basic.attributes[l]",
            Refusal(features=frozenset({Feature.LIST_ATTRIBUTES})),
            id="in-v1beta1",
        ),
        pytest.param(
            "spec.devices[1].attributes[x].string",
            Refusal(devices={"c": "attributes[x].string: no"}),
            id="an-attribute",
        ),
        pytest.param(
            "spec.devices[1].basic.capacity[x.y/m].requestPolicy.validRange.step",
            Refusal(devices={"c": "capacity[x.y/m].requestPolicy.validRange.step: no"}),
            id="a-capacity-in-v1beta1",
        ),
        pytest.param("spec.devices[0].name", Refusal(devices={"a": "name: no"}), id="a-name"),
        pytest.param("spec.devices[1]", Refusal(devices={"c": "no"}), id="a-device"),
        pytest.param("spec.devices", Refusal(), id="all-devices"),
        pytest.param("spec.devices[2].name", Refusal(), id="a-device-that-was-not-sent"),
        pytest.param("spec.pool.name", Refusal(), id="the-pool"),
        pytest.param(
            "spec.devices[1].consumesCounters[0].counterSet",
            Refusal(features=frozenset({Feature.COUNTERS})),
            id="the-counters-of-all-consumers",
        ),
        pytest.param(
            "spec.devices[1].basic.consumesCounters[0].counterSet",
            Refusal(features=frozenset({Feature.COUNTERS})),
            id="the-counters-of-all-consumers-in-v1beta1",
        ),
        pytest.param(
            "spec.sharedCounters[0].counters",
            Refusal(features=frozenset({Feature.COUNTERS})),
            id="counter-sets",
        ),
    ],
)
def test_the_content_of_a_refusal(field, found):
    sent = spec(devices=[{"name": "a"}, BODY])
    assert refusal({"causes": [cause(field)]}, sent) == found


def test_a_refusal_of_the_counters_of_one_of_two_consumers_is_about_that_one():
    sent = spec(devices=[{**BODY, "name": "b"}, BODY])
    found = refusal({"causes": [cause("spec.devices[1].consumesCounters[0].counterSet")]}, sent)
    assert found == Refusal(devices={"c": "consumesCounters[0].counterSet: no"})


def test_the_reason_does_not_depend_on_the_order_of_the_causes():
    causes = [cause(f"spec.devices[0].capacity[{name}].requestPolicy") for name in "ba"]
    sent = spec(devices=[BODY])
    found = {"c": "capacity[a].requestPolicy: no"}
    assert refusal({"causes": causes}, sent).devices == found
    assert refusal({"causes": causes[::-1]}, sent).devices == found


def test_a_refusal_without_causes_proves_nothing():
    assert refusal({}, spec(devices=[BODY])) == Refusal()


def test_without_list_attributes_the_other_attributes_stay():
    device = without(FULL, {Feature.LIST_ATTRIBUTES})
    assert device == replace(FULL, attributes={"x": 1})


def test_without_sharing_a_device_is_given_as_a_whole():
    device = without(FULL, {Feature.MULTIPLE_ALLOCATIONS})
    assert device == replace(
        FULL, allow_multiple_allocations=False, capacity={"m": "8", "size": "1Gi"}
    )
    assert device_problems(device) == []


def test_a_partition_without_counters_could_be_given_twice():
    assert without(FULL, {Feature.COUNTERS}) is None


@pytest.mark.parametrize(
    ("effect", "safe"), [("None", True), ("NoSchedule", False), ("NoExecute", False)]
)
def test_a_taint_that_keeps_pods_away_is_needed(effect, safe):
    tainted = Device(name="c", taints=(Taint(key="x.y/z", effect=effect),))
    assert without(tainted, {Feature.TAINTS}) == (Device(name="c") if safe else None)


@pytest.mark.parametrize("features", [set(), {Feature.OTHER}, set(Feature)])
def test_a_device_that_uses_none_of_it_stays_the_same_object(features):
    plain = Device(name="c", attributes={"x": 1}, capacity={"m": "1"})
    assert without(plain, features) is plain
