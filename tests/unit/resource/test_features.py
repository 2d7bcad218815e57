"""Fields that an API server drops or refuses without a feature, and devices without them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drakit import Device
from drakit.device import Capacity, NodeAllocatableResource, Taint
from drakit_formats.resource.device import (
    Feature,
    Refusal,
    device_body,
    dropped_from_slice,
    refusal,
    used_features,
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
    compatibility_groups={"s": ("mig",)},
    binds_to_node=True,
    binding_conditions=("x.y/attached",),
    binding_failure_conditions=("x.y/failed",),
    node_allocatable_resources={"memory": NodeAllocatableResource(overhead_per_pod="1Gi")},
    extra={"newField": {"a": "1000m", "b": [{"c": True, "d": False}]}},
)
BODY = device_body(FULL, taints=[{"key": "x.y/z", "effect": "None"}])


def stored(*dropped: str, **changed: object) -> dict:
    return {key: value for key, value in BODY.items() if key not in dropped} | changed


ANSWERS = {
    "nothing": (stored(), set()),
    "taints": (stored("taints"), {Feature.TAINTS}),
    "empty-taints": (stored(taints=[]), {Feature.TAINTS}),
    "counters": (stored("consumesCounters"), {Feature.COUNTERS}),
    "sharing": (stored("allowMultipleAllocations"), {Feature.MULTIPLE_ALLOCATIONS}),
    "request-policy": (
        stored(capacity={"m": {"value": "8"}, "size": {"value": "1Gi"}}),
        {Feature.MULTIPLE_ALLOCATIONS},
    ),
    "list": (stored(attributes={"x": {"int": 1}, "l": {}}), {Feature.LIST_ATTRIBUTES}),
    "list-and-name": (stored(attributes={"x": {"int": 1}}), {Feature.LIST_ATTRIBUTES}),
    "an-attribute": (stored(attributes={"l": {"strings": ["a", "b"]}}), {Feature.OTHER}),
    "capacities": (stored(capacity={}), {Feature.OTHER}),
    "binding-conditions": (
        stored("bindsToNode", "bindingConditions", "bindingFailureConditions"),
        {Feature.BINDING_CONDITIONS},
    ),
    "compatibility-groups": (
        stored(consumesCounters=[{"counterSet": "s", "counters": {"m": {"value": "1"}}}]),
        {Feature.COMPATIBILITY_GROUPS},
    ),
    "node-resources": (stored("nodeAllocatableResources"), {Feature.NODE_ALLOCATABLE_RESOURCES}),
    "an-extra-field": (stored("newField"), {Feature.EXTRA}),
    "part-of-an-extra-field": (stored(newField={"a": "1", "b": [{"d": False}]}), {Feature.EXTRA}),
    "an-extra-field-in-another-form": (
        stored(newField={"a": "1", "b": [{"c": True}], "default": 1}),
        set(),
    ),
    "changed-by-somebody": (stored(taints=[{"key": "another", "effect": "None"}]), set()),
    "several": (
        stored("taints", "allowMultipleAllocations"),
        {Feature.TAINTS, Feature.MULTIPLE_ALLOCATIONS},
    ),
}


@pytest.mark.parametrize(("answer", "features"), ANSWERS.values(), ids=ANSWERS)
def test_what_was_dropped_of_a_device(answer, features):
    assert dropped_from_slice(spec(devices=[BODY]), spec(devices=[answer])) == features


def test_the_attribute_with_the_type_of_partitions():
    sent = spec(devices=[BODY], partitionTypeAttribute="x.y/profile")
    assert dropped_from_slice(sent, spec(devices=[BODY])) == {Feature.PARTITION_TYPES}
    assert dropped_from_slice(sent, sent) == frozenset()


def test_extra_fields_have_no_known_gate():
    assert {feature for feature in Feature if not feature.gate} == {Feature.EXTRA, Feature.OTHER}


def spec(**fields: object) -> dict:
    return {"spec": fields}


def test_what_was_dropped_of_a_slice():
    sent = spec(devices=[BODY, {"name": "d", "taints": [{"key": "k"}]}])
    answer = spec(devices=[{"name": "d"}, stored("bindsToNode")])
    assert dropped_from_slice(sent, answer) == {Feature.TAINTS, Feature.BINDING_CONDITIONS}
    assert dropped_from_slice(sent, sent) == frozenset()


def test_counter_sets_that_were_dropped():
    sent = spec(sharedCounters=[{"name": "s", "counters": {"m": {"value": "1"}}}])
    assert dropped_from_slice(sent, spec()) == {Feature.COUNTERS}


def test_a_device_that_is_not_in_the_answer_proves_nothing():
    assert dropped_from_slice(spec(devices=[BODY]), spec(devices=[])) == frozenset()


def cause(field: str, message: str = "no") -> dict:
    return {"reason": "FieldValueInvalid", "message": message, "field": field}


# As 1.36 answers.
NO_LISTS = Refusal(features=frozenset({Feature.LIST_ATTRIBUTES}))
NO_COUNTERS = Refusal(features=frozenset({Feature.COUNTERS}))
REFUSALS = {
    "list-without-its-values": ("spec.devices[1].attributes[l]", NO_LISTS),
    "in-v1beta1": ("spec.devices[1].basic.attributes[l]", NO_LISTS),
    "an-attribute": (
        "spec.devices[1].attributes[x].string",
        Refusal(devices={"c": "attributes[x].string: no"}),
    ),
    "a-capacity-in-v1beta1": (
        "spec.devices[1].basic.capacity[x.y/m].requestPolicy.validRange.step",
        Refusal(devices={"c": "capacity[x.y/m].requestPolicy.validRange.step: no"}),
    ),
    "a-name": ("spec.devices[0].name", Refusal(devices={"a": "name: no"})),
    "a-device": ("spec.devices[1]", Refusal(devices={"c": "no"})),
    "all-devices": ("spec.devices", Refusal()),
    "a-device-that-was-not-sent": ("spec.devices[2].name", Refusal()),
    "the-pool": ("spec.pool.name", Refusal()),
    "the-counters-of-all-consumers": (
        "spec.devices[1].consumesCounters[0].counterSet",
        NO_COUNTERS,
    ),
    "the-counters-of-all-consumers-in-v1beta1": (
        "spec.devices[1].basic.consumesCounters[0].counterSet",
        NO_COUNTERS,
    ),
    "counter-sets": ("spec.sharedCounters[0].counters", NO_COUNTERS),
}


@pytest.mark.parametrize(("field", "found"), REFUSALS.values(), ids=REFUSALS)
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


def test_without_list_attributes_the_other_attributes_stay():
    device = without(FULL, {Feature.LIST_ATTRIBUTES})
    assert device == replace(FULL, attributes={"x": 1})


def test_without_sharing_a_device_is_given_as_a_whole():
    device = without(FULL, {Feature.MULTIPLE_ALLOCATIONS})
    assert device == replace(
        FULL, allow_multiple_allocations=False, capacity={"m": "8", "size": "1Gi"}
    )
    assert device_problems(device) == []


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


BOUND = {"binding_conditions": ("a",), "binding_failure_conditions": ("b",)}
MAPPED = {"cpu": NodeAllocatableResource(device_multiplier="8", overhead_per_pod="1")}


NEEDED = {
    "before-it-is-ready": (BOUND, Feature.BINDING_CONDITIONS),
    "beside-what-it-does-not-go-with": (
        {"consumes": {"s": {"m": "1"}}, "compatibility_groups": {"s": ("a",)}},
        Feature.COMPATIBILITY_GROUPS,
    ),
    "where-its-cpus-are-taken": (
        {"node_allocatable_resources": MAPPED},
        Feature.NODE_ALLOCATABLE_RESOURCES,
    ),
    "with-an-unknown-meaning": ({"extra": {"new": 1}}, Feature.EXTRA),
}


@pytest.mark.parametrize(("fields", "feature"), NEEDED.values(), ids=NEEDED)
def test_a_device_is_not_published_without_a_feature_that_keeps_pods_away(fields, feature):
    device = Device(name="c", **fields)
    assert device_problems(device) == []
    assert without(device, {feature}) is None
    assert without(device, {*Feature} - {feature, Feature.COUNTERS}) is device
    assert feature in used_features([device_body(device)])
    assert used_features([device_body(Device(name="c"))]) <= {Feature.OTHER}


def test_what_only_informs_is_left_out():
    overhead = {"memory": NodeAllocatableResource(overhead_per_container="1Gi")}
    device = Device(name="c", binds_to_node=True, node_allocatable_resources=overhead)
    dropped = {Feature.BINDING_CONDITIONS, Feature.NODE_ALLOCATABLE_RESOURCES}
    assert without(device, dropped) == Device(name="c")
