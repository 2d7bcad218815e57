"""
An archive of the plugin for one platform: `kubectl-drakit`, Kubernetes' CEL compiler and allocator,
and packages.

The packages are those of `requirements/kubectl.txt`, once for each Python version, because some
have extension modules. Instead of the CEL library for Python, the archive has the programs
`drakit-cel-MINOR`, one for each minor release of Kubernetes. Equal inputs result in equal archives.
"""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from e2e.images.go import cel_programs
from tools.release.version import current

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENTS = REPOSITORY / "requirements" / "kubectl.txt"
LAUNCHER = Path(__file__).with_name("kubectl-drakit.sh")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

WITHOUT = ("cel-expr-python", "tzdata")
"""Packages that are not needed. The programs replace the first."""

OURS = (
    "drakit",
    "formats/drakit_formats",
    "daemon/drakit_daemon",
    "explain/drakit_explain",
    "cli/drakit_cli",
)
"""Our packages that the plugin imports, as paths in the repository."""

UNUSED = ("kubernetes_asyncio/client/api", "kubernetes_asyncio/client/models", "bin")
"""Modules that `drakit_daemon.kube` never imports, as paths in the packages."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A platform of krew: its names in Go, and the tags of wheels that run there."""

    os: str
    arch: str
    tags: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.os}-{self.arch}"


def _macos(arch: str, *versions: str) -> tuple[str, ...]:
    return tuple(
        f"macosx_{version}_{kind}" for version in versions for kind in (arch, "universal2")
    )


PLATFORMS = (
    Platform(os="linux", arch="amd64", tags=("manylinux_2_28_x86_64", "manylinux2014_x86_64")),
    Platform(os="linux", arch="arm64", tags=("manylinux_2_28_aarch64", "manylinux2014_aarch64")),
    Platform(os="darwin", arch="arm64", tags=_macos("arm64", "12_0", "11_0", "10_9")),
    Platform(os="darwin", arch="amd64", tags=_macos("x86_64", "12_0", "10_13", "10_12", "10_9")),
)
"""Windows is missing because the launcher is a shell script."""


def build(platform: Platform, archive: Path) -> None:
    """Build the archive of a platform. Needs Go and the package index."""
    with tempfile.TemporaryDirectory() as scratch:
        files = Path(scratch)
        shutil.copy(LAUNCHER, files / "kubectl-drakit")
        shutil.copy(REPOSITORY / "LICENSE", files / "LICENSE")
        for program in cel_programs(platform=f"{platform.os}/{platform.arch}").iterdir():
            shutil.copy(program, files)
        for python in PYTHONS:
            _install(platform, python, files / "lib" / python)
        write(archive, files)


def write(archive: Path, folder: Path) -> None:
    """Write a folder as an archive that depends only on its content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            info = tar.gettarinfo(path, arcname=path.relative_to(folder).as_posix())
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = 0
            info.mode = 0o755 if path.parent == folder and path.name != "LICENSE" else 0o644
            with path.open("rb") as content:
                tar.addfile(info, content)
    archive.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))


def _install(platform: Platform, python: str, folder: Path) -> None:
    """Install the pinned packages and drakit for a platform and a Python, without running them."""
    tags = [f"--platform={tag}" for tag in platform.tags]
    with tempfile.TemporaryDirectory() as scratch:
        pins = Path(scratch, "requirements.txt")
        pins.write_text(pins_without(REQUIREMENTS.read_text()))
        _run(
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-compile", "--require-hashes", "--only-binary=:all:"),
            *("--implementation=cp", f"--python-version={python}", *tags),
            *(f"--target={folder}", f"--requirement={pins}"),
        )
    for name in UNUSED:
        shutil.rmtree(folder / name, ignore_errors=True)
    copy_own(folder)


def copy_own(folder: Path) -> None:
    """Copy our packages to a folder, with the metadata from which the plugin reads its version."""
    unused = shutil.ignore_patterns("__pycache__")
    for package in OURS:
        shutil.copytree(REPOSITORY / package, folder / Path(package).name, ignore=unused)
    version = current().python
    metadata = folder / f"drakit-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: drakit\nVersion: {version}\n")


def pins_without(requirements: str) -> str:
    """Return pinned requirements without the packages that archives do not need."""
    pins = requirements.replace("\\\n", "\0").splitlines()
    kept = [each for each in pins if not each.startswith(tuple(f"{name}==" for name in WITHOUT))]
    return "\n".join(kept).replace("\0", "\\\n") + "\n"


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, cwd=REPOSITORY)
