"""The definition of HostDevicePolicy has the fields of its model, documented and bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drakit_drivers.hostdev.policy import HostDevicePolicySpec
from tools.crds.hostdevicepolicies import definition

Schema = dict[str, Any]


def spec() -> Schema:
    (version,) = definition()["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]["spec"]


def parts(schema: Schema, path: str = "spec") -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from parts(inner, f"{path}.{name}")
    if "items" in schema:
        yield from parts(schema["items"], f"{path}[]")
    if isinstance(inner := schema.get("additionalProperties"), dict):
        yield from parts(inner, f"{path}{{}}")


def test_every_part_has_a_type_and_every_field_a_description():
    for path, schema in parts(spec()):
        assert schema.get("type"), path
        if not path.endswith(("[]", "{}")):
            assert schema.get("description"), path


def test_every_list_and_every_map_is_bounded():
    for path, schema in parts(spec()):
        if schema["type"] == "array":
            assert schema.get("maxItems"), path
        if "additionalProperties" in schema:
            assert schema.get("maxProperties"), path


def test_the_model_reads_each_field_of_the_definition():
    fields = {field.alias for field in HostDevicePolicySpec.model_fields.values()}
    assert spec()["properties"].keys() == fields
