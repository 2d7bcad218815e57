"""
Collects the files of the images. The Dockerfile runs this file in its build stages.

The images have no Debian system: they contain Python, the libraries that Python loads, and the
packages. So they contain no shell, package manager, pip or compiler. The base only has to be Debian
with Python: in `python:3.13-slim`, Python is below /usr/local, in Debian below /usr.

Uses the standard library only, and does not depend on the rest of the repository.
"""

from __future__ import annotations

import compileall
import os
import py_compile
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

VENV = Path("/opt/drakit")

UNNEEDED = (
    "__pycache__",
    "__phello__",
    "_pyrepl",
    "config-*",
    "curses",
    "dbm",
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "sitecustomize.py",
    "test",
    "tests",
    "tkinter",
    "turtle.py",
    "turtledemo",
    # Extension modules of the packages above, for terminals, and for Python's own tests.
    "_curses*.so",
    "_dbm.*.so",
    "_gdbm.*.so",
    "_test*.so",
    "_tkinter.*.so",
    "_xx*.so",
    "readline.*.so",
    "xx*.so",
)
"""Parts of the standard library that need a terminal or a compiler, or contain pip."""

LIBRARIES = (
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "libresolv.so.2",
    "librt.so.1",
    "libstdc++.so.6",
    "libutil.so.1",
)
"""Libraries that wheels may load, by the manylinux policy. Python does not load all of them."""

UNUSED = ("kubernetes_asyncio/client/api", "kubernetes_asyncio/client/models", "CHANGELOG.md")
"""Modules (22 MB) that `drakit_daemon.kube` never imports, and a file of their package."""

SOURCES = (".c", ".h", ".pxd", ".pyi", ".pyx")
"""File extensions in packages that only a compiler or a type checker reads."""

ACCOUNTS = {
    "passwd": "root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n",
    "group": "root:x:0:\nnonroot:x:65532:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


def main(command: str, folder: Path) -> None:
    if command == "python":
        collect_python(folder)
    else:
        prepare_packages(folder)


def collect_python(root: Path) -> None:
    """Copy Python, the libraries that it loads, and the virtual environment to an empty root."""
    base = Path(sys.base_prefix)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    interpreter = (base / "bin" / f"python{version}").resolve()
    stdlib = Path(sysconfig.get_path("stdlib"))
    root.mkdir()
    for link in ("lib", "lib64"):  # /lib -> usr/lib
        if Path("/", link).is_symlink():
            (root / link).symlink_to(Path("/", link).readlink())
    _copy(interpreter, root)
    _below(root, interpreter.with_name("python3")).symlink_to(interpreter.name)
    shutil.copytree(stdlib, _below(root, stdlib), ignore=shutil.ignore_patterns(*UNNEEDED))
    programs = [interpreter, *_below(root, stdlib).rglob("*.so")]
    libraries = sorted(_libraries(programs) | {_found(name) for name in LIBRARIES})
    for library in libraries:
        _copy(library, root)
    _compile(root, _below(root, stdlib))
    shutil.copytree(VENV, _below(root, VENV), symlinks=True)
    for script in [
        *_below(root, VENV / "bin").glob("[aA]ctivate*"),
        _below(root, VENV) / ".gitignore",
    ]:
        script.unlink()
    for name, text in ACCOUNTS.items():
        _write(root / "etc" / name, text)
    _copy(Path("/etc/os-release").resolve(), root)
    (root / "etc" / "os-release").symlink_to("../usr/lib/os-release")
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    _describe([interpreter, *stdlib.rglob("*"), *libraries], root)


def prepare_packages(root: Path) -> None:
    """Strip, prune and compile the packages that pip has installed below `root`."""
    (packages,) = _below(root, VENV).glob("lib/python3.*/site-packages")
    for name in UNUSED:
        if (path := packages / name).is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for script in _below(root, VENV).glob("bin/*"):
        if "drakit" not in script.name:
            script.unlink()
    for path in [each for each in packages.rglob("*") if each.is_file()]:
        if path.suffix in SOURCES:
            path.unlink()
        elif ".so" in path.suffixes:
            path.write_bytes(stripped(path.read_bytes()))
    _compile(root, packages)


def stripped(program: bytes) -> bytes:
    """
    Return an ELF file without the data after its segments: symbols and debug data.

    The loader only uses the segments. Some wheels contain more debug data than code.
    """
    if program[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
        return program
    (table,) = struct.unpack_from("<Q", program, 0x20)
    size, count = struct.unpack_from("<HH", program, 0x36)
    end = table + size * count
    for start in range(table, end, size):
        offset, length = struct.unpack_from("<8xQ16xQ", program, start)
        end = max(end, offset + length)
    kept = bytearray(program[:end])
    struct.pack_into("<Q", kept, 0x28, 0)  # no table of sections
    struct.pack_into("<HHH", kept, 0x3A, 0, 0, 0)
    return bytes(kept)


def _compile(root: Path, folder: Path) -> None:
    # The file system is read-only, and compiling at each start takes more than a second. Use
    # unchecked files, because the files' times change when an image is written.
    compileall.compile_dir(
        folder,
        maxlevels=32,
        quiet=2,
        stripdir=str(root),
        prependdir="/",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _libraries(programs: Iterable[Path]) -> set[Path]:
    """Return the libraries that these programs load, including the loader."""
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False)
    if missing := re.findall(r"(\S+) => not found", done.stdout):
        raise SystemExit(f"the base has no {', '.join(sorted(set(missing)))}")
    return {Path(path) for path in re.findall(r"(/\S+) \(0x", done.stdout)}


def _found(name: str) -> Path:
    for folder in sorted(Path("/usr/lib").glob("*-linux-gnu")):
        if (folder / name).exists():
            return folder / name
    raise SystemExit(f"the base has no {name}")


def _describe(files: Iterable[Path], root: Path) -> None:
    """
    Write the descriptions and the copyrights of the Debian packages that contain the files.

    Image scanners read the descriptions below /var/lib/dpkg/status.d.
    """
    owners = {path: name for name, path in _owned()}
    names = {owners[path] for file in files if (path := file.resolve()) in owners}
    stanzas = Path("/var/lib/dpkg/status").read_text().split("\n\n")
    for stanza in stanzas:
        found = re.search(r"^Package: (\S+)$", stanza, re.M)
        if found and found[1] in names:
            _write(root / "var/lib/dpkg/status.d" / found[1], stanza.strip() + "\n")
            copyright_file = Path("/usr/share/doc", found[1], "copyright")
            if copyright_file.exists():
                _copy(copyright_file, root, content_of=copyright_file.resolve())


def _owned() -> Iterator[tuple[str, Path]]:
    for listing in sorted(Path("/var/lib/dpkg/info").glob("*.list")):
        name = listing.stem.partition(":")[0]
        for line in listing.read_text().splitlines():
            path = Path(line)
            yield name, Path(os.path.realpath(path.parent), path.name)


def _below(root: Path, path: Path) -> Path:
    """Return the location of an absolute path below `root`."""
    return root / path.relative_to("/")


def _copy(path: Path, root: Path, *, content_of: Path | None = None) -> None:
    """Copy a file to the same path below `root`. The directories of its path are not links."""
    place = _below(root, path.parent.resolve() / path.name)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(content_of or path, place)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
