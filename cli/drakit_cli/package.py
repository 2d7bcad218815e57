"""
``drakit package``: collects a driver's package and its dependencies to add to the node plugin's
image.

The image contains neither pip nor a compiler, and its Python can differ from the one that runs this
command. Does not depend on the program that builds the image.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.metadata import Distribution, distributions, version
from pathlib import Path

from drakit_cli.answers import CommandError, UsageError

PYTHON_VERSION = "3.13"
"""The Python version in the images."""

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""The CPU architectures of the images, keyed by their names in Kubernetes."""


def package(options: argparse.Namespace) -> int:
    """Replace `build/driver` in a folder with the package and its dependencies, and print them."""
    folder: Path = options.folder
    if not (folder / "pyproject.toml").is_file():
        raise UsageError(f"{folder} has no pyproject.toml; name the folder of the driver's package")
    machine = MACHINES.get(options.architecture or platform.machine(), platform.machine())
    output = folder / "build" / "driver"
    output.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".driver-") as scratch:
        target = Path(scratch, "target")
        packages = _installed(folder, target, machine=machine, scratch=Path(scratch))
        if output.is_dir():
            shutil.rmtree(output)
        target.rename(output)
    print(f"{output}: {packages}; for Python {PYTHON_VERSION} on {machine}")
    return 0


def _installed(folder: Path, target: Path, *, machine: str, scratch: Path) -> str:
    """Install a package for the image. Return the names and versions of the packages."""
    pinned = _pinned()
    constraints = scratch / "constraints.txt"
    lines = (f"{name}=={version}\n" for name, version in pinned.items())
    constraints.write_text("".join(lines), encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--no-compile", "--progress-bar=off"),
            *("--disable-pip-version-check", "--target", str(target)),
            *wheel_options(machine),
            *("--constraint", str(constraints), str(folder)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CommandError(
            f"{done.stdout.strip()}\n"
            f"pip cannot install {folder} for the image: each dependency needs a wheel for Python "
            f"{PYTHON_VERSION} on {machine}, and must accept the versions of the image's packages"
        )
    names: list[str] = []
    for each in distributions(path=[str(target)]):
        if (name := _normalized(each.name)) in pinned:
            # This copy would hide the image's copy, even after an update of the image.
            _remove(each, target)
        else:
            names.append(f"{name} {each.version}")
    if wrong := foreign_modules(target, machine=machine):
        raise CommandError(
            f"{wrong[0].relative_to(target)} is not for Python {PYTHON_VERSION} on {machine}; run "
            f"this command with that Python, because the image has no compiler"
        )
    return ", ".join(sorted(names))


def wheel_options(machine: str) -> Sequence[str]:
    """Return the pip options that select wheels for the images' Python version and the given CPU
    architecture."""
    # The images have glibc 2.36 or newer.
    # A vendor's own wheels may have the platform `linux`.
    platforms = ["any", f"linux_{machine}", f"manylinux2014_{machine}"]
    platforms += [f"manylinux_2_{minor}_{machine}" for minor in range(17, 37)]
    return [
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={PYTHON_VERSION}",
        f"--abi=cp{PYTHON_VERSION.replace('.', '')}",
        "--abi=abi3",
        "--abi=none",
        *(f"--platform={name}" for name in platforms),
    ]


def foreign_modules(folder: Path, *, machine: str) -> list[Path]:
    """Return the compiled modules in a folder that the images' Python cannot import, because they
    are for another Python version or CPU architecture."""
    own = f"cpython-{PYTHON_VERSION.replace('.', '')}-{machine}-"
    return [
        path
        for path in sorted(folder.rglob("*.so"))
        if (tag := re.fullmatch(r".+\.(cpython-\d+\w*-\w+-.+)\.so", path.name))
        and not tag[1].startswith(own)
    ]


def _pinned() -> Mapping[str, str]:
    """Return the versions of the packages in the image, keyed by their normalized names."""
    packaged = resources.files("drakit_cli") / "nodeplugin.txt"
    if not packaged.is_file():
        packaged = Path(__file__).parents[2] / "requirements/nodeplugin.txt"
    text = packaged.read_text(encoding="utf-8")
    found = re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.M)
    return {"drakit": version("drakit"), **{_normalized(name): each for name, each in found}}


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _remove(distribution: Distribution, target: Path) -> None:
    """Remove the files of a package, and the folders that become empty."""
    for file in distribution.files or ():
        path = target / file
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == target or any(parent.iterdir()):
                break
            parent.rmdir()
