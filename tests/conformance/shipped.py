"""The targets of the conformance kit: shipped drivers, examples, listings of the docs, programs in
Go."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drakit.testing.conformance.programs import python_path
from drakit.testing.conformance.targets import (
    BackendTarget,
    DevicePluginTarget,
    PythonTarget,
    Target,
)
from e2e.images.backend import backend_binary
from e2e.images.deviceplugins import NODES, SAMPLE, device_plugin
from tests.fakes.terminals import plug_sensors
from tests.unit.docs.listings import ROOT, listing

__all__ = ("Tested", "modules", "targets")

PLUGGED = {
    "vendor.example/port": {
        "preStart": True,
        "devices": {
            "ttyX0": {"node": "/dev/null", "env": {"PORT": "0"}, "numa": 0},
            "/dev/tty_X1": {"node": "/dev/zero", "env": {"PORT": "1"}},
        },
    },
    "vendor.example/key": {"devices": {f"key-{i}": {"env": {f"KEY_{i}": "yes"}} for i in range(4)}},
}
"""The devices of our own device plugin, of two resources."""


def modules(folder: Path) -> Iterator[Path]:
    """Yield the directories of example and listing modules, which are not installed."""
    (folder / "lamp.py").write_text(listing("docs/vendors/driver-contract.md", "lamp.py"))
    yield folder
    yield ROOT / "examples" / "driver"
    yield ROOT / "e2e" / "example_gpus"
    yield ROOT / "examples" / "nvidia"
    yield ROOT / "examples" / "sensor"
    yield ROOT / "tests" / "fakes" / "nvml"


CONFIGURED = (
    "health",
    "prepare",
    "cdi-valid",
    "batch",
    "device-reuse",
    "devices-published",
    "stable-names",
    "stable-order",
    "dropped-fields",
    "restart-without-writes",
    "shares",
    "unprepare",
)
"""Rules that depend on the configuration. A second configuration of a driver is tested with these
only."""


@dataclass(frozen=True)
class Tested:
    """A target, with a name for the output."""

    name: str
    target: Target
    only: Sequence[str] = ()
    """The rules to run; all if empty."""

    chosen: bool = False
    """Whether a quick run uses it for its kind of driver."""


def targets() -> Iterator[Tested]:
    """Yield all targets, the slowest first."""
    yield Tested(
        "device plugin: Kubernetes' sample",
        DevicePluginTarget(
            line=f"exec {device_plugin(SAMPLE)}",
            entry={
                "resources": ["example.com/resource"],
                "mounts": {"/tmp/Dev-1": "rw", "/tmp/Dev-2": "rw"},
            },
        ),
    )
    yield Tested(
        "device plugin: two resources",
        DevicePluginTarget(
            line=f"exec {device_plugin(NODES)} {{root}}/plugged.json",
            entry={
                "resources": list(PLUGGED),
                "devices": ["/dev/null", "/dev/zero"],
                "env": ["PORT", "KEY_*"],
            },
            setup=lambda root: (root / "plugged.json").write_text(json.dumps(PLUGGED)),
        ),
        CONFIGURED,
        chosen=True,
    )
    yield Tested("simulated", _simulated(), chosen=True)
    yield Tested(
        "simulated: whole devices, CPUs one by one, lists",
        _simulated(
            gpu={"count": 3, "partitions": [], "pool": "gpus"},
            nic={"count": 2, "listAttributes": True},
            cpu={"count": 70, "grouping": "devices"},
        ),
        CONFIGURED,
    )
    yield Tested("hostdev", PythonTarget(reference="hostdev", values={"policies": _policies()}))
    yield Tested(
        "example driver: rotors",
        PythonTarget(
            reference="rotors:Rotors",
            values={"directory": "{root}/rotors"},
            parameters={"speed": 100},
            setup=_made("rotors/{}", "west", "east", "north", "south", folders=True),
            unplug=lambda root: shutil.rmtree(root / "rotors" / "north"),
        ),
    )
    yield Tested(
        "example driver in a process of its own: rotors",
        BackendTarget(
            # As in a container's image: the driver's module is found from anywhere.
            line=f"PYTHONPATH={shlex.quote(python_path())} exec {sys.executable} -m drakit_driver "
            "--driver rotors:Rotors --directory {directory} --config {root}/rotors.yaml "
            "--node-name node-1",
            entry={
                "driver": "rotors.example.com",
                "mounts": {"{root}/rotors": "rw"},
                "env": ["ROTOR_SPEED_*"],
            },
            parameters={"speed": 100},
            setup=_configured_rotors,
            unplug=lambda root: shutil.rmtree(root / "rotors" / "north"),
        ),
        chosen=True,
    )
    yield Tested(
        "example driver: sensors, which are pseudo-terminals",
        PythonTarget(
            reference="sensors:Sensors",
            values={"directory": "{root}/by-id", "state": "{root}/run/sensors"},
            setup=plug_sensors,
            unplug=lambda root: (root / "by-id" / "usb-Acme_Soil_S1-if00").unlink(),
        ),
    )
    yield Tested(
        "example driver: NVIDIA GPUs, with a fake NVML",
        PythonTarget(reference="many_gpus:Gpus", values={"timeSlices": 4}),
    )
    yield Tested(
        "GPUs with the parameters of another project",
        PythonTarget(
            reference="example_gpus:Gpus",
            values={"count": 3},
            parameters={
                "apiVersion": "gpu.resource.example.com/v1alpha1",
                "kind": "GpuConfig",
                "sharing": {"strategy": "TimeSlicing"},
            },
        ),
        (*CONFIGURED, "parameter-versions", "claim-metadata", "hostile-parameters", "reboot"),
    )
    yield Tested(
        "the driver of docs/vendors/driver-contract.md: lamps",
        PythonTarget(
            reference="lamp:Lamps",
            values={"directory": "{root}/lamps"},
            parameters={"brightness": 3},
            setup=_made("lamps/{}", "hall", "porch", "attic", "cellar"),
            unplug=lambda root: (root / "lamps" / "attic").unlink(),
        ),
    )
    yield Tested(
        "example backend: blinkers",
        BackendTarget(
            line=f"exec {backend_binary()} -socket {{directory}}/blinkers.sock "
            f"-blinkers {{root}}/blinkers -state {{root}}/run/blinkers -poll 100ms",
            entry={
                "driver": "blinkers.example.com",
                "mounts": {"{root}/blinkers": "rw"},
                "env": ["BLINKER_*"],
            },
            parameters={"color": "red"},
            setup=_made("blinkers/{}", "a", "b", "c", "d"),
            unplug=lambda root: (root / "blinkers" / "c").unlink(),
        ),
        chosen=True,
    )


def _simulated(**values: Mapping[str, object]) -> Target:
    return PythonTarget(
        reference="simulated", values={"controlFile": "{root}/control.json", **values}
    )


def _policies() -> dict[str, dict[str, object]]:
    """Return policies for devices that every Linux has, and that need no permissions."""
    return {
        "sinks": {"match": [{"subsystem": "mem", "paths": ["/dev/null", "/dev/full"]}]},
        "zeros": {
            "match": [{"subsystem": "mem", "paths": ["/dev/zero"]}],
            "sharing": {"mode": "Users", "users": 3},
        },
        "noise": {
            "match": [{"subsystem": "mem", "paths": ["/dev/*random"]}],
            "container": {"mode": "0444"},
        },
    }


def _configured_rotors(root: Path) -> None:
    (root / "rotors.yaml").write_text(f"directory: {root}/rotors\n")
    _made("rotors/{}", "west", "east", "north", "south", folders=True)(root)


def _made(where: str, *names: str, folders: bool = False) -> Callable[[Path], None]:
    """Return a setup function that creates files or folders."""

    def make(root: Path) -> None:
        for name in names:
            path = root / where.format(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if folders:
                path.mkdir(exist_ok=True)
            else:
                path.touch()

    return make
