"""JSON schemas: what fits, what does not and why, and what costs too much."""

from __future__ import annotations

import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drakit_formats.json_schema import SCHEMA, JsonSchema

LAMP: Any = {
    "type": "object",
    "additionalProperties": False,
    "required": ["brightness"],
    "properties": {
        "brightness": {"type": "integer", "minimum": 1, "maximum": 100},
        "color": {"enum": ["red", "green"]},
        "name": {"type": "string", "maxLength": 5, "pattern": "^[a-z]+$"},
        "zones": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/Zone"}},
        "timer": {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "null"}]},
        "mode": {"anyOf": [{"$ref": "#/$defs/Blink"}, {"$ref": "#/$defs/Fade"}]},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "alarm": {"anyOf": [{"$ref": "#/$defs/Blink"}, {"type": "null"}]},
    },
    "$defs": {
        "Zone": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"id": {"type": "integer"}},
        },
        "Blink": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"kind": {"const": "blink"}, "hertz": {"type": "number", "maximum": 5}},
        },
        "Fade": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"kind": {"const": "fade"}, "seconds": {"type": "number"}},
        },
    },
}
KEYS = "known keys: brightness, color, name, zones, timer, mode, labels, alarm"


@pytest.mark.parametrize(
    ("value", "problems"),
    [
        pytest.param({"brightness": 5, "color": "red", "timer": None}, [], id="fits"),
        pytest.param({"brightness": 5.0}, [], id="whole-number"),
        pytest.param([], ["must be an object"], id="list"),
        pytest.param({}, ["brightness: is required"], id="missing"),
        pytest.param({"brightness": "5"}, ["brightness: must be an integer"], id="text"),
        pytest.param({"brightness": True}, ["brightness: must be an integer"], id="boolean"),
        pytest.param({"brightness": 0}, ["brightness: must be at least 1"], id="too-small"),
        pytest.param({"brightness": 101}, ["brightness: must be at most 100"], id="too-large"),
        pytest.param(
            {"brightness": 5, "shade": "red"},
            ["shade: is not a known key", KEYS],
            id="unknown-key",
        ),
        pytest.param(
            {"brightness": 5, "color": "blue"}, ["color: must be one of red, green"], id="choice"
        ),
        pytest.param(
            {"brightness": 5, "name": "Kitchen"},
            ["name: must have at most 5 characters", "name: must match ^[a-z]+$"],
            id="two-problems-of-a-field",
        ),
        pytest.param(
            {"brightness": 5, "zones": [{"id": 1}, {"ids": 2}]},
            ["zones[1].ids: is not a known key", "known keys of zones[1]: id"],
            id="nested",
        ),
        pytest.param(
            {"brightness": 5, "zones": [{}, {}, {}]},
            ["zones: must have at most 2 entries"],
            id="too-many",
        ),
        pytest.param({"brightness": 5, "timer": 0}, ["timer: must be more than 0"], id="optional"),
        pytest.param(
            {"brightness": 5, "timer": "x"},
            ["timer: fits none of the allowed forms"],
            id="no-alternative",
        ),
        pytest.param(
            {"brightness": 5, "mode": {"kind": "blink", "hertz": 9}},
            ["mode.hertz: must be at most 5"],
            id="alternative-by-its-kind",
        ),
        pytest.param(
            {"brightness": 5, "mode": {"kind": "fade", "hertz": 1}},
            ["mode.hertz: is not a known key", "known keys of mode: kind, seconds"],
            id="key-of-another-alternative",
        ),
        pytest.param(
            {"brightness": 5, "mode": {"kind": "spin"}},
            ["mode: fits none of the allowed forms"],
            id="kind-of-no-alternative",
        ),
        pytest.param(
            {"brightness": 5, "alarm": {"kind": "spin"}},
            ["alarm.kind: must be blink"],
            id="the-only-alternative-of-the-type",
        ),
        pytest.param(
            {"brightness": 5, "labels": {"a": 1}}, ["labels.a: must be a string"], id="map"
        ),
        pytest.param(
            {"brightness": 5, "a\nb": 1, "x" * 100: 1},
            [
                "'a\\nb': is not a known key",
                f"{'x' * 64}...: is not a known key",
                KEYS,
            ],
            id="hostile-keys",
        ),
    ],
)
def test_problems_name_the_field_and_the_known_keys_but_no_values(value, problems):
    assert JsonSchema(LAMP).problems(value) == problems


