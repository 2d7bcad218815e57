"""
Images of vendors: the node plugin's image and a driver's module on top.

The Dockerfile is the one of docs/vendors/python-driver.md.

It must not know what the drivers do.
"""

from __future__ import annotations

from pathlib import Path

from e2e.images.build import TAG, Store
from e2e.images.cache import digest, kept, locked

__all__ = ("repository_name", "vendor_image")


def repository_name(vendor: str) -> str:
    """The image's repository in the chart's values; the chart adds the component's name."""
    return f"localhost/drakit-{vendor}"


def vendor_image(vendor: str, folder: Path, *, nodeplugin: Path) -> Path:
    """
    Return the archive of an image; built if its folder or the node plugin's image changed.

    :param folder: has a Dockerfile with a `BASE` argument, and what that copies.
    """
    name = f"{repository_name(vendor)}-nodeplugin:{TAG}"
    found = (path for path in folder.rglob("*") if path.is_file())
    sources = sorted(path for path in found if path.parent.name != "__pycache__")
    parts = (part for path in sources for part in (str(path.relative_to(folder)), path))
    key = digest(name, nodeplugin.parent.name, *parts)

    def make(made: Path) -> None:
        with locked("buildah") as storage:
            store = Store(storage)
            store.build_on(f"docker-archive:{nodeplugin}", folder, name=name)
            store.save(name, made / f"{vendor}.tar")
            store.prune()

    return kept("images", f"{vendor}-{key}", make, keep=6) / f"{vendor}.tar"
