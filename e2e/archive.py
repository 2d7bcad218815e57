"""
Container images without a container engine: one layer, as a docker-archive tar.

`ctr images import`, `docker load` and `kind load image-archive` all read this format. The bytes
depend only on the arguments (no time, no user name), so an archive's digest shows whether an image
changed.
"""

import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from drakit_cli.package import MACHINES

Content = bytes | Path
"""A file's content, or a local file with the content."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """The properties of an image, except its layer."""

    names: Sequence[str]
    """Each is a repository:tag."""

    entrypoint: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str = ""
    architecture: str = ""
    """The architecture, as in image configurations. By default, that of this machine."""


def architecture() -> str:
    """Return this machine's architecture, as in image configurations."""
    names = {machine: name for name, machine in MACHINES.items()}
    return names.get(platform.machine(), platform.machine())


def write_image(
    path: Path,
    *,
    name: str,
    files: Mapping[str, tuple[Content, int]],
    links: Mapping[str, str] | None = None,
    aliases: Sequence[str] = (),
    entrypoint: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    user: str = "",
) -> None:
    """
    Write the image `name` (repository:tag) with one layer to `path`, atomically.

    :param files: path in the container -> (content, permission bits); parents are created.
    :param links: path in the container -> target of a symbolic link.
    :param aliases: further names of the image.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        layer = Path(folder, "layer.tar")
        with layer.open("wb") as stream:
            _write_layer(stream, files=files, links=links or {})
        with layer.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        image = Image(names=[name, *aliases], entrypoint=entrypoint, env=env or {}, user=user)
        whole = Path(folder, "image.tar")
        _write_archive(whole, [image], layer=layer, digest=digest)
        whole.replace(path)


def write_images(path: Path, images: Sequence[Image], *, layer: Path) -> None:
    """Write images that share one layer, a tar, to `path`."""
    with layer.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    _write_archive(path, images, layer=layer, digest=digest)


def _config(image: Image, layer_digest: str) -> bytes:
    env = [f"{key}={value}" for key, value in sorted(image.env.items())]
    process: dict[str, object] = {"Env": env}
    if image.entrypoint:
        process["Entrypoint"] = list(image.entrypoint)
    if image.user:
        process["User"] = image.user
    config = {
        "architecture": image.architecture or architecture(),
        "os": "linux",
        "config": process,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
    }
    return json.dumps(config, sort_keys=True).encode()


def _write_archive(path: Path, images: Sequence[Image], *, layer: Path, digest: str) -> None:
    layer_name = f"{digest}.tar"
    manifest: list[dict[str, object]] = []
    with tarfile.open(path, "w") as archive:
        add_file(archive, layer_name, layer, mode=0o644)
        for image in images:
            config = _config(image, digest)
            config_name = f"{hashlib.sha256(config).hexdigest()}.json"
            names = list(image.names)
            manifest.append({"Config": config_name, "RepoTags": names, "Layers": [layer_name]})
            add_file(archive, config_name, config, mode=0o644)
        add_file(archive, "manifest.json", json.dumps(manifest).encode(), mode=0o644)


def _write_layer(
    stream: IO[bytes], *, files: Mapping[str, tuple[Content, int]], links: Mapping[str, str]
) -> None:
    contents = {path.strip("/"): content for path, content in files.items()}
    targets = {path.strip("/"): target for path, target in links.items()}
    with tarfile.open(fileobj=stream, mode="w") as layer:
        for folder in _folders([*contents, *targets]):
            entry = tarfile.TarInfo(folder)
            entry.type = tarfile.DIRTYPE
            # /tmp is writable for all users, as usual.
            entry.mode = 0o1777 if folder == "tmp" else 0o755
            layer.addfile(entry)
        for path, (content, mode) in sorted(contents.items()):
            add_file(layer, path, content, mode=mode)
        for path, target in sorted(targets.items()):
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
            layer.addfile(entry)


def _folders(paths: Sequence[str]) -> Iterator[str]:
    """Yield every parent of the paths, and /tmp; parents before their children."""
    parents = {"tmp"}
    for path in paths:
        parents.update(str(parent) for parent in PurePosixPath(path).parents)
    yield from sorted(parents - {"."})


def add_file(archive: tarfile.TarFile, name: str, content: Content, *, mode: int) -> None:
    """Add a file to a tar, owned by root and dated 1970."""
    entry = tarfile.TarInfo(name)
    entry.mode = mode
    if isinstance(content, bytes):
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
        return
    with content.open("rb") as stream:
        entry.size = os.fstat(stream.fileno()).st_size
        archive.addfile(entry, stream)


def image_names(path: Path) -> list[str]:
    """Return the names (repository:tag) of the images in a docker-archive tar."""
    with tarfile.open(path) as archive:
        stream = archive.extractfile("manifest.json")
        if stream is None:
            raise ValueError(f"{path} is not a docker-archive: its manifest.json is no file")
        return [name for image in json.load(stream) for name in image.get("RepoTags") or ()]
