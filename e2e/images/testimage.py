"""
The image of the test pods: busybox, small static programs that use a device, and a program that
reads metadata files with Kubernetes' own package.

The image also has the names of public images in the documentation's pods and in other projects'
manifests, which tests cannot pull. For the latter, it contains a `bash`, which is busybox's shell.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from e2e.archive import write_image
from e2e.images.cache import REPOSITORY, ImageError, digest, kept, run
from e2e.images.go import ENVIRONMENT, LINKED, metadata_reader

NAME = "localhost/drakit-test:dev"
PUBLIC_NAME = "docker.io/library/busybox:1.37"
OTHERS_NAME = "docker.io/library/ubuntu:22.04"
BASH = b'#!/bin/sh\nexec /bin/sh "$@"\n'
SOURCES = REPOSITORY / "e2e" / "testimage"
TOOLS = ("kvm-version", "blockio")
"""The names under which the helper program runs (see its `main.go`)."""


def test_image() -> Path:
    """Return the archive of the test image. Builds it if it is not in the cache."""
    busybox = static_busybox()
    reader = metadata_reader()
    sources = [*sorted(SOURCES.glob("*.go")), SOURCES / "go.mod"]
    parts = (*sources, Path(__file__), REPOSITORY / "e2e" / "archive.py")
    key = digest(NAME, PUBLIC_NAME, busybox, reader, *parts)
    folder = kept("images", f"test-{key}", lambda folder: _make(folder, busybox, reader), keep=6)
    return folder / "test.tar"


def static_busybox() -> Path:
    """Return the machine's busybox, which needs no libraries. Raises ImageError if there is
    none."""
    found = shutil.which("busybox")
    if found is None:
        raise ImageError("busybox is missing: run `make deps` as root, or install busybox-static")
    path = Path(found).resolve()
    # A dynamically linked busybox would need libraries that the image does not contain.
    done = subprocess.run(["ldd", path], capture_output=True, text=True, timeout=10, check=False)
    if done.returncode == 0 and "statically linked" not in done.stdout:
        raise ImageError(f"{path} is not static: install Debian's busybox-static")
    return path


def _make(folder: Path, busybox: Path, reader: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        helper = Path(scratch, "helper")
        run(
            ["go", "build", LINKED, "-o", helper, "."],
            what="building the helper programs of the test image",
            timeout_seconds=300,
            cwd=SOURCES,
            env=ENVIRONMENT,
        )
        applets = run(
            [busybox, "--list"], what="asking busybox for its commands", timeout_seconds=10
        )
        links = {
            f"bin/{applet}": "busybox"
            for applet in applets.split()
            if applet not in ("busybox", "bash")
        }
        links |= {f"bin/{tool}": "device-tools" for tool in TOOLS}
        write_image(
            folder / "test.tar",
            name=NAME,
            aliases=[PUBLIC_NAME, OTHERS_NAME],
            files={
                "bin/busybox": (busybox, 0o755),
                "bin/bash": (BASH, 0o755),
                "bin/device-tools": (helper, 0o755),
                "bin/read-metadata": (reader, 0o755),
            },
            links=links,
            env={"PATH": "/bin"},
        )
