"""
``drakit schema``: prints the schemas of a Python driver's parameters, as a DeviceDriver.

The driver's class is imported, and not started. Does not depend on a cluster.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, cast

import yaml

from drakit.settings import SettingsError, read_file
from drakit_cli.answers import CommandError, UsageError
from drakit_driver.runtime.loading import load_driver
from drakit_driver.runtime.parameters import schemas_of
from drakit_formats import crds

if TYPE_CHECKING:
    from drakit import Node


def schema(options: argparse.Namespace) -> int:
    """Print the manifest."""
    try:
        values = {} if options.driver_config is None else read_file(options.driver_config)
        driver = load_driver(
            options.driver,
            values,
            node=cast("Node", None),  # only a driver that starts needs it
            where="drakit schema",
            file=str(options.driver_config or "the default configuration"),
        )
    except SettingsError as error:
        raise UsageError(str(error)) from error
    kind = driver.traits.parameters_type
    if kind is None:
        raise CommandError(
            f"driver {driver.name} has no parameters_type, so that its parameters have no schema: "
            "set it, or set drakit.NoParameters if the driver accepts no parameters"
        )
    manifest = {
        "apiVersion": crds.API_VERSION,
        "kind": "DeviceDriver",
        "metadata": {"name": driver.name},
        "spec": {"parameters": schemas_of(kind, driver.traits.parameter_versions)},
    }
    print(yaml.dump(manifest, Dumper=_Dumper, sort_keys=False), end="")
    return 0


class _Dumper(yaml.SafeDumper):
    """Writes an empty key as any other."""

    def check_simple_key(self) -> bool:
        return isinstance(self.event, yaml.ScalarEvent) or super().check_simple_key()
