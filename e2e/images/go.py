"""
Programs in Go whose sources are part of this repository, built once into the cache.

It must not know what the programs do, nor who runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from e2e.images.cache import REPOSITORY, digest, kept, run

__all__ = (
    "CEL_MINORS",
    "CEL_SOURCES",
    "SCHEDULER_MINORS",
    "cel_program",
    "cel_release",
    "go_program",
    "scheduler_program",
)

CEL_SOURCES = REPOSITORY / "operator" / "cel"

CEL_MINORS = ("1.34", "1.35", "1.36", "1.37")
"""The minor releases of Kubernetes that the operator's helper is built for."""

SCHEDULER_MINORS = ("1.35", "1.36", "1.37")
"""The minor releases of Kubernetes whose scheduler is built, for tests only."""

BUILD_SECONDS = 3600
"""The first build for a minor release compiles about 700 packages, a scheduler about 1,000."""


def cel_program() -> Path:
    """Return the operator's helper that evaluates selectors; built if it is not in the cache."""
    return go_program(CEL_SOURCES, name="drakit-cel")


def cel_release(minor: str) -> Path:
    """Return the operator's helper with the compiler and allocator of a minor release."""
    flags = (f"-modfile=go-{minor}.mod", f"-tags=kubernetes{minor}")
    return go_program(CEL_SOURCES, name=f"drakit-cel-{minor}", flags=flags)


def scheduler_program(minor: str) -> Path:
    """Return the scheduler of a minor release as a program that answers questions."""
    module = "go.mod" if minor == SCHEDULER_MINORS[-1] else f"go-{minor}.mod"
    return go_program(
        REPOSITORY / "tests" / "oracle" / "scheduler",
        name=f"drakit-scheduler-{minor}",
        flags=(f"-modfile={module}", f"-tags=kubernetes{minor}"),
    )


def go_program(
    sources: Path, *, name: str, imported: Sequence[Path] = (), flags: Sequence[str] = ()
) -> Path:
    """
    Return the program of a module in this repository; built if it is not in the cache.

    :param imported: other modules in this repository that it imports.
    :param flags: more flags of ``go build``.
    :raises ImageError: Go is missing, or the sources are wrong.
    """
    version = run(
        ["go", "-C", sources, "env", "GOVERSION"], what="asking Go's version", timeout_seconds=60
    )
    names = sorted(
        path
        for module in (sources, *imported)
        for path in module.rglob("*")
        if path.suffix in (".mod", ".sum")
        or (path.suffix == ".go" and not path.name.endswith("_test.go"))
    )
    parts = [part for path in names for part in (str(path.relative_to(REPOSITORY)), path)]

    def build(folder: Path) -> None:
        run(
            ["go", "build", "-trimpath", "-ldflags=-s -w", *flags, "-o", folder / name, "."],
            what=f"building {name}",
            timeout_seconds=BUILD_SECONDS,
            cwd=sources,
            env={"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"},
        )

    key = digest(name, version, *flags, Path(__file__), *parts)
    return kept("backends", key, build, keep=16) / name
