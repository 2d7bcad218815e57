"""
The base of our images if no public image can be pulled: a small Debian with Python 3.13.

It comes from the mirror that this machine's apt uses.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from e2e.images.cache import digest, kept, run

SUITE = "trixie"
"""The Debian release with Python 3.13, the version in the Dockerfile's default base."""

UNNEEDED = ("doc", "man", "locale", "info", "zoneinfo", "i18n", "lintian")
"""Folders of /usr/share that no container reads."""

SMALL = (
    *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in UNNEEDED),
    "--dpkgopt=path-exclude=/usr/lib/*/gconv/*",
)
"""Options of mmdebstrap that omit these folders."""

RECIPE = (
    "--variant=essential",
    # grpcio needs the C++ library, which public Python images contain.
    "--include=python3,libstdc++6",
    *SMALL,
    # Keep the copyright files of the packages in the images.
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
)


def base_archive() -> Path:
    """Return the base's file system as a tar. Creates it if it is not in the cache."""
    key = digest(SUITE, *RECIPE)
    return kept("bases", key, _make) / "base.tar"


def _make(folder: Path) -> None:
    write_root(folder / "base.tar", suite=SUITE, recipe=RECIPE, what="the base image")


def write_root(path: Path, *, suite: str, recipe: Sequence[str], what: str) -> None:
    """
    Write the file system of a Debian release as a tar.

    :param recipe: mmdebstrap's options: the packages, and the omitted files.
    """
    mirror = _mirror()
    run(
        ["mmdebstrap", "--quiet", *recipe, suite, path, *([mirror] if mirror else [])],
        what=f"making {what} (mmdebstrap)",
        timeout_seconds=900,
    )


def _mirror() -> str | None:
    """Return the Debian mirror that this machine's apt uses. If None, mmdebstrap chooses."""
    if not shutil.which("apt-get"):
        return None
    done = subprocess.run(
        [
            *("apt-get", "indextargets"),
            *("--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    for line in done.stdout.splitlines():
        label, _, address = line.partition(" ")
        # Use Debian's main archive, rather than its security updates, which are next to it.
        if label == "Debian" and address:
            return address
    return None
