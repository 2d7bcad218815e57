"""
The images of a release: one OCI layout for each component, with an image for each platform.

The images for amd64 are those that the Dockerfile builds. Programs for arm64 cannot run here.
Therefore, the arm64 images are assembled: scripts and Python modules are those of the amd64 image,
libraries and extension modules come from Debian's packages and from wheels for arm64, and Go
compiles its programs for arm64. The arm64 images are untested.
"""

from __future__ import annotations

import io
import json
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from e2e.archive import Image, write_images
from e2e.images.base import RECIPE, SUITE, write_root
from e2e.images.build import build_images
from e2e.images.cache import digest, kept, run
from e2e.images.cel import combined_programs
from e2e.images.context import RELEASED, TARGETS, wheels
from e2e.images.root import stripped

AMD64, ARM64 = "amd64", "arm64"

PROGRAMS = "drakit-cel-"
"""The start of the names of the operator's Go programs."""

TRANSLATIONS = (
    ("lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1"),
    ("x86_64-linux-gnu", "aarch64-linux-gnu"),
)
"""Parts of paths on amd64, and the corresponding parts on arm64."""

ELF = b"\x7fELF"
PT_LOAD, PT_DYNAMIC, DT_NEEDED, DT_STRTAB = 1, 2, 1, 5
ELF_ARM64 = 183
"""The value of e_machine in an ELF file for arm64."""


class AssemblyError(Exception):
    """An image for arm64 cannot be assembled."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file, a directory or a link in an image."""

    info: tarfile.TarInfo
    content: bytes = b""

    @property
    def is_elf(self) -> bool:
        return self.content.startswith(ELF)


Files = dict[str, Entry]
"""Entries by path in the image, without the first slash."""


def write_layouts(
    folder: Path, *, architectures: Iterable[str], report: Callable[[str], None] = print
) -> dict[str, str]:
    """
    Write an OCI layout for each component below `folder`. Return the digests of their indexes.

    Needs root, for the tools that build the images.

    :raises ImageError: a part cannot be built.
    :raises AssemblyError: an image for arm64 lacks a file.
    """
    built = dict(zip(TARGETS, build_images(report), strict=False))
    digests: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="drakit-release-") as scratch:
        for component in TARGETS:
            archives = {AMD64: built[component]}
            if ARM64 in architectures:
                archives[ARM64] = Path(scratch, f"{component}-arm64.tar")
                _assemble(component, built[component], archives[ARM64], Path(scratch))
                report(f"images: the {component} is assembled for arm64")
            layout = folder / f"drakit-{component}"
            digests[component] = _write_layout(layout, archives, Path(scratch, "buildah"))
    return digests


def _write_layout(layout: Path, archives: Mapping[str, Path], storage: Path) -> str:
    """Write docker-archives as one OCI layout. Return the digest of its only index."""
    buildah = (
        *("buildah", "--storage-driver=vfs"),
        *("--root", str(storage / "root"), "--runroot", str(storage / "run")),
    )

    def call(*arguments: str) -> None:
        run(
            [*buildah, "manifest", *arguments],
            what=f"writing {layout.name} as an OCI layout",
            timeout_seconds=600,
        )

    name = f"localhost/{layout.name}:release"
    call("create", name)
    for architecture, archive in archives.items():
        call("add", "--os=linux", f"--arch={architecture}", name, f"docker-archive:{archive}")
    layout.parent.mkdir(parents=True, exist_ok=True)
    call("push", "--quiet", "--all", "--format=oci", name, f"oci:{layout}")
    (index,) = json.loads((layout / "index.json").read_text())["manifests"]
    return index["digest"]


