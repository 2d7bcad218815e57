"""
kind's node image, made without a registry: of Debian's packages and Go's modules.

:func:`build` makes the file system of a node, once for each content; :func:`ensure` gives it to a
Docker engine. What is in it is decided in :mod:`.image_tree`; which engine runs, elsewhere.
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
    # systemd looks at this to know that it is in a container.
    "ENV container=docker",
    'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]',
)
"""What kind's base image has beside its files. Its stop signal is nothing that import takes."""

NODE_RECIPE = ("--variant=minbase", f"--include={','.join(image_tree.NODE_PACKAGES)}", *SMALL)
INNER_RECIPE = ("--variant=essential", f"--include={','.join(image_tree.INNER_PACKAGES)}", *SMALL)


def build() -> Path:
    """
    Return the file system of a node as a tar for `docker import`; made if it is not in the cache.

    :raises ClusterError: it cannot be made, with a sentence for whoever called make.
    """
    try:
        return _build()
    except ImageError as error:
        raise ClusterError(str(error)) from error


def image_name() -> str:
    """The name of the image that :func:`build` makes now; it changes with the content."""
    return _name(_key(_programs()))


def ensure(docker: Sequence[str]) -> str:
    """
    Return the name of the node image in an engine; built and imported if it is missing there.

    :param docker: the beginning of a command line that talks to the engine.
    """
    tar = build()
    name = _name(tar.parent.name)
    if run([*docker, "image", "inspect", name], check=False).returncode != 0:
        changes = [word for change in CHANGES for word in ("--change", change)]
        with binaries.Progress(name).step("importing"):
            run([*docker, "import", *changes, str(tar), name], timeout_seconds=600)
    return name


def _name(key: str) -> str:
    return f"{NAME}:{binaries.kubernetes_version()}-{key}"


def _programs() -> image_tree.Programs:
    return image_tree.Programs(common=binaries.programs(), kind=binaries.programs(binaries.KIND))


def _key(programs: image_tree.Programs) -> str:
    """A name for all that the node is made of. The programs' folders are named so themselves."""
    sources = [Path(module.__file__ or "") for module in (image_store, image_tree, archive)]
    return digest(
        *(programs.common.name, programs.kind.name, image_tree.SUITE),
        *(*NODE_RECIPE, *INNER_RECIPE, *sorted(NODE_FILES.iterdir())),
        *(*sources, Path(__file__)),
    )


def _build() -> Path:
    programs = _programs()
    return kept("kind-images", _key(programs), lambda folder: _make(folder, programs)) / "node.tar"


def _make(folder: Path, programs: image_tree.Programs) -> None:
    if os.geteuid() != 0:
        raise ClusterError("kind's node image is built by root: use sudo, or set KIND_NODE_IMAGE")
    progress = binaries.Progress("kind's node image")
    inner_root = _root("inner", INNER_RECIPE, progress)
    node_root = _root("node", NODE_RECIPE, progress)
    kind_files = binaries.module_folder("kind", "sigs.k8s.io/kind") / "images/base/files"
    version = binaries.kubernetes_version()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="scratch-") as scratch_name:
        scratch = Path(scratch_name)
        with progress.step("writing the images that a node starts with"):
            layer = scratch / "layer.tar"
            inner = image_tree.inner_tree(programs, node_files=NODE_FILES)
            image_tree.write_tree(layer, inner, root=inner_root)
            names = _output(
                *(programs.common / "kubeadm", "config", "images", "list"),
                *("--kubernetes-version", version),
            ).split()
            config = (kind_files / "etc/containerd/config.toml").read_text()
            images = image_tree.inner_images(names, containerd_config=config)
            archive.write_images(scratch / "images.tar", images, layer=layer)
        with progress.step("unpacking them"):
            store = scratch / "containerd"
            image_store.unpack(scratch / "images.tar", store, programs=programs.common)
        with progress.step("writing the node"):
            tree = image_tree.node_tree(
                programs,
                kind_files=kind_files,
                node_files=NODE_FILES,
                version=version,
                runtime_spec=_output(programs.common / "ctr", "oci", "spec"),
            )
            for part in image_store.KEPT:
                tree[f"var/lib/containerd/{part}"] = image_tree.Folder(store / part)
            image_tree.write_tree(
                folder / "node.tar", tree, root=node_root, dropped=image_tree.DROPPED
            )


def _root(what: str, recipe: Sequence[str], progress: binaries.Progress) -> Path:
    """Debian's file system, which changes less often than what is put on it."""

    def make(folder: Path) -> None:
        with progress.step(f"installing Debian {image_tree.SUITE} ({what})"):
            write_root(
                folder / "root.tar", suite=image_tree.SUITE, recipe=recipe, what=f"the {what} root"
            )

    return kept("kind-roots", digest(image_tree.SUITE, *recipe), make, keep=4) / "root.tar"


def _output(*argv: str | Path) -> str:
    return run([str(word) for word in argv], timeout_seconds=60).stdout


def main() -> int:
    started = time.monotonic()
    try:
        tar = build()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size, seconds = tar.stat().st_size / 1e6, time.monotonic() - started
    print(f"{_name(tar.parent.name)}, {size:.0f} MB, after {seconds:.1f} s: {tar}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
