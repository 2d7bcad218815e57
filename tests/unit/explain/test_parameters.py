"""Opaque parameters of claims, templates and classes, checked with the schemas of drivers."""

from __future__ import annotations

from typing import Any

import pytest

from drakit_explain.parameters import parameter_problems, schemas_of
from drakit_formats.json_schema import JsonSchema

DRIVER = "lamps.example.com"
V1 = "lamps.example.com/v1"
LAMP: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "brightness"],
    "properties": {
        "apiVersion": {"const": V1},
        "kind": {"const": "Lamp"},
        "brightness": {"type": "integer"},
        "color": {"type": "string"},
    },
}
PLAIN = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"brightness": {"type": "integer"}},
}


def driver(**parameters: Any) -> dict[str, Any]:
    return {"metadata": {"name": DRIVER}, "spec": {"parameters": parameters}}


def config(parameters: Any, name: str = DRIVER) -> dict[str, Any]:
    return {"opaque": {"driver": name, "parameters": parameters}}


def claim(*configs: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "ResourceClaim", "spec": {"devices": {"config": list(configs)}}}


def problems(body: Any, **parameters: Any) -> list[str]:
    return list(parameter_problems(body, {DRIVER: schemas_of(driver(**parameters))}))


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        pytest.param({"apiVersion": V1, "kind": "Lamp", "brightness": 5}, "", id="fits"),
        pytest.param({"apiVersion": V1, "kind": "Lamp", "color": "red"}, "",
                     id="the-rest-may-be-in-the-class"),
        pytest.param({"brightness": 5}, "", id="without-a-version"),
        pytest.param({"brightness": "5"}, "are invalid: brightness: must be an integer",
                     id="invalid"),
        pytest.param(
            {"apiVersion": V1, "kind": "Lamp", "brightnes": 5},
            f"are invalid (apiVersion {V1}): brightnes: is not a known key; "
            "known keys: apiVersion, kind, brightness, color",
            id="unknown-key-of-a-version",
        ),
        pytest.param({"apiVersion": V1, "brightness": 5},
                     f"are invalid (apiVersion {V1}): kind: is required", id="no-kind"),
        pytest.param({"apiVersion": V1, "kind": "Lamps"},
                     f"are invalid (apiVersion {V1}): kind: must be Lamp", id="other-kind"),
        pytest.param({"apiVersion": "lamps.example.com/v2"},
                     f"have apiVersion lamps.example.com/v2; known: {V1}, none", id="version"),
        pytest.param({"apiVersion": 1}, f"have apiVersion ?; known: {V1}, none", id="no-text"),
        pytest.param("bright", "are invalid: must be an object", id="text"),
        pytest.param(None, "are invalid: must be an object", id="null"),
    ],
)  # fmt: skip
def test_each_version_has_its_schema(parameters, problem):
    found = problems(claim(config(parameters)), **{V1: LAMP, "": PLAIN})
    where = "spec.devices.config[0].opaque.parameters"
    expected = f"{where}: the parameters for driver {DRIVER} {problem}"
    assert found == ([expected] if problem else [])


def test_parameters_need_a_version_if_the_driver_knows_no_other():
    (found,) = problems(claim(config({"brightness": 5})), **{V1: LAMP})
    assert found.endswith(f"have no apiVersion; known: {V1}")


def test_without_versions_the_key_is_any_other():
    schema = {"properties": {"apiVersion": {"enum": ["a", "b"]}}}
    assert problems(claim(config({"apiVersion": "a"})), **{"": schema}) == []
    (found,) = problems(claim(config({"apiVersion": "c"})), **{"": PLAIN})
    assert "apiVersion: is not a known key" in found


BAD = config({"x": 1})


@pytest.mark.parametrize(
    ("body", "places"),
    [
        pytest.param(claim(config({}), BAD, BAD),
                     ["spec.devices.config[1]", "spec.devices.config[2]"], id="claim"),
        pytest.param({"kind": "ResourceClaimTemplate", "spec": {"spec": claim(BAD)["spec"]}},
                     ["spec.spec.devices.config[0]"], id="template"),
        pytest.param({"kind": "DeviceClass", "spec": {"config": [BAD]}}, ["spec.config[0]"],
                     id="class"),
        pytest.param(claim(config({"x": 1}, "other.example.com")), [], id="driver-without-schemas"),
        pytest.param(claim({"requests": ["a"]}), [], id="config-of-a-later-kubernetes"),
        pytest.param(claim(), [], id="no-config"),
        pytest.param({"kind": "ResourceClaim", "spec": {}}, [], id="no-devices"),
    ],
)  # fmt: skip
def test_each_kind_has_its_configs(body, places):
    assert [each.partition(".opaque")[0] for each in problems(body, **{"": PLAIN})] == places


def test_all_configs_of_an_object_share_the_steps():
    schema = {"properties": {"a": {"items": {"type": "integer"}}}}
    wrong = [config({"a": [1] * 1000 + ["x"]})]
    assert len(problems(claim(*wrong * 2), **{"": schema})) == 2
    assert problems(claim(*wrong * 32), **{"": schema}) == []


def test_a_driver_with_a_malformed_schema_is_not_checked():
    body = driver(**{"": {"type": 5}, V1: LAMP})
    found = schemas_of(body)
    assert found.problems == ("spec.parameters['']: type: fits none of the allowed forms",)
    assert list(parameter_problems(claim(BAD), {DRIVER: found})) == []
    assert isinstance(found.versions[V1], JsonSchema)
