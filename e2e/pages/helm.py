"""
The programs that come first on a page's PATH, so that its commands work exactly as a reader types
them.

When a page installs this repository's chart, `helm` adds the settings that the tests' cluster
needs: the nodes on which to run, small memory requests, and the names of images that are loaded
there, instead of the name that the page sets. A page that names no image gets none, so that it
fails as it does for a reader.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

CHANGES = {"install", "upgrade", "uninstall", "delete", "rollback"}
TAKES_VALUES = {"install", "upgrade", "template"}
CHART = "charts/drakit"

LOCAL = "localhost/"
"""The registry of images that are loaded into the cluster, and not pulled."""


def arguments_of(argv: Sequence[str], *, values: Sequence[str], images: Sequence[str]) -> list[str]:
    """
    Return helm's arguments with those that the cluster needs.

    :param values: files that come before the page's own files, which take precedence. They name
        no image.
    :param images: settings that come last, if the page names an image that is not loaded into the
        cluster.
    """
    subcommand = next((word for word in argv if not word.startswith("-")), "")
    charts = [word for word in argv if word.rstrip("/").endswith(CHART)]
    if subcommand not in TAKES_VALUES or not charts:
        return list(argv)
    place = argv.index(subcommand) + 1
    files = [f"--values={path}" for path in values]
    named = _image_named_by(argv)
    replaced = images if named and not named.startswith(LOCAL) else []
    settings = [word for image in replaced for word in ("--set-string", image)]
    return [*argv[:place], *files, *argv[place:], *settings]


def _image_named_by(argv: Sequence[str]) -> str:
    """Return the image repository in the arguments of an install, or an empty string."""
    joined = " ".join(argv)
    if found := re.search(r"\bimage\.repository=([^\s,]+)", joined):
        return found[1]
    named = ""
    for path in re.findall(r"(?:-f|--values)[= ](\S+)", joined):
        values = yaml.safe_load(Path(path).read_text()) if Path(path).exists() else None
        image = values.get("image") if isinstance(values, dict) else None
        if isinstance(image, dict) and image.get("repository"):
            named = str(image["repository"])
    return named


def main() -> None:
    """Run `helm` for a page. Its environment contains the real program and the folder of the
    session."""
    argv = sys.argv[1:]
    folder = Path(os.environ["DRAKIT_PAGE"])
    if CHANGES & set(argv):
        (folder / "changed").touch()
    values = [str(path) for path in sorted((folder / "values").iterdir())]
    images = (folder / "images").read_text().splitlines()
    program = os.environ["DRAKIT_PAGE_HELM"]
    os.execv(program, [program, *arguments_of(argv, values=values, images=images)])


if __name__ == "__main__":
    main()
