"""What is tested: drivers that ship, examples, listings of the docs, programs in Go."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drakit.testing.conformance.targets import (
    BackendTarget,
    DevicePluginTarget,
    PythonTarget,
    Target,
)
from e2e.images.backend import backend_binary
from e2e.images.deviceplugins import NODES, SAMPLE, device_plugin
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
"""What our own device plugin has, of two resources."""


def modules(folder: Path) -> Iterator[Path]:
    """Give directories with the modules of examples and listings, which are not installed."""
    (folder / "lamp.py").write_text(listing("docs/vendors/driver-contract.md", "lamp.py"))
    yield folder
    yield ROOT / "examples" / "driver"


CONFIGURED = (
    "health",
    "prepare",
    "cdi-valid",
    "together",
    "device-again",
    "devices-published",
    "names-stay",
    "quiet-restart",
    "shares",
    "unprepare",
)
"""Rules about what depends on a configuration: a second one of a driver is held to these alone."""


@dataclass(frozen=True)
class Tested:
    """A target, with a name for the output."""

    name: str
    target: Target
    only: Sequence[str] = ()
    """Rules, if it is not all."""

    chosen: bool = False
    """Whether it stands for its kind of driver where there is little time."""


def targets() -> Iterator[Tested]:
    """Give all that is tested, first what waits most."""
    yield Tested(
        "device plugin: Kubernetes' sample",
        DevicePluginTarget(line=f"exec {device_plugin(SAMPLE)}"),
    )
    yield Tested(
        "device plugin: two resources",
        DevicePluginTarget(
            line=f"exec {device_plugin(NODES)} {{root}}/plugged.json",
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
        ),
    )
    yield Tested(
        "the driver of docs/vendors/driver-contract.md: lamps",
        PythonTarget(
            reference="lamp:Lamps",
            values={"directory": "{root}/lamps"},
            parameters={"brightness": 3},
            setup=_made("lamps/{}", "hall", "porch", "attic", "cellar"),
        ),
    )
    yield Tested(
        "example backend: blinkers",
        BackendTarget(
            line=f"exec {backend_binary()} -socket {{directory}}/blinkers.sock "
            f"-blinkers {{root}}/blinkers -state {{root}}/run/blinkers -poll 100ms",
            parameters={"colour": "red"},
            setup=_made("blinkers/{}", "a", "b", "c", "d"),
        ),
        chosen=True,
    )


def _simulated(**values: Mapping[str, object]) -> Target:
    return PythonTarget(
        reference="simulated", values={"controlFile": "{root}/control.json", **values}
    )


def _policies() -> dict[str, dict[str, object]]:
    """Devices that every Linux has, and that nobody needs a right for."""
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


def _made(where: str, *names: str, folders: bool = False) -> Callable[[Path], None]:
    """Give a set-up that makes files, or folders."""

    def make(root: Path) -> None:
        for name in names:
            path = root / where.format(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if folders:
                path.mkdir(exist_ok=True)
            else:
                path.touch()

    return make
