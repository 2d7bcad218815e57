"""
kind's node image, built without a registry from Debian packages and Go modules.

:func:`build` creates the file system of a node, once for each content; :func:`ensure` imports it
into a Docker engine. :mod:`.image_tree` decides what the image contains.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ... import archive
from ...images.base import SMALL, write_root
from ...images.cache import ImageError, digest, kept
from ..api import ClusterError, run
from ..local import binaries
from . import image_store, image_tree

NODE_FILES = Path(__file__).parent / "node"

NAME = "drakit-kind-node"

CHANGES = (
    # systemd reads it to detect that it runs in a container.
    "ENV container=docker",
    'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]',
)
"""The settings of kind's base image, except STOPSIGNAL, which Docker's import rejects."""

# The default, usrmerge instead of usr-is-merged, would install all of perl: 50 MB.
COMMON_RECIPE = ("--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr", *SMALL)
NODE_RECIPE = (
    "--variant=minbase",
    f"--include=usr-is-merged,{','.join(image_tree.NODE_PACKAGES)}",
    *COMMON_RECIPE,
)
INNER_RECIPE = (
    "--variant=essential",
    f"--include=usr-is-merged,{','.join(image_tree.INNER_PACKAGES)}",
    *COMMON_RECIPE,
)


def build() -> Path:
    """
    Return the file system of a node, a tar for `docker import`. Builds it if it is not in the
    cache.

    :raises ClusterError: the build failed; the message is a sentence for the user of make.
    """
    try:
        programs = _programs()
        folder = kept("kind-images", _key(programs), lambda folder: _make(folder, programs), keep=2)
    except ImageError as error:
        raise ClusterError(str(error)) from error
    return folder / "node.tar"


def ensure(docker: Sequence[str]) -> str:
    """
    Return the name of the node image in an engine. Builds and imports it if the engine does not
    have it.

    :param docker: the start of a command line that calls the engine.
    """
    tar = build()
    name = image_name(tar)
    if run([*docker, "image", "inspect", name], check=False).returncode != 0:
        changes = [word for change in CHANGES for word in ("--change", change)]
        with binaries.Progress(name).step("importing"):
            run([*docker, "import", *changes, str(tar), name], timeout_seconds=600)
    return name


def image_name(tar: Path) -> str:
    """Return the name of the image whose file system :func:`build` returned."""
    return f"{NAME}:{binaries.kubernetes_version()}-{tar.parent.name}"


def _programs() -> image_tree.Programs:
    return image_tree.Programs(
        local=binaries.programs(binaries.LOCAL), kind=binaries.programs(binaries.KIND)
    )


def _key(programs: image_tree.Programs) -> str:
    """Return the key of the image: a digest of all its inputs."""
    sources = [Path(module.__file__ or "") for module in (image_store, image_tree, archive)]
    return digest(
        # The cache names these folders after their content.
        *(programs.local.name, programs.kind.name),
        *(image_tree.SUITE, *NODE_RECIPE, *INNER_RECIPE, *CHANGES),
        *(Path(__file__), *sources, *sorted(NODE_FILES.iterdir())),
    )


def _make(folder: Path, programs: image_tree.Programs) -> None:
    if os.geteuid() != 0:
        raise ClusterError(
            "building kind's node image needs root: use sudo, or set KIND_NODE_IMAGE"
        )
    progress = binaries.Progress("kind's node image")
    inner_root = _root("inner", INNER_RECIPE, progress)
    node_root = _root("node", NODE_RECIPE, progress)
    kind_files = (
        binaries.module_folder(binaries.SOURCES / "kind" / "go.mod", "sigs.k8s.io/kind")
        / "images/base/files"
    )
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="scratch-") as name:
        scratch = Path(name)
        with progress.step("writing the images that a node starts with"):
            images = _write_images(scratch, programs, root=inner_root, kind_files=kind_files)
        with progress.step("unpacking them"):
            store = scratch / "containerd"
            image_store.unpack(images, store, programs=programs.local)
        with progress.step("writing the node"):
            tree = image_tree.node_tree(
                programs,
                kind_files=kind_files,
                node_files=NODE_FILES,
                version=binaries.kubernetes_version(),
                runtime_spec=run([str(programs.local / "ctr"), "oci", "spec"]).stdout,
            )
            for part in image_store.KEPT:
                tree[f"var/lib/containerd/{part}"] = image_tree.Copy(store / part)
            image_tree.write_tree(
                folder / "node.tar", tree, root=node_root, dropped=image_tree.DROPPED
            )


def _root(what: str, recipe: Sequence[str], progress: binaries.Progress) -> Path:
    """Return a Debian file system, which is cached separately, because the rest changes more
    often."""

    def make(folder: Path) -> None:
        with progress.step(f"installing Debian {image_tree.SUITE} ({what})"):
            write_root(
                folder / "root.tar", suite=image_tree.SUITE, recipe=recipe, what=f"the {what} root"
            )

    return kept("kind-roots", digest(image_tree.SUITE, *recipe), make, keep=4) / "root.tar"


def _write_images(
    folder: Path, programs: image_tree.Programs, *, root: Path, kind_files: Path
) -> Path:
    """Write the images with which a node starts as one docker-archive."""
    version = binaries.kubernetes_version()
    argv = [str(programs.local / "kubeadm"), "config", "images", "list"]
    required = run([*argv, "--kubernetes-version", version]).stdout.split()
    config = (kind_files / "etc/containerd/config.toml").read_text()
    layer, path = folder / "layer.tar", folder / "images.tar"
    tree = image_tree.inner_tree(programs, node_files=NODE_FILES)
    image_tree.write_tree(layer, tree, root=root)
    images = image_tree.inner_images(required, sandbox=image_tree.sandbox_image(config))
    archive.write_images(path, images, layer=layer)
    return path


def main() -> int:
    started = time.monotonic()
    try:
        tar = build()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    size, seconds = tar.stat().st_size / 1e6, time.monotonic() - started
    print(f"{image_name(tar)}, {size:.0f} MB, after {seconds:.1f} s")
    print(f"the file system of the node: {tar}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
