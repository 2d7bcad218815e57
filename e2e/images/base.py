"""
The base of our images where no public one can be pulled: a small Debian with Python 3.13.

It comes from the mirror that this machine's apt uses.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from e2e.images.cache import digest, kept, run

SUITE = "trixie"
"""The Debian release whose Python is 3.13, the version that the Dockerfile's default base has."""

UNNEEDED = ("doc", "man", "locale", "info", "zoneinfo", "i18n", "lintian")
"""Folders of /usr/share that nothing in a container reads."""

SMALL = (
    *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in UNNEEDED),
    "--dpkgopt=path-exclude=/usr/lib/*/gconv/*",
)
"""Options of mmdebstrap that leave all this out."""

RECIPE = (
    "--variant=essential",
    # grpcio needs the C++ library; public Python images have it.
    "--include=python3,libstdc++6",
    *SMALL,
    # The images have the copyrights of what they contain.
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
)


def base_archive() -> Path:
    """Return the base's file system as a tar; made if it is not in the cache."""
    key = digest(SUITE, *RECIPE)
    return kept("bases", key, _make) / "base.tar"


def _make(folder: Path) -> None:
    write_root(folder / "base.tar", suite=SUITE, recipe=RECIPE, what="the base image")


def write_root(path: Path, *, suite: str, recipe: Sequence[str], what: str) -> None:
    """
    Write the file system of a Debian release as a tar.

    :param recipe: mmdebstrap's options: which packages, and what is left out of them.
    """
    mirror = _mirror()
    run(
        ["mmdebstrap", "--quiet", *recipe, suite, path, *([mirror] if mirror else [])],
        what=f"making {what} (mmdebstrap)",
        timeout_seconds=900,
    )


def _mirror() -> str | None:
    """The mirror of Debian that this machine's apt uses; None leaves the choice to mmdebstrap."""
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
        # Debian's own archive, not its security updates, which lie beside it.
        if label == "Debian" and address:
            return address
    return None
