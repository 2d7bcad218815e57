"""
Programs of the Go modules next to this file, built once into the cache.

Their versions are those of the modules' go.mod and go.sum.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from e2e.images.cache import digest, kept, run
from e2e.images.go import ENVIRONMENT, LINKED

FOLDER = Path(__file__).resolve().parent


def go_is_there() -> bool:
    """Return whether Go programs can be built here."""
    return shutil.which("go") is not None


def go_programs(module: str) -> Path:
    """
    Return the folder of a module's programs, and build them if they are not in the cache.

    :raises ImageError: Go is missing, or fails.
    """
    source = FOLDER / module
    version = run(["go", "-C", source, "env", "GOVERSION"], what="asking Go", timeout_seconds=60)

    def make(folder: Path) -> None:
        run(
            [
                "go",
                "-C",
                source,
                "build",
                LINKED,
                "-o",
                f"{folder}/",
                "tool",
            ],
            what=f"building the programs of tools/{module}",
            timeout_seconds=1200,
            env=ENVIRONMENT,
        )

    key = digest(version, source / "go.mod", source / "go.sum", Path(__file__))
    return kept("tools", f"{module}-{key}", make, keep=6)


def path_with(*folders: Path) -> str:
    """Return the PATH with these folders at its start."""
    return os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
