"""
The example backend: its program, and the image of `examples/backend/Dockerfile`.

The Dockerfile pulls public images, which a local cluster cannot; the image here has the same one
file. It must not know what the backend does, nor who runs it.
"""

from __future__ import annotations

from pathlib import Path

from e2e.archive import write_image
from e2e.images.cache import REPOSITORY, digest, kept, run

__all__ = ("IMAGE", "backend_binary", "backend_image")

IMAGE = "localhost/drakit-blinkers:dev"
"""The name under which a cluster knows the example backend's image."""

SOURCES = REPOSITORY / "examples" / "backend"


def backend_binary() -> Path:
    """
    Return the example backend's program; built if it is not in the cache.

    :raises ImageError: Go is missing, or the sources are wrong.
    """
    version = run(
        ["go", "-C", SOURCES, "env", "GOVERSION"], what="asking Go's version", timeout_seconds=60
    )
    names = sorted(
        path
        for path in SOURCES.rglob("*")
        if path.name in ("go.mod", "go.sum")
        or (path.suffix == ".go" and not path.name.endswith("_test.go"))
    )
    parts = [part for path in names for part in (str(path.relative_to(SOURCES)), path)]
    return kept("backends", digest(version, Path(__file__), *parts), _build, keep=6) / "blinkers"


def _build(folder: Path) -> None:
    run(
        ["go", "build", "-trimpath", "-ldflags=-s -w", "-o", folder / "blinkers", "."],
        what="building the example backend",
        timeout_seconds=600,
        cwd=SOURCES,
        env={"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"},
    )


def backend_image() -> Path:
    """Return the archive of the example backend's image; built if it is not in the cache."""
    program = backend_binary()

    def make(folder: Path) -> None:
        write_image(
            folder / "blinkers.tar",
            name=IMAGE,
            files={"blinkers": (program, 0o755)},
            entrypoint=("/blinkers",),
        )

    key = digest(IMAGE, program.parent.name, Path(__file__), REPOSITORY / "e2e" / "archive.py")
    return kept("images", f"blinkers-{key}", make, keep=6) / "blinkers.tar"
