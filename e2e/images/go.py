"""
Programs in Go whose sources are part of this repository, built once into the cache.

It must not know what the programs do, nor who runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from e2e.images.cache import REPOSITORY, digest, kept, run

__all__ = ("CEL_SOURCES", "cel_program", "go_program")

CEL_SOURCES = REPOSITORY / "operator" / "cel"


def cel_program() -> Path:
    """Return the operator's helper that evaluates selectors; built if it is not in the cache."""
    return go_program(CEL_SOURCES, name="drakit-cel")


def go_program(sources: Path, *, name: str, imported: Sequence[Path] = ()) -> Path:
    """
    Return the program of a module in this repository; built if it is not in the cache.

    :param imported: other modules in this repository that it imports.
    :raises ImageError: Go is missing, or the sources are wrong.
    """
    version = run(
        ["go", "-C", sources, "env", "GOVERSION"], what="asking Go's version", timeout_seconds=60
    )
    names = sorted(
        path
        for module in (sources, *imported)
        for path in module.rglob("*")
        if path.name in ("go.mod", "go.sum")
        or (path.suffix == ".go" and not path.name.endswith("_test.go"))
    )
    parts = [part for path in names for part in (str(path.relative_to(REPOSITORY)), path)]

    def build(folder: Path) -> None:
        run(
            ["go", "build", "-trimpath", "-ldflags=-s -w", "-o", folder / name, "."],
            what=f"building {name}",
            timeout_seconds=600,
            cwd=sources,
            env={"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"},
        )

    return kept("backends", digest(name, version, Path(__file__), *parts), build, keep=9) / name
