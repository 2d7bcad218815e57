"""The images of drakit: their contents, their users, and their sizes."""

from __future__ import annotations

import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.images import build_images
from e2e.images.context import RELEASED, TARGETS

# The images may have to be built first.
pytestmark = [pytest.mark.e2e, pytest.mark.feature("release"), pytest.mark.timeout(1200)]

BYTES = {"nodeplugin": 110_000_000, "operator": 150_000_000}
"""Maximum sizes of the archives, whose layers are not compressed."""

PACKAGES = "opt/drakit/lib/python3.13/site-packages"
CEL = f"drakit-cel-{RELEASED[-1]}"
COMMON = {"/usr/bin/python3.13", "/usr/lib64/ld-linux-x86-64.so.2"}
OURS = {
    f"/opt/drakit/bin/{name}"
    for name in (
        *("drakit", "drakit-driver", "drakit-nodeplugin", "drakit-operator"),
        *("kubectl-drakit", "kubectl_complete-drakit"),
    )
}
PROGRAMS = {"nodeplugin": set[str](), "operator": {f"/opt/drakit/bin/{CEL}"}}


LOAD = f"""
import ctypes, pathlib
folders = pathlib.Path("/usr/lib/python3.13"), pathlib.Path("/{PACKAGES}")
files = [file for folder in folders for file in folder.rglob("*.so")]
for file in files:
    ctypes.CDLL(str(file))
print(len(files))
"""


@dataclass(frozen=True, kw_only=True)
class Content:
    """An image."""

    config: dict[str, Any]
    layers: tuple[str, ...]
    files: dict[str, tarfile.TarInfo]
    """Files by path. Paths begin with a slash."""


def content(archive: Path) -> Content:
    files: dict[str, tarfile.TarInfo] = {}
    with tarfile.open(archive) as outer:
        (manifest,) = json.load(outer.extractfile("manifest.json"))  # pyright: ignore[reportArgumentType]
        config = json.load(outer.extractfile(manifest["Config"]))  # pyright: ignore[reportArgumentType]
        for name in manifest["Layers"]:
            with tarfile.open(fileobj=outer.extractfile(name)) as layer:
                files |= {f"/{member.name}": member for member in layer}
    return Content(config=config, layers=tuple(manifest["Layers"]), files=files)


@pytest.fixture(scope="module", params=TARGETS)
def target(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def archives() -> dict[str, Path]:
    return dict(zip(TARGETS, build_images(), strict=False))


@pytest.fixture(scope="module")
def image(target, archives) -> Content:
    return content(archives[target])


def test_the_only_programs_are_python_and_drakits_own(image, target):
    executable = {
        path
        for path, member in image.files.items()
        if member.isfile() and member.mode & 0o111 and not path.startswith("/usr/lib/python3.13/")
        if not path.startswith(f"/{PACKAGES}/") and (".so" not in path or "ld-linux" in path)
    }
    assert executable == COMMON | OURS | PROGRAMS[target]
    links = {path: each.linkname for path, each in image.files.items() if each.issym()}
    assert {link for link in links.values() if "bin/" in link} == {"/usr/bin/python3"}
    others = {path for path, link in links.items() if link == CEL}
    minors = RELEASED[:-1] if target == "operator" else ()
    assert others == {f"/opt/drakit/bin/drakit-cel-{minor}" for minor in minors}


def test_no_shell_package_manager_pip_or_compiler_is_in_an_image(image):
    names = {Path(path).name for path, member in image.files.items() if not member.isdir()}
    assert "python3.13" in names
    assert not names & {
        *("sh", "bash", "dash", "busybox", "perl", "env", "apt", "apt-get", "dpkg", "tar", "mount"),
        *("pip", "pip3", "pip.whl", "ensurepip", "gcc", "cc", "as", "ld", "strip"),
    }
    assert not any(name.startswith("pip-") for name in names)


def test_the_loader_finds_every_library_that_a_module_needs(archives, target, tmp_path):
    with tarfile.open(archives[target]) as outer:
        (manifest,) = json.load(outer.extractfile("manifest.json"))  # pyright: ignore[reportArgumentType]
        for name in manifest["Layers"]:
            with tarfile.open(fileobj=outer.extractfile(name)) as layer:
                layer.extractall(tmp_path, filter="fully_trusted")
    python = ["chroot", tmp_path, "/opt/drakit/bin/python3", "-c", LOAD]
    done = subprocess.run(python, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40


def test_no_file_is_set_uid_and_only_tmp_is_writable_for_all(image):
    for path, member in image.files.items():
        assert not member.mode & 0o6000, path
        assert member.issym() or not member.mode & 0o002 or path == "/tmp", path
        assert member.uid == member.gid == 0, path


def test_the_operator_does_not_run_as_root(archives):
    assert content(archives["operator"]).config["config"]["User"] == "65532:65532"


def test_the_images_share_the_layers_of_python_and_of_drakit(archives):
    nodeplugin, operator = (set(content(archives[each]).layers) for each in TARGETS)
    assert len(nodeplugin & operator) == 2


def test_all_files_and_images_have_one_time(image):
    times = {member.mtime for member in image.files.values()}
    assert len(times) == 1
    assert len({each["created"] for each in image.config["history"]}) == 1


def test_scanners_find_the_packages_of_debian_and_their_copyrights(image):
    described = {Path(path).name for path in image.files if "/dpkg/status.d/" in path}
    assert {"libc6", "libssl3t64", "libstdc++6", "python3.13-minimal"} <= described
    copyrights = {Path(path).parent.name for path in image.files if path.endswith("/copyright")}
    assert {"libc6", "libssl3t64", "python3.13-minimal"} <= copyrights


def test_an_image_is_not_larger_than_its_bound(archives, target):
    size = archives[target].stat().st_size
    print(f"{target}: {size / 1e6:.1f} MB")
    assert size <= BYTES[target]
