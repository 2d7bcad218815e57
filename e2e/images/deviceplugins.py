"""
Device plugins for tests, built from their Go modules, and one image that contains them all.

Kubernetes' sample device plugin is built unmodified; `e2e/deviceplugins/nodes` is our own, based on
Kubernetes' stub.
"""

from __future__ import annotations

from pathlib import Path

from e2e.archive import write_image
from e2e.images.cache import REPOSITORY, digest, kept, run
from e2e.images.go import ENVIRONMENT, LINKED

__all__ = ("IMAGE", "NODES", "SAMPLE", "device_plugin", "device_plugins_image")

IMAGE = "localhost/drakit-device-plugins:dev"
"""The name of the image in a cluster."""

PUBLIC_NAME = "registry.example.com/sample-device-plugin:1.7"
"""The name of the sample's image in `examples/device-plugin`."""

SAMPLE = "sample-device-plugin"
"""The program of Kubernetes' sample: resource ``example.com/resource``, with one mount per
device."""

NODES = "nodes"
"""Our program. Its only argument is a file with resources, devices and their edits."""

SOURCES = REPOSITORY / "e2e" / "deviceplugins"


def device_plugin(name: str) -> Path:
    """
    Return the path of a program. Builds it if it is not in the cache.

    :raises ImageError: Go is missing, or a module is not available.
    """
    version = run(
        ["go", "-C", SOURCES, "env", "GOVERSION"], what="asking Go's version", timeout_seconds=60
    )
    sources = [SOURCES / "go.mod", SOURCES / "go.sum", *sorted(SOURCES.glob("*/*.go"))]
    return kept("deviceplugins", digest(version, Path(__file__), *sources), _build) / name


def _build(folder: Path) -> None:
    run(
        [
            *("go", "build", LINKED, "-o", f"{folder}/"),
            *("tool", f"./{NODES}"),
        ],
        what="building the device plugins",
        # With an empty module cache, Kubernetes' sources must be downloaded.
        timeout_seconds=1800,
        cwd=SOURCES,
        env=ENVIRONMENT,
    )


def device_plugins_image() -> Path:
    """Return the image's archive. Builds it if it is not in the cache."""
    programs = {name: device_plugin(name) for name in (SAMPLE, NODES)}

    def make(folder: Path) -> None:
        write_image(
            folder / "deviceplugins.tar",
            name=IMAGE,
            aliases=[PUBLIC_NAME],
            files={name: (path, 0o755) for name, path in programs.items()},
        )

    built = programs[SAMPLE].parent.name
    key = digest(IMAGE, PUBLIC_NAME, built, Path(__file__), REPOSITORY / "e2e" / "archive.py")
    return kept("images", f"deviceplugins-{key}", make, keep=6) / "deviceplugins.tar"
