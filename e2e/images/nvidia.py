"""
NVIDIA's device plugin as NVIDIA publishes it: its program, its manifest, and an image of both.

The source is the Go module. Its checksum is pinned here, and those of its dependencies are in its
own go.sum. It is built in Go's module cache, so that nothing is changed. The program loads NVIDIA's
library at run time and thus needs glibc, so the image uses the base of our images.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from e2e.images.base import base_archive
from e2e.images.build import Store
from e2e.images.cache import ImageError, digest, kept, locked, run

__all__ = ("IMAGE", "PROGRAM", "nvidia_device_plugin", "nvidia_image", "nvidia_manifest")

VERSION = "v0.14.5"
IMAGE = f"localhost/drakit-nvidia-device-plugin:{VERSION}"
"""The name of the image in a cluster."""

PROGRAM = "nvidia-device-plugin"
MANIFEST = "nvidia-device-plugin.yml"

MODULE = f"github.com/NVIDIA/k8s-device-plugin@{VERSION}"
CHECKSUM = "h1:RqstjEz6DOp2IeTHqSYITjVnsDG3YQWhztQlpcLAUcM="
"""Hash of the module's content, in go.sum format."""

DOCKERFILE = f"""\
ARG BASE
FROM $BASE
COPY {PROGRAM} /usr/bin/{PROGRAM}
ENTRYPOINT ["{PROGRAM}"]
"""


def nvidia_device_plugin() -> Path:
    """
    Return the path of the program. Builds it if it is not in the cache.

    :raises ImageError: Go or a C compiler is missing, or a module is not available or differs.
    """
    return _built() / PROGRAM


def nvidia_manifest() -> str:
    """Return the DaemonSet that NVIDIA publishes with the program, as YAML."""
    return (_built() / MANIFEST).read_text()


def nvidia_image() -> Path:
    """Return the image's archive. Builds it if it is not in the cache."""
    program, base = nvidia_device_plugin(), base_archive()

    def make(made: Path) -> None:
        with (
            locked("buildah") as storage,
            tempfile.TemporaryDirectory(prefix="drakit-nvidia-") as scratch,
        ):
            Path(scratch, "Dockerfile").write_text(DOCKERFILE)
            copied = Path(scratch, PROGRAM)
            copied.write_bytes(program.read_bytes())
            copied.chmod(0o755)
            store = Store(storage)
            store.build_base(base)
            store.build_on(store.base_name(base), Path(scratch), name=IMAGE)
            store.save(IMAGE, made / "nvidia.tar")
            store.prune()

    key = digest(IMAGE, program.parent.name, base.parent.name, DOCKERFILE)
    return kept("nvidia-images", key, make) / "nvidia.tar"


def _built() -> Path:
    version = run(["go", "env", "GOVERSION"], what="asking Go's version", timeout_seconds=60)
    return kept("nvidia-programs", digest(version, MODULE, CHECKSUM, Path(__file__)), _build)


def _build(folder: Path) -> None:
    module = _downloaded()
    run(
        [
            *("go", "-C", module, "build", "-trimpath", "-ldflags=-s -w"),
            *("-o", folder / PROGRAM, f"./cmd/{PROGRAM}"),
        ],
        what="building NVIDIA's device plugin",
        # Time with an empty module cache.
        timeout_seconds=1800,
        env={
            "CGO_ENABLED": "1",
            # The module contains the list of a vendor folder but not the folder. With `readonly`, a
            # module that is not in go.sum is an error.
            "GOFLAGS": "-mod=readonly -buildvcs=false",
            # The library's symbols are resolved when it is loaded. The plugin's Makefile also
            # allows this.
            "CGO_LDFLAGS_ALLOW": "-Wl,--unresolved-symbols=ignore-in-object-files",
        },
    )
    (folder / MANIFEST).write_bytes((module / MANIFEST).read_bytes())


def _downloaded() -> Path:
    """Return the folder of the module's content, whose checksum is pinned."""
    # Download it in a separate folder, because none of our modules depends on it.
    with tempfile.TemporaryDirectory(prefix="drakit-nvidia-") as nowhere:
        module = json.loads(
            run(
                ["go", "mod", "download", "-json", MODULE],
                what=f"downloading {MODULE}",
                timeout_seconds=600,
                cwd=Path(nowhere),
            )
        )
    if module["Sum"] != CHECKSUM:
        raise ImageError(f"{MODULE} has the checksum {module['Sum']}, but {CHECKSUM} is pinned")
    return Path(module["Dir"])