def _assemble(component: str, amd64: Path, target: Path, scratch: Path) -> None:
    files, config = read_image(amd64)
    debian = read_files(_debian_for_arm64())
    programs: dict[str, bytes] = {}
    if component == "operator":
        found = combined_programs(RELEASED, platform="linux/arm64").iterdir()
        programs = {path.name: path.read_bytes() for path in found if not path.is_symlink()}
    result = for_arm64(
        files,
        debian=debian,
        wheels=wheels(component, "aarch64").glob("*aarch64.whl"),
        programs=programs,
    )
    layer = scratch / f"{component}.layer"
    write_layer(layer, result)
    process = config["config"]
    image = Image(
        names=[f"localhost/drakit-{component}:release"],
        architecture=ARM64,
        entrypoint=process.get("Entrypoint") or (),
        env=dict(each.split("=", 1) for each in process.get("Env") or ()),
        user=process.get("User", ""),
    )
    write_images(target, [image], layer=layer)


def _debian_for_arm64() -> Path:
    """Return the file system of the same Debian packages for arm64, which were only unpacked."""
    others = [option for option in RECIPE if not option.startswith("--variant=")]
    recipe = ("--architectures=arm64", "--variant=extract", *others)
    key = digest(SUITE, *recipe)

    def make(folder: Path) -> None:
        write_root(folder / "base.tar", suite=SUITE, recipe=recipe, what="the base for arm64")

    return kept("bases", key, make) / "base.tar"


# ------------------------------------------------------------ files of images


def read_image(archive: Path) -> tuple[Files, dict[str, Any]]:
    """Return the files of the image in a docker-archive, and its configuration."""
    files: Files = {}
    with tarfile.open(archive) as tar:

        def member(name: str) -> io.BytesIO:
            stream = tar.extractfile(name)
            if stream is None:
                raise AssemblyError(f"{name} in {archive} is not a file")
            return io.BytesIO(stream.read())

        (manifest,) = json.load(member("manifest.json"))
        config = json.load(member(manifest["Config"]))
        for layer in manifest["Layers"]:
            with tarfile.open(fileobj=member(layer)) as inner:
                add_layer(files, inner)
    return files, config


def read_files(archive: Path) -> Files:
    """Return the files of a tar."""
    files: Files = {}
    with tarfile.open(archive) as tar:
        add_layer(files, tar)
    return files


def add_layer(files: Files, layer: tarfile.TarFile) -> None:
    """Add a layer to the files of the layers below it. A layer can also remove files."""
    for info in layer:
        name = info.name.removeprefix("./").strip("/")
        path = PurePosixPath(name)
        if path.name == ".wh..wh..opq":
            for each in [each for each in files if each.startswith(f"{path.parent}/")]:
                del files[each]
        elif path.name.startswith(".wh."):
            gone = str(path.with_name(path.name.removeprefix(".wh.")))
            for each in [each for each in files if each == gone or each.startswith(f"{gone}/")]:
                del files[each]
        elif info.isfile() or info.islnk():
            # A hard link has the content of its target.
            stream = layer.extractfile(info)
            files[name] = Entry(info=info, content=stream.read() if stream else b"")
        elif name and not info.isdev():
            files[name] = Entry(info=info)


def for_arm64(
    files: Files, *, debian: Files, wheels: Iterable[Path], programs: Mapping[str, bytes]
) -> Files:
    """
    Return the files of an image for amd64, with all machine code for arm64.

    :param debian: the file system of the same Debian release for arm64.
    :param wheels: the wheels for arm64 of packages with extension modules.
    :param programs: the Go programs for arm64, keyed by name.
    :raises AssemblyError: there is no arm64 version of a file.
    """
    result: Files = {}
    packages = ""
    for name, entry in files.items():
        before, found, _ = name.partition("/site-packages/")
        packages = packages or (f"{before}{found}" if found and before.startswith("opt/") else "")
        base = PurePosixPath(name).name
        if not entry.is_elf:
            result[translated(name)] = _portable(name, entry)
        elif base.startswith(PROGRAMS):
            if base not in programs:
                raise AssemblyError(f"there is no {base} for arm64")
            result[name] = Entry(info=entry.info, content=programs[base])
        elif not (packages and name.startswith(packages)):
            place = translated(name)
            result[place] = Entry(info=entry.info, content=_resolved(debian, place).content)
    for wheel in wheels:
        result.update(_machine_code(wheel, packages))
    _add_libraries(result, debian)
    wrong = [
        name
        for name, entry in result.items()
        if entry.is_elf and struct.unpack_from("<H", entry.content, 18)[0] != ELF_ARM64
    ]
    if wrong:
        raise AssemblyError(f"these files are not for arm64: {', '.join(sorted(wrong))}")
    return result


