"""The files of a release: chart with digests, notes, checksums, and images for arm64."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from e2e.archive import Image, write_images
from tests import programs
from tests.unit.docs.listings import ROOT
from tools.release.__main__ import differences
from tools.release.files import pinned, release_notes, write_chart, write_checksums
from tools.release.images import (
    AssemblyError,
    Entry,
    add_layer,
    for_arm64,
    needed_libraries,
    read_files,
    read_image,
    write_layer,
)
from tools.release.version import Version, current

DIGESTS = {"nodeplugin": "sha256:" + "a" * 64, "operator": "sha256:" + "b" * 64}
REPOSITORY = "registry.example.com/drakit"


# ------------------------------------------------------------ the chart


def test_the_packaged_chart_has_the_digests_as_defaults_and_all_comments(tmp_path):
    package = write_chart(tmp_path, current(), repository=REPOSITORY, digests=DIGESTS)
    assert package.name == f"drakit-{current().semantic}.tgz"
    with tarfile.open(package) as tar:
        names = set(tar.getnames())
        stream = tar.extractfile("drakit/values.yaml")
        assert stream is not None
        text = stream.read().decode()
    assert {"drakit/Chart.yaml", "drakit/values.schema.json", "drakit/templates/NOTES.txt"} <= names
    sources = (ROOT / "charts/drakit/values.yaml").read_text()
    image = yaml.safe_load(text).pop("image")
    assert (image["repository"], image["digest"]) == (REPOSITORY, DIGESTS)
    changed = [
        (old, new)
        for old, new in zip(sources.splitlines(), text.splitlines(), strict=True)
        if old != new
    ]
    assert len(changed) == 3


def test_equal_sources_make_equal_packages(tmp_path):
    packages = []
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        packages.append(write_chart(folder, current(), repository=REPOSITORY, digests=DIGESTS))
    one, other = packages
    assert one.read_bytes() == other.read_bytes()


def test_helm_installs_the_packaged_images(tmp_path):
    helm = programs.helm()
    package = write_chart(tmp_path, current(), repository=REPOSITORY, digests=DIGESTS)
    done = subprocess.run(
        [helm, "template", "drakit", package], capture_output=True, text=True, check=True
    )
    images = set(re.findall(r"^ +image: (\S+)$", done.stdout, re.M))
    assert images == {f"{REPOSITORY}-{name}@{digest}" for name, digest in DIGESTS.items()}


def test_a_value_that_is_missing_is_an_error():
    values = 'image:\n  repository: ""\n  digest:\n    nodeplugin: ""\n'
    with pytest.raises(LookupError, match="0 empty values named operator"):
        pinned(values, repository=REPOSITORY, digests=DIGESTS)


# ------------------------------------------------------------ notes and checksums


def test_release_notes_have_the_release_and_only_addresses_outside_the_repository():
    notes = release_notes(current())
    assert "### Devices" in notes
    links = re.findall(r"\]\(([^)]+)\)", notes)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    site = f"https://drakit.github.io/drakit/{current().site}/"
    assert f"{site}reference/host-device-policy/#device-names" in links


def test_a_release_without_a_section_in_the_release_notes_is_an_error():
    with pytest.raises(LookupError, match=r"does not have a section for 9\.9\.9"):
        release_notes(Version(python="9.9.9"))


def test_sha256sum_accepts_the_checksums(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/index.json").write_text("{}")
    (tmp_path / "a.whl").write_text("a")
    file = write_checksums(tmp_path)
    check = ["sha256sum", "--check", "--strict", file.name]
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 0
    (tmp_path / "a.whl").write_text("b")
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode != 0


def test_files_that_differ_or_are_missing_are_named(tmp_path):
    for name, content in (("one", "1"), ("other", "2")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "same").touch()
        (folder / "changed").write_text(content)
        (folder / f"only-{name}").touch()
        write_checksums(folder)
    found = differences(tmp_path / "one", tmp_path / "other")
    assert found == ["changed", "only-one", "only-other"]
    assert differences(tmp_path / "one", tmp_path / "one") == []


# ------------------------------------------------------------ images for arm64


def elf(machine: int, text: str = "", needs: str = "") -> bytes:
    """An ELF file with one segment, which has the names of one library."""
    strings = b"\0" + needs.encode() + b"\0"
    dynamic = struct.pack("<4Q", 1, 1, 5, 0x1000) if needs else b""
    header = bytearray(b"\x7fELF" + bytes(60))
    struct.pack_into("<H", header, 18, machine)
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, 2)
    start = 64 + 2 * 56
    load = struct.pack("<II6Q", 1, 0, start, 0x1000, 0, len(strings), 0, 0)
    end = start + len(strings)
    described = struct.pack("<II6Q", 2, 0, end, 0, 0, len(dynamic), 0, 0)
    return bytes(header) + load + described + strings + dynamic + text.encode()


AMD64, ARM64 = 62, 183
SITE = "opt/drakit/lib/python3.13/site-packages/"


def entry(content: bytes = b"", *, link: str = "") -> Entry:
    info = tarfile.TarInfo("x")
    if link:
        info.type, info.linkname = tarfile.SYMTYPE, link
    return Entry(info=info, content=content)


def wheel(path, files: dict[str, bytes]):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def amd64():
    return {
        "usr/bin/python3.13": entry(elf(AMD64)),
        "usr/lib/x86_64-linux-gnu/libc.so.6": entry(elf(AMD64)),
        "usr/lib64/ld-linux-x86-64.so.2": entry(elf(AMD64)),
        "usr/lib/x86_64-linux-gnu/libz.so": entry(link="libz.so.1"),
        "usr/lib/python3.13/os.py": entry(b"import sys"),
        "var/lib/dpkg/status.d/libc6": entry(b"Package: libc6\nArchitecture: amd64\n"),
        f"{SITE}orjson/orjson.cpython-313-x86_64-linux-gnu.so": entry(elf(AMD64)),
        f"{SITE}orjson/__init__.py": entry(b"from .orjson import *"),
        "opt/drakit/bin/drakit-cel-1.36": entry(elf(AMD64)),
    }


@pytest.fixture
def debian():
    return {
        "usr/bin/python3.13": entry(elf(ARM64, "python")),
        "usr/lib/aarch64-linux-gnu/libc.so.6": entry(elf(ARM64, "libc")),
        "usr/lib/ld-linux-aarch64.so.1": entry(link="aarch64-linux-gnu/ld-linux-aarch64.so.1"),
        "usr/lib/aarch64-linux-gnu/ld-linux-aarch64.so.1": entry(elf(ARM64, "loader")),
    }


@pytest.fixture
def orjson(tmp_path):
    return wheel(
        tmp_path / "orjson-1-cp313-cp313-manylinux2014_aarch64.whl",
        {
            "orjson/__init__.py": b"from .orjson import *",
            "orjson/orjson.cpython-313-aarch64-linux-gnu.so": elf(ARM64, "orjson"),
            "orjson-1.dist-info/WHEEL": b"Tag: cp313-cp313-manylinux2014_aarch64",
        },
    )


def test_an_image_for_arm64_has_the_modules_of_amd64_and_no_machine_code_of_it(
    amd64, debian, orjson
):
    cel = {"drakit-cel-1.36": elf(ARM64, "cel")}
    result = for_arm64(amd64, debian=debian, wheels=[orjson], programs=cel)
    assert {name: each.content for name, each in result.items() if each.is_elf} == {
        "usr/bin/python3.13": elf(ARM64, "python"),
        "usr/lib/aarch64-linux-gnu/libc.so.6": elf(ARM64, "libc"),
        "usr/lib/ld-linux-aarch64.so.1": elf(ARM64, "loader"),
        f"{SITE}orjson/orjson.cpython-313-aarch64-linux-gnu.so": elf(ARM64, "orjson"),
        "opt/drakit/bin/drakit-cel-1.36": elf(ARM64, "cel"),
    }
    assert result["usr/lib/python3.13/os.py"].content == b"import sys"
    assert result["usr/lib/aarch64-linux-gnu/libz.so"].info.linkname == "libz.so.1"
    assert b"arm64" in result["var/lib/dpkg/status.d/libc6"].content
    assert f"{SITE}orjson-1.dist-info/WHEEL" in result


def test_a_library_that_debian_does_not_have_for_arm64_is_an_error(amd64, debian, orjson):
    del debian["usr/lib/aarch64-linux-gnu/libc.so.6"]
    with pytest.raises(AssemblyError, match=r"do not contain /usr/lib/aarch64-linux-gnu/libc"):
        for_arm64(amd64, debian=debian, wheels=[orjson], programs={"drakit-cel-1.36": elf(ARM64)})


def test_libraries_that_only_the_wheels_for_arm64_need_are_added(amd64, debian, tmp_path):
    needs = {"a.so": elf(ARM64, "a", needs="libpthread.so.0")}
    package = wheel(tmp_path / "a-1-cp313-cp313-manylinux2014_aarch64.whl", needs)
    folder = "usr/lib/aarch64-linux-gnu"
    debian[f"{folder}/libpthread.so.0"] = entry(elf(ARM64, "pthread", needs="libnew.so.1"))
    debian[f"{folder}/libnew.so.1"] = entry(elf(ARM64, "new"))
    cel = {"drakit-cel-1.36": elf(ARM64)}
    result = for_arm64(amd64, debian=debian, wheels=[package], programs=cel)
    assert {f"{folder}/libpthread.so.0", f"{folder}/libnew.so.1"} <= set(result)
    del debian[f"{folder}/libnew.so.1"]
    with pytest.raises(AssemblyError, match="do not contain /usr/lib/aarch64-linux-gnu/libnew"):
        for_arm64(amd64, debian=debian, wheels=[package], programs=cel)


def test_the_libraries_of_a_real_program_are_found():
    program = Path(sys.executable).resolve().read_bytes()
    if not program.startswith(b"\x7fELF"):
        pytest.skip("Python is not an ELF file here")
    assert "libc.so.6" in needed_libraries(program)


def test_machine_code_for_another_processor_is_an_error(amd64, debian, orjson):
    cel = {"drakit-cel-1.36": elf(AMD64)}
    with pytest.raises(AssemblyError, match="not for arm64: opt/drakit/bin/drakit-cel-1"):
        for_arm64(amd64, debian=debian, wheels=[orjson], programs=cel)


def layer(path, files: dict[str, bytes]):
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_an_image_is_read_and_written_with_its_configuration(tmp_path):
    one = layer(tmp_path / "one.tar", {"./bin/a": b"a", "bin/b": b"b"})
    archive = tmp_path / "image.tar"
    image = Image(names=["x:1"], entrypoint=["/bin/a"], env={"A": "b=c"}, architecture="arm64")
    write_images(archive, [image], layer=one)
    files, config = read_image(archive)
    assert {name: each.content for name, each in files.items()} == {"bin/a": b"a", "bin/b": b"b"}
    assert config["architecture"] == "arm64"
    assert config["config"]["Env"] == ["A=b=c"]
    written = tmp_path / "written.tar"
    write_layer(written, files)
    assert {name: each.content for name, each in read_files(written).items()} == {
        "bin/a": b"a",
        "bin/b": b"b",
    }


def test_a_layer_can_remove_files_of_the_layers_below(tmp_path):
    files = read_files(layer(tmp_path / "one.tar", {"a/1": b"", "a/2": b"", "b/1": b""}))
    above = layer(tmp_path / "two.tar", {"a/.wh.1": b"", "b/.wh..wh..opq": b""})
    with tarfile.open(above) as tar:
        add_layer(files, tar)
    assert set(files) == {"a/2"}
