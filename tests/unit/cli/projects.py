"""Projects of `drakit new`: writing, installing and reading them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from drakit_cli.main import main
from drakit_cli.new import MAX_NAME
from drakit_formats import crds

DEVICE_DRIVER = f"{crds.API_VERSION}/DeviceDriver"
"""An API version and kind that a cluster with drakit's definitions has, for Helm."""

LONGEST = "rack-" * (MAX_NAME // 5 - 1) + "lamps"

PROJECTS = [
    pytest.param([], id="lamps"),
    pytest.param(["--name", "x"], id="the-shortest-name"),
    pytest.param(
        ["--name", LONGEST, "--driver", "a" * 51 + ".example.com"], id="the-longest-names"
    ),
    pytest.param(
        ["--name", "driver", "--image", "localhost:5000/a/b_c"], id="a-name-of-drakits-types"
    ),
]
"""Arguments of `drakit new`; names that are long or short break lines elsewhere."""

CONTAINERS = [
    pytest.param(["--container"], id="in-a-container"),
    pytest.param(
        ["--name", LONGEST, "--driver", "a" * 51 + ".example.com", "--container"],
        id="the-longest-names-in-a-container",
    ),
]
"""Arguments for projects whose driver runs in a container of its own."""


def write(folder: Path, *arguments: str) -> Path:
    """Write a project into a folder, which is made."""
    given = ["lamps", *arguments]
    if "--name" in arguments:
        given = [arguments[1], *arguments[2:]]
    assert main(["new", *given, "--directory", str(folder)]) == 0
    return folder


def run(project: Path, *argv: str, status: int = 0, **env: str) -> str:
    """Run a module of this environment in a project; give its output."""
    done = subprocess.run(
        [sys.executable, "-B", "-m", *argv],
        cwd=project,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def installed(project: Path) -> Path:
    """Install the project where its Dockerfile expects it, as its README says."""
    target = project / "build" / "driver"
    if not target.exists():
        assert "drakit package" in commands(readme(project))
        # Without an index: the build backend is the one of this environment.
        run(project, "drakit_cli.main", "package", PIP_NO_BUILD_ISOLATION="0", PIP_NO_INDEX="1")
        assert not list(target.rglob("*.pyc"))
    return target


def readme(project: Path) -> str:
    return (project / "README.md").read_text()


def commands(text: str) -> list[str]:
    """The commands of a README, those of several lines in one."""
    lines = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S))
    return re.sub(r" *\\\n *", " ", lines).splitlines()


def values_of(project: Path) -> dict[str, Any]:
    return yaml.safe_load((project / "values.yaml").read_text())


def files_of(project: Path) -> set[str]:
    return {str(p.relative_to(project)) for p in project.rglob("*") if p.is_file()}
