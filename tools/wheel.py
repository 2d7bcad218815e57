"""
`make wheel`: a wheel for the platform of this machine, with the programs `drakit-cel-MINOR`.

The programs are Kubernetes' CEL compiler and allocator, one for each minor release. `kubectl
drakit` finds them next to its own modules. Without the hook, hatchling builds a wheel for all
platforms that contains no programs.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

REPOSITORY = Path(__file__).resolve().parents[1]

PROGRAMS = "DRAKIT_PROGRAMS"
"""The environment variable with the folder of the programs, for the hook."""

MACHINE = "DRAKIT_MACHINE"
"""The environment variable with the processor of the programs in Python's terms, for the hook."""

PLACE = "drakit_explain/cel/programs"

TAG = "py3-none-manylinux_2_17_{machine}.musllinux_1_1_{machine}"
"""The programs are linked statically, so they need no C library."""


class Hook(BuildHookInterface[Any]):
    """Adds the programs to a wheel; hatchling loads this class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        for program in sorted(Path(os.environ[PROGRAMS]).iterdir()):
            build_data["force_include"][str(program)] = f"{PLACE}/{program.name}"
        build_data["pure_python"] = False
        build_data["tag"] = TAG.format(machine=os.environ[MACHINE])


def build(programs: Path, folder: Path, *, machine: str = "") -> Path:
    """
    Build the wheel of this clone with the programs of a folder. Equal inputs result in equal
    wheels.

    :param machine: the processor of the programs, such as aarch64. By default, this machine's.
    :raises ImageError: hatchling fails.
    """
    machine = machine or platform.machine()
    hatchling(
        "wheel",
        folder,
        env={
            "HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true",
            PROGRAMS: str(programs),
            MACHINE: machine,
        },
    )
    found = folder.glob(f"drakit-*linux*_{machine}.whl")
    return max(found, key=lambda each: each.stat().st_mtime)


def hatchling(kind: str, folder: Path, *, env: Mapping[str, str] | None = None) -> None:
    """
    Build a wheel or an sdist of this clone. Equal inputs result in equal files.

    :raises ImageError: hatchling fails.
    """
    from e2e.images.cache import run

    run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder],
        what=f"building the {kind} of drakit",
        timeout_seconds=120,
        cwd=REPOSITORY,
        env={
            "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", "1704067200"),
            **(env or {}),
        },
    )


def main() -> int:
    from e2e.images.cache import ImageError
    from e2e.images.go import cel_programs

    parser = argparse.ArgumentParser(prog="tools.wheel", description=(__doc__ or "").strip())
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "wheel")
    folder = parser.parse_args().folder.absolute()
    if platform.system() != "Linux":
        print("error: the programs are built for Linux; use `make krew` instead", file=sys.stderr)
        return 1
    try:
        wheel = build(cel_programs(), folder)
    except ImageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