def test_a_part_of_the_parameters_may_lack_keys_that_another_part_has():
    schema = JsonSchema({**LAMP, "required": ["brightness", "kind"]})
    assert schema.problems({}, required=()) == []
    assert schema.problems({}, required=("kind",)) == ["kind: is required"]
    assert JsonSchema({"minProperties": 1}).problems({}, required=()) == []
    nested = JsonSchema({"properties": {"inner": {"required": ["a"]}}})
    assert nested.problems({"inner": {}}, required=()) == ["inner.a: is required"]


def test_many_problems_are_counted_and_not_listed():
    found = JsonSchema(LAMP).problems({str(number): 1 for number in range(1000)})
    assert (len(found), found[5:]) == (7, ["and more", KEYS])


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        pytest.param([], "must be an object or true or false", id="list"),
        pytest.param({"properties": []}, "properties: must be an object", id="properties"),
        pytest.param(
            {"properties": {"a": 1}},
            "properties.a: must be an object or true or false",
            id="nested",
        ),
        pytest.param({"items": {"maximum": "1"}}, "items.maximum: must be a number", id="bound"),
        pytest.param({"required": [1]}, "required[0]: must be a string", id="required"),
        pytest.param(LAMP, "", id="fine"),
    ],
)
def test_a_malformed_schema_has_a_problem_with_its_place(schema, problem):
    assert SCHEMA.problems(schema) == ([problem] if problem else [])


@pytest.mark.parametrize("reference", ["#/$defs/A", "http://other.test/a", "#/$defs/Zone/0", "a"])
def test_a_reference_to_no_schema_accepts_everything(reference):
    schema = JsonSchema({"properties": {"a": {"$ref": reference}}, "$defs": LAMP["$defs"]})
    assert SCHEMA.problems({"$ref": reference}) == []
    assert schema.problems({"a": 1}) == []


def test_a_path_has_a_limit():
    value: Any = {"a": 1}
    for _ in range(30):
        value = {"k" * 64: value}
    schema = {"additionalProperties": {"$ref": "#"}, "properties": {"a": False}}
    (problem,) = JsonSchema(schema).problems(value)
    assert len(problem) < 300


MANY: Any = {str(number): {} for number in range(500)}


def nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


DOUBLING = {"$defs": {"A": {"anyOf": [{"items": {"$ref": "#/$defs/A"}, "maxItems": 0}] * 2}}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        pytest.param({"$ref": "#"}, {}, id="schema-of-itself"),
        pytest.param({"properties": {"a": {"$ref": "#"}}}, {"a": {"a": {}}}, id="recursive"),
        pytest.param({**DOUBLING, "$ref": "#/$defs/A"}, [[[[[[[[[[[[]]]]]]]]]]]], id="exponential"),
        pytest.param(nested(200), [[[]]], id="nested"),
        pytest.param({"pattern": "^(a+)+$"}, "a" * 5000 + "b", id="backtracking"),
        pytest.param({"pattern": "(?=a)b"}, "c", id="look-ahead"),
        pytest.param(
            {"items": {"additionalProperties": False, "properties": MANY}},
            [{"x" * 60: 1}] * 5000,
            id="many-hints",
        ),
        pytest.param({"items": {"type": "integer"}}, [1] * 100_000, id="many-values"),
        pytest.param({"items": {"enum": [*range(100_000)]}}, [-1] * 5000, id="many-choices"),
        pytest.param(
            {"anyOf": [{"items": {"enum": [*range(100_000)]}}, {}]}, [99_999] * 5000,
            id="many-choices-that-fit",
        ),
        pytest.param(
            {"patternProperties": {f"^{number}$": {} for number in range(2000)}},
            {str(number): 1 for number in range(5000)},
            id="many-patterns",
        ),
        pytest.param({"if": {}, "then": False, "not": {}}, {}, id="unsupported-keywords"),
    ],
)  # fmt: skip
def test_a_check_ends_soon_whatever_the_schema_and_the_value_are(schema, value):
    began = time.process_time()
    JsonSchema(schema).problems(value)
    SCHEMA.problems(schema)
    assert time.process_time() - began < 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-200, 200) | st.sampled_from(["red", "a", "abcdef", ""])
    | st.floats(-9, 9),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from([*LAMP["properties"], "id", "kind", "hertz", "seconds", "x"]), inner,
        max_size=3,
    ),
    max_leaves=8,
)  # fmt: skip


@given(VALUES)
def test_what_fits_is_what_another_implementation_accepts(value):
    accepted = jsonschema.Draft202012Validator(LAMP).is_valid(value)
    assert (JsonSchema(LAMP).problems(value) == []) is accepted
