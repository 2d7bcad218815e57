"""The krew plugin: its manifest, its archives, and the script that starts it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from e2e.images.go import CEL_MINORS
from tools.krew.__main__ import render
from tools.krew.archive import LAUNCHER, OURS, PLATFORMS, REPOSITORY, copy_own, write
from tools.release.version import current

PINS = (REPOSITORY / "requirements" / "kubectl.txt").read_text()


def test_the_manifest_has_the_checksum_of_each_archive(tmp_path):
    archives = {each: tmp_path / f"{each.name}.tar.gz" for each in PLATFORMS}
    for platform, archive in archives.items():
        archive.write_bytes(platform.name.encode())
    manifest = yaml.safe_load(render("1.2.0", "https://example.com/v1/", archives))
    assert (manifest["kind"], manifest["metadata"]) == ("Plugin", {"name": "drakit"})
    assert manifest["spec"]["version"] == "v1.2.0"
    rendered = {
        tuple(each["selector"]["matchLabels"].values()): each
        for each in manifest["spec"]["platforms"]
    }
    assert set(rendered) == {(each.os, each.arch) for each in PLATFORMS}
    linux = rendered["linux", "amd64"]
    assert linux["sha256"] == hashlib.sha256(b"linux-amd64").hexdigest()
    assert linux["uri"] == "https://example.com/v1/linux-amd64.tar.gz"
    assert linux["bin"] == "kubectl-drakit"


def test_the_pins_have_neither_grpc_nor_a_daemons_packages():
    names = {line.partition("==")[0] for line in PINS.splitlines() if "==" in line[:40]}
    assert {"kubernetes-asyncio", "cel-expr-python"} <= names
    assert not names & {"grpcio", "protobuf", "kopf", "prometheus-client"}


def test_equal_content_makes_equal_archives(tmp_path):
    folder = tmp_path / "files"
    package = folder / "lib" / "module.py"
    package.parent.mkdir(parents=True)
    package.write_text("")
    (folder / "kubectl-drakit").write_text("#!/bin/sh\n")
    (folder / "LICENSE").write_text("")
    one, other = tmp_path / "1.tar.gz", tmp_path / "2.tar.gz"
    write(one, folder)
    os.utime(package, (1, 1))
    write(other, folder)
    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(one) as tar:
        modes = {each.name: each.mode for each in tar}
    assert modes == {"LICENSE": 0o644, "kubectl-drakit": 0o755, "lib/module.py": 0o644}


def test_the_archive_has_all_packages_that_the_plugin_imports():
    program = (
        "import json, pkgutil, sys; from importlib import import_module;"
        "import drakit_cli.kubectl as p;"
        "[import_module(f'{p.__name__}.{each.name}') for each in pkgutil.iter_modules(p.__path__)];"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    loaded = {name for name in json.loads(done.stdout) if name.startswith("drakit")}
    assert loaded - {Path(path).name for path in OURS} == set()


def test_the_packages_of_the_archive_know_their_version(tmp_path):
    copy_own(tmp_path)
    ask = "import sys; sys.path.insert(0, sys.argv[1]); from importlib.metadata import version;"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{ask} print(version('drakit'))", tmp_path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == current().python


@pytest.fixture
def unpacked(tmp_path):
    """An unpacked archive whose packages only print what they get; krew's link to it."""
    version = ".".join(map(str, sys.version_info[:2]))
    module = tmp_path / "store" / "lib" / version / "drakit_cli" / "kubectl" / "main.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "import os, sys\n"
        "def main():\n"
        "    print(*sys.argv[1:], os.environ['DRAKIT_CEL'], 'PYTHONPATH' in os.environ)\n"
        "    return 3\n"
    )
    launcher = tmp_path / "store" / "kubectl-drakit"
    launcher.write_text(LAUNCHER.read_text())
    launcher.chmod(0o755)
    link = tmp_path / "bin" / "kubectl-drakit"
    link.parent.mkdir()
    link.symlink_to(os.path.join("..", "store", "kubectl-drakit"))
    return link


def start(link, *arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": path}
    return subprocess.run(
        [link, *arguments], capture_output=True, text=True, check=False, env=environ
    )


def test_the_launcher_starts_by_krews_link_with_a_python_that_fits(unpacked, tmp_path):
    python = tmp_path / "pythons" / "python3"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    done = start(unpacked, "explain", "pod/a b", path=f"{python.parent}:/usr/bin:/bin")
    helper = tmp_path / "store" / f"drakit-cel-{CEL_MINORS[-1]}"
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == f"explain pod/a b {helper} False\n"


def test_the_launcher_names_the_python_versions_that_it_needs(unpacked, tmp_path):
    version = ".".join(map(str, sys.version_info[:2]))
    (tmp_path / "store" / "lib" / version).rename(tmp_path / "store" / "lib" / "3.1")
    done = start(unpacked, "devices", path="/usr/bin:/bin")
    assert done.returncode == 2
    assert "needs one of the Python versions 3.1 on the PATH" in done.stderr
