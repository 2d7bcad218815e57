"""Programs in Go whose sources are part of this repository, built once into the cache."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2e.images.cache import REPOSITORY, digest, kept, run

__all__ = (
    "CEL_DEFAULT",
    "CEL_MINORS",
    "CEL_SOURCES",
    "ENVIRONMENT",
    "LINKED",
    "SCHEDULER_MINORS",
    "cel_flags",
    "cel_program",
    "cel_programs",
    "go_program",
    "metadata_reader",
    "scheduler_program",
)

CEL_SOURCES = REPOSITORY / "operator" / "cel"

DEFAULT_MINOR = "1.37"
"""The newest stable minor release of Kubernetes, which clusters run by default."""

CEL_DEFAULT = "1.36"
"""The minor release of the helper's `go.mod`. Other releases have a `go-MINOR.mod`."""

CEL_MINORS = ("1.34", "1.35", "1.36", "1.37", "1.38")
"""The minor releases of Kubernetes for which the explainer's helper is built, newest last."""

LINKED = "-ldflags=-s -w"
ENVIRONMENT = {
    "CGO_ENABLED": "0",
    "GOFLAGS": "-mod=readonly -buildvcs=false -trimpath -gcflags=all=-dwarf=false",
    "GOGC": "400",
}
"""The environment for building all Go programs, because with other flags, Go compiles all packages
again. A build without debug data and with less garbage collection takes 18 to 30 % less CPU time,
depending on the packages. The Makefile has the same settings."""

SCHEDULER_MINORS = ("1.35", "1.36", "1.37")
"""The minor releases of Kubernetes whose scheduler is built, only for tests."""

KEPT = 64
"""Number of programs in the cache: thirteen, and five for each platform of a release."""

BUILD_SECONDS = 3600
"""The first build of a minor release compiles up to 440 packages, a scheduler about 1,100."""


def cel_programs(minors: Sequence[str] = CEL_MINORS, *, platform: str = "") -> Path:
    """Return a folder with the explainer's helper for each of these minor releases, with the names
    that the explainer expects (see `cel_program`)."""
    programs = [cel_program(minor, platform=platform) for minor in minors]

    def link(folder: Path) -> None:
        for program in programs:
            os.link(program, folder / program.name)

    key = digest("drakit-cel", *(program.parent.name for program in programs))
    return kept("backends", key, link, keep=KEPT)


def cel_program(minor: str = DEFAULT_MINOR, *, platform: str = "") -> Path:
    """
    Return the explainer's helper for a minor release. Builds it if it is not in the cache.

    :param platform: such as linux/arm64; by default that of this machine.
    :raises ImageError: Go is missing, or the sources are invalid.
    """
    name = f"drakit-cel-{minor}"
    return go_program(CEL_SOURCES, name=name, flags=cel_flags(minor), platform=platform)


def cel_flags(minor: str) -> tuple[str, ...]:
    """Return Go's flags for a minor release of the helper."""
    if minor == CEL_DEFAULT:
        return ()
    return (f"-modfile=go-{minor}.mod", f"-tags=kubernetes{minor}")


def scheduler_program(minor: str) -> Path:
    """Return the scheduler of a minor release as a program that evaluates requests."""
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
    sources: Path,
    *,
    name: str,
    imported: Sequence[Path] = (),
    flags: Sequence[str] = (),
    platform: str = "",
) -> Path:
    """
    Return the program of a module in this repository. Builds it if it is not in the cache.

    :param imported: other modules in this repository that it imports.
    :param platform: such as linux/arm64; by default that of this machine.
    :raises ImageError: Go is missing, or the sources are invalid.
    """
    native = run(
        ["go", "env", "GOHOSTOS", "GOHOSTARCH"], what="asking Go's platform", timeout_seconds=60
    ).split()
    target = platform.split("/") if platform else native
    key = _key(name if target == native else f"{name} {platform}", sources, *imported)

    def build(folder: Path) -> None:
        _build(sources, folder / name, flags, {"GOOS": target[0], "GOARCH": target[1]})

    return kept("backends", key, build, keep=KEPT) / name


def _key(name: str, *modules: Path) -> str:
    """Return a name for the result of building modules."""
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


def _build(sources: Path, program: Path, flags: Sequence[str], target: Mapping[str, str]) -> None:
    run(
        ["go", "build", LINKED, *flags, "-o", program, "."],
        what=f"building {program.name}",
        timeout_seconds=BUILD_SECONDS,
        cwd=sources,
        env={**ENVIRONMENT, **target},
    )
