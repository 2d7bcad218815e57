"""
The image of the scripted drivers: the node plugin's image and one module, as a vendor builds one.

It must not know what the drivers do.
"""

from __future__ import annotations

from pathlib import Path

from e2e.images.build import TAG, Store
from e2e.images.cache import REPOSITORY, digest, kept, locked

REPOSITORY_NAME = "localhost/drakit-scripted"
"""The chart adds the component's name."""

NAME = f"{REPOSITORY_NAME}-nodeplugin:{TAG}"

FOLDER = REPOSITORY / "e2e" / "scripted" / "image"


def scripted_image(nodeplugin: Path) -> Path:
    """Return the archive of the image; built if it or the node plugin's image changed."""
    sources = sorted(path for path in FOLDER.iterdir() if path.is_file())
    key = digest(REPOSITORY_NAME, nodeplugin.parent.name, *sources)

    def make(folder: Path) -> None:
        with locked("buildah") as storage:
            store = Store(storage)
            store.build_on(nodeplugin, FOLDER, name=NAME)
            store.save(NAME, folder / "scripted.tar")
            store.prune()

    return kept("images", f"scripted-{key}", make, keep=6) / "scripted.tar"
