"""
Builds the images of the Dockerfile with buildah, layer by layer, and writes them as archives.

The layers of the dependencies stay in buildah's storage, in the cache, so a change to our own
sources rebuilds only one small layer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from e2e.images.base import base_archive
from e2e.images.cache import ImageError, cache_folder, digest, kept, locked, run
from e2e.images.context import EPOCH, RELEASED, TARGETS, Context, wheels, write_context
from e2e.images.testimage import test_image

REPOSITORY_NAME = "localhost/drakit"
TAG = "dev"
REPRODUCIBLE = (f"--timestamp={EPOCH}", "--identity-label=false")
"""Options of buildah with which equal files produce images with equal digests."""


def image_name(target: str) -> str:
    """Return the name of one of our images in a cluster."""
    return f"{REPOSITORY_NAME}-{target}:{TAG}"


def download_parts() -> None:
    """Create the inputs of images that do not need Go: their base and their wheels."""
    base_archive()
    for name in ("image", *TARGETS):
        wheels(name)


def build_images(
    progress: Callable[[str], None] = print, *, minors: Sequence[str] = RELEASED
) -> list[Path]:
    """
    Return docker-archive tars of all images. Rebuilds changed images.

    Needs root (mmdebstrap, buildah) only if something has to be built.

    :param minors: the releases of Kubernetes whose allocators the operator contains.
    """
    started = time.monotonic()

    def report(text: str) -> None:
        progress(f"images: {text} ({time.monotonic() - started:.1f} s)")

    with tempfile.TemporaryDirectory(prefix="drakit-images-") as scratch:
        context = write_context(Path(scratch, "context"), minors)
        report("wheels are there")
        archives = [_built(target, context, report) for target in TARGETS]
    archives.append(test_image())
    for archive in archives:
        report(f"{archive.name}, {archive.stat().st_size / 1e6:.0f} MB")
    return archives


def _built(target: str, context: Context, report: Callable[[str], None]) -> Path:
    base = base_archive()
    dockerfile = context.folder / "Dockerfile"
    parts = [base.parent.name, dockerfile, context.dependencies[target], context.drakit]
    parts += [context.root, EPOCH]
    key = digest(*parts, context.cel) if target == "operator" else digest(*parts)

    def make(folder: Path) -> None:
        report(f"building the image of the {target}")
        with locked("buildah") as storage:
            store = Store(storage)
            store.build_base(base)
            store.build(target, context, base=store.base_name(base))
            store.save(image_name(target), folder / f"{target}.tar")
            store.prune()

    return kept("images", f"{target}-{key}", make, keep=6) / f"{target}.tar"


class Store:
    """A separate storage of buildah, so that other users' images remain invisible and unchanged."""

    def __init__(self, folder: Path) -> None:
        self._buildah = _buildah(folder, "overlay")
        try:
            self.names()
        except ImageError:
            # overlay is six times faster, but not every file system supports it; vfs copies.
            self._buildah = _buildah(folder, "vfs")

    def names(self) -> list[str]:
        """Return the names of the images in this storage."""
        return self._run("images", "--format", "{{.Name}}:{{.Tag}}", what="listing").split()

    def base_name(self, base: Path) -> str:
        return f"localhost/drakit-base:{base.parent.name}"

    def build_base(self, base: Path) -> None:
        """Create an image of the base's file system, unless it exists."""
        name = self.base_name(base)
        if name in self.names():
            return
        self._run(
            *(
                "bud",
                "--quiet",
                "--isolation=chroot",
                "--tag",
                name,
                "--file",
                "-",
                str(base.parent),
            ),
            what="turning the base into an image",
            input=f"FROM scratch\nADD {base.name} /\n",
        )

    def build(self, target: str, context: Context, *, base: str) -> None:
        self._run(
            *("bud", "--quiet", "--layers", "--isolation=chroot", "--pull-never", *REPRODUCIBLE),
            *("--build-arg", f"BASE={base}"),
            *("--build-arg", f"ROOT={context.root}"),
            *("--build-arg", f"DEPENDENCIES={context.dependencies[target]}"),
            *("--build-arg", f"DRAKIT={context.drakit}"),
            *("--target", target, "--tag", image_name(target), str(context.folder)),
            what=f"building the image of the {target}",
        )

    def build_on(self, base: str, folder: Path, *, name: str) -> None:
        """Build the Dockerfile of a folder on an image in this storage, or on
        `docker-archive:PATH`."""
        self._run(
            *("bud", "--quiet", "--isolation=chroot", "--pull-never", *REPRODUCIBLE),
            *("--build-arg", f"BASE={base}", "--tag", name, str(folder)),
            what=f"building {name}",
        )

    def save(self, name: str, path: Path) -> None:
        self._run("push", "--quiet", name, f"docker-archive:{path}:{name}", what=f"saving {name}")

    def prune(self) -> None:
        """Remove the remains of older builds. The layers below the named images are kept for the
        next build."""
        self._run("rmi", "--prune", "--force", what="removing old layers")

    def _run(self, *arguments: str, what: str, input: str | None = None) -> str:
        return run([*self._buildah, *arguments], what=what, timeout_seconds=600, input=input)


def _buildah(folder: Path, driver: str) -> list[str]:
    storage = folder / driver
    return [
        *("buildah", f"--storage-driver={driver}"),
        *("--root", str(storage / "root"), "--runroot", str(storage / "run")),
    ]


def cache_note() -> str:
    """Return the folder of the cache, for users who need the disk space."""
    return f"images, wheels and layers are kept in {cache_folder()}"