def _add_libraries(files: Files, debian: Files) -> None:
    """Add the libraries that machine code needs on arm64 but not on amd64."""
    present = {PurePosixPath(name).name for name in files}
    waiting = [entry for entry in files.values() if entry.is_elf]
    while waiting:
        for library in needed_libraries(waiting.pop().content):
            if library not in present:
                place = f"usr/lib/aarch64-linux-gnu/{library}"
                found = _resolved(debian, place)
                files[place] = Entry(info=found.info, content=found.content)
                present.add(library)
                waiting.append(files[place])


def needed_libraries(program: bytes) -> list[str]:
    """
    Return the names of the libraries that a program or library loads (DT_NEEDED).

    :param program: an ELF file for 64 bits, little-endian.
    """
    (table,) = struct.unpack_from("<Q", program, 32)
    size, count = struct.unpack_from("<HH", program, 54)
    segments = [
        struct.unpack_from("<II6Q", program, table + size * number) for number in range(count)
    ]
    # The fields are type, flags, offset, address, physical address and size in the file.
    loaded = [(s[3], s[2], s[5]) for s in segments if s[0] == PT_LOAD]
    names: list[int] = []
    strings = 0
    for segment in segments:
        if segment[0] != PT_DYNAMIC:
            continue
        for tag, value in struct.iter_unpack("<QQ", program[segment[2] : segment[2] + segment[5]]):
            if tag == DT_NEEDED:
                names.append(value)
            elif tag == DT_STRTAB:
                strings = value
    for address, offset, length in loaded:
        if address <= strings < address + length:
            start = strings - address + offset
            return [
                program[start + name : program.index(0, start + name)].decode() for name in names
            ]
    return []


def translated(path: str) -> str:
    """Return the path on arm64 of a path on amd64."""
    for old, new in TRANSLATIONS:
        path = path.replace(old, new)
    return path


def _portable(name: str, entry: Entry) -> Entry:
    """Return an entry without machine code in its form on arm64."""
    if entry.info.issym():
        info = entry.info.replace(linkname=translated(entry.info.linkname), deep=False)
        return Entry(info=info)
    if name.startswith("var/lib/dpkg/"):
        text = entry.content.replace(b"Architecture: amd64", b"Architecture: arm64")
        return Entry(info=entry.info, content=text)
    return entry


def _resolved(files: Files, path: str) -> Entry:
    """Return the file at a path, through symbolic links."""
    for _ in range(8):
        entry = files.get(path)
        if entry is None:
            break
        if not entry.info.issym():
            return entry
        target = PurePosixPath("/", path).parent / entry.info.linkname
        parts: list[str] = []
        for part in target.parts[1:]:
            if part == "..":
                parts.pop()
            else:
                parts.append(part)
        path = "/".join(parts)
    raise AssemblyError(f"Debian's packages for arm64 do not contain /{path}")


def _machine_code(wheel: Path, packages: str) -> Files:
    """Return the extension modules and libraries of a wheel, and the files that list them."""
    found: Files = {}
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            content = stripped(archive.read(member))
            listing = member.filename.endswith((".dist-info/WHEEL", ".dist-info/RECORD"))
            if content.startswith(ELF) or listing:
                info = tarfile.TarInfo(packages + member.filename)
                info.mode = 0o644 if listing else 0o755
                found[info.name] = Entry(info=info, content=content)
    return found


def write_layer(path: Path, files: Files) -> None:
    """Write files as the layer of an image. Equal files result in equal layers."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as layer:
        for name, entry in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.mode, info.uid, info.gid = entry.info.mode, entry.info.uid, entry.info.gid
            if entry.info.isdir() or entry.info.issym():
                info.type, info.linkname = entry.info.type, entry.info.linkname
                layer.addfile(info)
            else:
                info.size = len(entry.content)
                layer.addfile(info, io.BytesIO(entry.content))
