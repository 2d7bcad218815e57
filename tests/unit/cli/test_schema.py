"""``drakit schema``: the parameters of a driver, as a DeviceDriver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
import yaml
from pydantic import Field

from drakit import (
    AllocatedDevice,
    DeviceParameters,
    Driver,
    DriverConfig,
    NoParameters,
    ParameterVersion,
)
from drakit_cli.main import main
from drakit_driver.runtime.failures import BadParametersError
from drakit_driver.runtime.parameters import schemas_of, with_parameters
from drakit_formats import crds
from drakit_formats.json_schema import JsonSchema
from drakit_proto.backend.v1 import backend_pb2 as pb
from drakit_proto.backend.v1 import backend_pb2_grpc as pb_grpc


class Zone(DeviceParameters):
    zone_id: int = Field(ge=0)
    inner: Zone | None = None


class Light(DeviceParameters):
    brightness: int = Field(default=1, ge=1, le=100)
    zones: tuple[Zone, ...] = Field(default=(), max_length=2)


class OldLight(DeviceParameters):
    level: float = 0.5


class Blink(DeviceParameters):
    hertz: float = 1.0


class Lamp(Driver[DriverConfig, Light]):
    name = "lamps.example.com"
    parameter_versions = (
        ParameterVersion("lamps.example.com/v1", "Light"),
        ParameterVersion("lamps.example.com/v1", "Blink", type=Blink, convert=lambda _: Light()),
        ParameterVersion(
            "lamps.example.com/v1alpha1", "Light", type=OldLight, convert=lambda _: Light()
        ),
    )

    async def devices(self):
        yield []


class Configured(DriverConfig):
    directory: str


class Plain(Driver[Configured, NoParameters]):
    name = "plain.example.com"

    async def devices(self):
        yield []


class Renamed(Driver[DriverConfig, NoParameters]):
    name = "plain.example.com"

    @classmethod
    def name_of(cls, config: DriverConfig) -> str:
        return "renamed.example.com"

    async def devices(self):
        yield []


class Untyped(Driver[DriverConfig]):
    name = "untyped.example.com"

    async def devices(self):
        yield []


V1 = "lamps.example.com/v1"
ALPHA = "lamps.example.com/v1alpha1"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"brightness": 100},
        {"brightness": 0},
        {"brightness": None},
        {"apiVersion": V1, "kind": "Light", "brightness": 5},
        {"apiVersion": V1, "kind": "Light", "zones": [{"zoneId": 1, "inner": {"zoneId": 2}}]},
        {"apiVersion": V1, "kind": "Light", "zones": [{"zoneId": 1, "inner": {"zoneId": -2}}]},
        {"apiVersion": V1, "kind": "Light", "zones": [{"zone_id": 1}]},
        {"apiVersion": V1, "kind": "Light", "hertz": 5},
        {"apiVersion": V1, "kind": "Blink", "hertz": 5},
        {"apiVersion": V1, "kind": "Blink", "brightness": 5},
        {"apiVersion": V1, "kind": "Fade"},
        {"apiVersion": V1},
        {"apiVersion": ALPHA, "kind": "Light", "level": 0.1},
        {"apiVersion": ALPHA, "kind": "Light", "brightness": 1},
        {"apiVersion": "lamps.example.com/v2", "kind": "Light"},
        {"kind": "Light"},
    ],
    ids=str,
)
def test_a_schema_accepts_what_the_driver_accepts(config):
    versions = Lamp.parameter_versions
    device = AllocatedDevice(name="a", pool="", request="a", configs=(config,))
    try:
        with_parameters(device, Light, driver=Lamp.name, index=0, versions=versions)
        accepted = True
    except BadParametersError:
        accepted = False
    schema = schemas_of(Light, versions).get(config.get("apiVersion", ""))
    assert (schema is not None and JsonSchema(schema).problems(config) == []) is accepted
    if schema is not None:
        assert jsonschema.Draft202012Validator(schema).is_valid(config) is accepted


def printed(capsys, *arguments: str) -> tuple[int, Any, str]:
    code = main(["schema", *arguments])
    out, error = capsys.readouterr()
    return code, yaml.safe_load(out), error


def test_the_output_is_a_device_driver_with_a_schema_for_each_version(capsys):
    code, body, error = printed(capsys, f"{__name__}:Lamp")
    assert (code, error) == (0, "")
    assert (body["apiVersion"], body["kind"]) == (crds.API_VERSION, "DeviceDriver")
    assert body["metadata"] == {"name": "lamps.example.com"}
    assert list(body["spec"]["parameters"]) == [V1, ALPHA, ""]


@pytest.mark.parametrize(
    ("kind", "name"), [("Plain", "plain.example.com"), ("Renamed", "renamed.example.com")]
)
def test_a_driver_without_parameters_has_a_schema_that_accepts_none(capsys, kind, name):
    """Only a driver whose name depends on its configuration needs one."""
    code, body, _ = printed(capsys, f"{__name__}:{kind}")
    assert (code, body["metadata"]["name"]) == (0, name)
    problems = JsonSchema(body["spec"]["parameters"][""]).problems({"a": 1})
    assert problems == ["a: is not a known key", "known keys: none"]


@pytest.mark.parametrize(
    ("name", "code", "sentence"),
    [
        pytest.param("Untyped", 1, "has no parameters_type", id="no-type"),
        pytest.param("Missing", 2, "cannot be loaded", id="no-class"),
    ],
)
def test_what_has_no_schema_is_an_error(capsys, name, code, sentence):
    found, body, error = printed(capsys, f"{__name__}:{name}")
    assert (found, body) == (code, None)
    assert sentence in error


class Announces(pb_grpc.BackendServicer):
    """A backend with schemas."""

    def __init__(self, schemas: dict[str, str]) -> None:
        self.schemas = schemas

    def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(driver_name="go.example.com", parameter_schemas=self.schemas)


@contextmanager
def backend(folder: Path, schemas: dict[str, str]) -> Iterator[str]:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        pb_grpc.add_BackendServicer_to_server(Announces(schemas), server)
        server.add_insecure_port(f"unix:{folder}/go.sock")
        server.start()
        try:
            yield f"unix:{folder}/go.sock"
        finally:
            server.stop(None).wait()


def test_a_backend_announces_its_schemas(capsys, tmp_path):
    with backend(tmp_path, {V1: json.dumps(LAMP), "": "{}"}) as target:
        code, body, error = printed(capsys, target)
    assert (code, error) == (0, "")
    assert body["metadata"] == {"name": "go.example.com"}
    assert body["spec"] == {"parameters": {"": {}, V1: LAMP}}


LAMP = {"type": "object", "properties": {"brightness": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schemas", "sentence"),
    [
        pytest.param({}, "announces no schemas", id="none"),
        pytest.param({V1: "{"}, "announces a schema that is not JSON", id="no-json"),
        pytest.param(
            {V1: '{"type": 5}'}, f"spec.parameters['{V1}']: type: fits none", id="malformed"
        ),
    ],
)
def test_a_backend_without_usable_schemas_is_an_error(capsys, tmp_path, schemas, sentence):
    with backend(tmp_path, schemas) as target:
        code, body, error = printed(capsys, target)
    assert (code, body) == (1, None)
    assert sentence in error


def test_a_backend_that_does_not_run_is_an_error(capsys, tmp_path):
    code, _, error = printed(capsys, f"unix:{tmp_path}/none.sock")
    assert code == 1
    assert f"the backend at {tmp_path}/none.sock does not respond to GetInfo" in error
