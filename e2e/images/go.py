"""
Programs in Go whose sources are part of this repository, built once into the cache.

It must not know what the programs do, nor who runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from e2e.images.cache import REPOSITORY, digest, kept, run

__all__ = (
    "CEL_DEFAULT",
    "CEL_MINORS",
    "CEL_SOURCES",
    "SCHEDULER_MINORS",
    "cel_flags",
    "cel_program",
    "cel_programs",
    "go_program",
    "metadata_reader",
    "scheduler_program",
)

CEL_SOURCES = REPOSITORY / "operator" / "cel"

CEL_DEFAULT = "1.36"
"""The minor release that the helper's `go.mod` is for; another one has its `go-MINOR.mod`."""

CEL_MINORS = ("1.34", "1.35", "1.36", "1.37")
"""The minor releases of Kubernetes that the explainer's helper is built for, the newest last."""

FLAGS = ("-trimpath", "-ldflags=-s -w")
ENVIRONMENT = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"}
"""`make check-go` has the same: with others, Go compiles all packages once more."""

SCHEDULER_MINORS = ("1.35", "1.36", "1.37")
"""The minor releases of Kubernetes whose scheduler is built, for tests only."""

BUILD_SECONDS = 3600
"""The first build of a minor release compiles up to 440 packages, a scheduler about 1,100."""


def cel_programs() -> Path:
    """
    Return the folder with the explainer's helper for each minor release, named as the explainer
    looks for them; built if it is not in the cache.

    :raises ImageError: Go is missing, or the sources are wrong.
    """

    def build(folder: Path) -> None:
        for minor in CEL_MINORS:
            _build(CEL_SOURCES, folder / f"drakit-cel-{minor}", cel_flags(minor))

    return kept("backends", _key("drakit-cel", CEL_SOURCES), build, keep=16)


def cel_program(minor: str = CEL_DEFAULT) -> Path:
    """Return the helper for a minor release; see `cel_programs`."""
    return cel_programs() / f"drakit-cel-{minor}"


def cel_flags(minor: str) -> tuple[str, ...]:
    """Return the flags of Go that select a minor release of the helper."""
    if minor == CEL_DEFAULT:
        return ()
    return (f"-modfile=go-{minor}.mod", f"-tags=kubernetes{minor}")


def scheduler_program(minor: str) -> Path:
    """Return the scheduler of a minor release as a program that answers questions."""
    module = "go.mod" if minor == SCHEDULER_MINORS[-1] else f"go-{minor}.mod"
    return go_program(
        REPOSITORY / "tests" / "oracle" / "scheduler",
        name=f"drakit-scheduler-{minor}",
        flags=(f"-modfile={module}", f"-tags=kubernetes{minor}"),
    )


def metadata_reader() -> Path:
    """Return the program that reads metadata files with Kubernetes' own package."""
    return go_program(REPOSITORY / "e2e" / "metadata", name="read-metadata")


def go_program(
    sources: Path, *, name: str, imported: Sequence[Path] = (), flags: Sequence[str] = ()
) -> Path:
    """
    Return the program of a module in this repository; built if it is not in the cache.

    :param imported: other modules in this repository that it imports.
    :raises ImageError: Go is missing, or the sources are wrong.
    """
    key = _key(name, sources, *imported)
    return (
        kept("backends", key, lambda folder: _build(sources, folder / name, flags), keep=16) / name
    )


def _key(name: str, *modules: Path) -> str:
    """A name for what is built from the sources of modules."""
    version = run(
        ["go", "-C", modules[0], "env", "GOVERSION"], what="asking Go's version", timeout_seconds=60
    )
    names = sorted(
        path
        for module in modules
        for path in module.rglob("*")
        if path.suffix in (".mod", ".sum")
        or (path.suffix == ".go" and not path.name.endswith("_test.go"))
    )
    parts = [part for path in names for part in (str(path.relative_to(REPOSITORY)), path)]
    return digest(name, version, Path(__file__), *parts)


def _build(sources: Path, program: Path, flags: Sequence[str] = ()) -> None:
    run(
        ["go", "build", *FLAGS, *flags, "-o", program, "."],
        what=f"building {program.name}",
        timeout_seconds=BUILD_SECONDS,
        cwd=sources,
        env=ENVIRONMENT,
    )
