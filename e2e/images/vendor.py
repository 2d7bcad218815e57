"""
Images of vendors: the node plugin's image with a driver's module.

The Dockerfile is that of docs/vendors/packaging.md, or of a project from `drakit new`.
"""

from __future__ import annotations

import re
from pathlib import Path

from e2e.images.build import TAG, Store
from e2e.images.cache import digest, kept, locked

__all__ = ("driver_image", "repository_name", "vendor_image")


def repository_name(vendor: str) -> str:
    """Return the image's repository for the chart's values. The chart appends the component's
    name."""
    return f"localhost/drakit-{vendor}"


def vendor_image(vendor: str, folder: Path, *, nodeplugin: Path) -> Path:
    """Return the archive of a vendor's image, with a name that identifies the vendor."""
    return driver_image(
        f"{repository_name(vendor)}-nodeplugin:{TAG}", folder, nodeplugin=nodeplugin
    )


def driver_image(name: str, folder: Path, *, nodeplugin: Path) -> Path:
    """
    Return the archive of an image. Builds it if its folder or the node plugin's image changed.

    :param name: the image's name, with its tag.
    :param folder: contains a Dockerfile with a `BASE` argument, and the files that it copies.
    """
    label = re.sub(r"[^a-z0-9.]+", "-", name)
    found = (path for path in folder.rglob("*") if path.is_file())
    # Exclude caches and virtual environments.
    sources = sorted(
        path
        for path in found
        if not any(
            part[0] == "." or part == "__pycache__" for part in path.relative_to(folder).parts[:-1]
        )
    )
    parts = (part for path in sources for part in (str(path.relative_to(folder)), path))
    key = digest(name, nodeplugin.parent.name, *parts)

    def make(made: Path) -> None:
        with locked("buildah") as storage:
            store = Store(storage)
            store.build_on(f"docker-archive:{nodeplugin}", folder, name=name)
            store.save(name, made / f"{label}.tar")
            store.prune()

    return kept("images", f"{label}-{key}", make, keep=6) / f"{label}.tar"
