"""
The programs that stand first on a page's PATH, so that its commands stay as a reader types them.

`helm` adds to an install of this repository's chart what the tests' cluster needs: the name of
images that are loaded there, the node on which to run, and small memory requests. It must not know
pages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

CHANGES = {"install", "upgrade", "uninstall", "delete", "rollback"}
TAKES_VALUES = {"install", "upgrade", "template"}
CHART = "charts/drakit"


def arguments_of(argv: Sequence[str], *, values: Sequence[str], images: Sequence[str]) -> list[str]:
    """
    Return helm's arguments with those that the cluster needs.

    :param values: files that come before the page's own, which win.
    :param images: settings that come last: the page's images are in no registry.
    """
    subcommand = next((word for word in argv if not word.startswith("-")), "")
    charts = [word for word in argv if word.rstrip("/").endswith(CHART)]
    if subcommand not in TAKES_VALUES or not charts:
        return list(argv)
    place = argv.index(subcommand) + 1
    files = [f"--values={path}" for path in values]
    settings = [word for image in images for word in ("--set-string", image)]
    return [*argv[:place], *files, *argv[place:], *settings]


def main() -> None:
    """`helm` of a page: its environment has the real program and the folder of the session."""
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
