"""
The example backend: its program, and the image of `examples/backend/Dockerfile`.

The Dockerfile pulls public images, which a local cluster cannot do. This image contains the same
single file.
"""

from __future__ import annotations

from pathlib import Path

from e2e.archive import write_image
from e2e.images.cache import REPOSITORY, digest, kept
from e2e.images.go import go_program

__all__ = ("IMAGE", "backend_binary", "backend_image")

IMAGE = "localhost/drakit-blinkers:dev"
"""The name of the example backend's image in a cluster."""

SOURCES = REPOSITORY / "examples" / "backend"


def backend_binary() -> Path:
    """
    Return the example backend's program. Builds it if it is not in the cache.

    :raises ImageError: Go is missing, or the sources are invalid.
    """
    return go_program(SOURCES, name="blinkers", imported=[REPOSITORY / "proto" / "go"])


def backend_image() -> Path:
    """Return the archive of the example backend's image. Builds it if it is not in the cache."""
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
