"""
``drakit schema``: prints the schemas of a driver's parameters, as a DeviceDriver.

For a Python driver, the command imports the class, but does not start the driver. For a backend, it
requests the schemas from the running backend. Does not depend on a cluster.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any, cast

import yaml

from drakit.driver import Driver
from drakit.settings import SettingsError, read_file
from drakit_cli.answers import CommandError, UsageError
from drakit_driver.runtime.loading import driver_class, load_driver
from drakit_driver.runtime.parameters import schemas_of
from drakit_explain.parameters import schemas_of as schemas_of_manifest
from drakit_formats import crds

if TYPE_CHECKING:
    from drakit import Node


INFO_SECONDS = 5.0
"""The node plugin's timeout for GetInfo."""


def schema(options: argparse.Namespace) -> int:
    """Print the manifest."""
    path = options.driver.removeprefix("unix:")
    name, parameters = _of_class(options) if path == options.driver else _announced(path)
    manifest = {
        "apiVersion": crds.API_VERSION,
        "kind": "DeviceDriver",
        "metadata": {"name": name},
        "spec": {"parameters": parameters},
    }
    if problems := schemas_of_manifest(manifest).problems:
        raise CommandError(f"driver {name} has malformed schemas: {'; '.join(problems)}")
    print(yaml.dump(manifest, Dumper=_Dumper, sort_keys=False), end="")
    return 0


def _announced(path: str) -> tuple[str, dict[str, Any]]:
    """Return the driver name and the schemas that a running backend reports."""
    import grpc

    from drakit_proto.backend.v1 import backend_pb2 as pb
    from drakit_proto.backend.v1 import backend_pb2_grpc as pb_grpc

    try:
        with grpc.insecure_channel(f"unix:{path}") as channel:
            stub = pb_grpc.BackendStub(channel)
            info = stub.GetInfo(pb.GetInfoRequest(), timeout=INFO_SECONDS)
    except grpc.RpcError as error:
        reason = cast("grpc.Call", error).details()
        raise CommandError(
            f"the backend at {path} does not respond to GetInfo: {reason}"
        ) from error
    if not info.parameter_schemas:
        raise CommandError(
            f"driver {info.driver_name} announces no schemas: set parameter_schemas in its "
            "response to GetInfo"
        )
    try:
        schemas = {key: json.loads(each) for key, each in sorted(info.parameter_schemas.items())}
    except ValueError as error:
        raise CommandError(
            f"driver {info.driver_name} announces a schema that is not JSON: {error}"
        ) from error
    return info.driver_name, schemas


def _of_class(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    try:
        kind = driver_class(options.driver, where="drakit schema")
        name = kind.name
        if kind.name_of.__func__ is not Driver.name_of.__func__:
            values = {} if options.driver_config is None else read_file(options.driver_config)
            name = load_driver(
                options.driver,
                values,
                node=cast("Node", None),  # only needed to start a driver
                where="drakit schema",
                file=str(options.driver_config or "the default configuration"),
            ).name
    except SettingsError as error:
        raise UsageError(str(error)) from error
    if kind.parameters_type is None:
        raise CommandError(
            f"driver {name} has no parameters_type, so that its parameters have no schema: "
            "set it, or set drakit.NoParameters if the driver accepts no parameters"
        )
    return name, schemas_of(kind.parameters_type, tuple(kind.parameter_versions))


class _Dumper(yaml.SafeDumper):
    """Writes an empty key in the same form as other keys."""

    def check_simple_key(self) -> bool:
        return isinstance(self.event, yaml.ScalarEvent) or super().check_simple_key()
