"""
The build context of the Dockerfile: wheels of the pinned requirements, pip, and our own programs.

With this context, the build needs no network.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drakit_cli.package import wheel_options
from e2e.images.cache import REPOSITORY, ImageError, digest, kept, run
from e2e.images.cel import combined_programs
from e2e.images.go import CEL_MINORS, cel_programs

TARGETS = ("nodeplugin", "operator")
RELEASED = CEL_MINORS[:-1]
"""The minor releases of Kubernetes whose allocators the operator contains: those that are not
alpha."""

REQUIREMENTS = REPOSITORY / "requirements"
ROOT = Path(__file__).with_name("root.py")
EPOCH = os.environ.get("SOURCE_DATE_EPOCH", "1704067200")
"""The time of all files in wheels and images. It never changes, so that releases share layers."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """A build context, and its inputs."""

    folder: Path
    dependencies: dict[str, str]
    """Target -> a name for the wheels that are installed in its image in addition to ours."""

    drakit: str
    """A name for our own wheel."""

    root: str
    """A name for the program that collects the files of the images."""

    cel: str
    """A name for the operator's helper programs."""


def write_context(folder: Path, minors: Sequence[str] = RELEASED) -> Context:
    """
    Write the context to a folder that does not exist or is empty.

    :param minors: the releases of Kubernetes whose allocators the operator contains.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ImageError(f"{folder} is not empty: name a folder for the build context alone")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(REPOSITORY / "Dockerfile", folder)
    shutil.copy(ROOT, folder)
    (folder / "pip").mkdir()
    pip = wheels("image")
    for wheel in pip.glob("pip-*.whl"):
        shutil.copy(wheel, folder / "pip" / "pip.whl")
    dependencies: dict[str, str] = {}
    for target in TARGETS:
        own = wheels(target)
        shutil.copytree(own, folder / target)
        shutil.copy(REQUIREMENTS / f"{target}.txt", folder / target / "requirements.txt")
        dependencies[target] = digest(pip.name, own.name)
    helpers = cel_programs(minors) if len(minors) == 1 else combined_programs(minors)
    shutil.copytree(helpers, folder / "cel", symlinks=True)
    return Context(
        folder=folder,
        dependencies=dependencies,
        drakit=_own_wheel(folder / "drakit"),
        root=digest(ROOT),
        cel=helpers.name,
    )


def wheels(name: str, machine: str = "") -> Path:
    """
    Return the folder with the wheels of one requirements file, for the images' Python.

    :param machine: the processor, such as aarch64; by default that of this machine.
    """
    requirements = REQUIREMENTS / f"{name}.txt"
    options = wheel_options(machine or platform.machine())

    def download(folder: Path) -> None:
        run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder),
                *("--no-deps", "--require-hashes", *options),
                *("--requirement", requirements),
            ],
            what=f"downloading the wheels of {requirements.relative_to(REPOSITORY)}",
            timeout_seconds=900,
        )

    return kept("wheels", digest(requirements, *options), download, keep=9)


def _own_wheel(folder: Path) -> str:
    """Build the wheel of this clone. Equal sources produce equal bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch],
            what="building the wheel of drakit",
            timeout_seconds=120,
            cwd=REPOSITORY,
            env={"SOURCE_DATE_EPOCH": EPOCH},
        )
        (wheel,) = Path(scratch).glob("*.whl")
        folder.mkdir()
        shutil.copy(wheel, folder)
        return digest(wheel)
