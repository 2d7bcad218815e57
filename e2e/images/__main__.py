"""
`python -m e2e.images`: builds changed images, and prints their locations.

With `--cluster`, the operator contains only the allocator for this clone's cluster. `python -m
e2e.images context DIR` only writes the Dockerfile's build context, for an engine. `python -m
e2e.images driver NAME DIR` builds a driver's image, and prints only its location.
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

from drakit_cli.package import PYTHON_VERSION, foreign_modules
from e2e.cluster.api import ClusterError
from e2e.cluster.choice import cluster
from e2e.images.build import build_images, cache_note
from e2e.images.cache import ImageError
from e2e.images.context import TARGETS, write_context
from e2e.images.go import CEL_MINORS, DEFAULT_MINOR
from e2e.images.vendor import driver_image


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.images", description=__doc__)
    parser.add_argument("--cluster", action="store_true", help="for this clone's cluster alone")
    commands = parser.add_subparsers(dest="command")
    context = commands.add_parser("context", help="write the build context of the Dockerfile")
    context.add_argument("folder", type=Path)
    driver = commands.add_parser("driver", help="build a driver's image on the node plugin's")
    driver.add_argument("name", help="the image's name: localhost/lamps-nodeplugin:0.1.0")
    driver.add_argument("folder", type=Path, help="has the Dockerfile")
    arguments = parser.parse_args()
    try:
        if arguments.command == "context":
            write_context(arguments.folder)
            print(f"now: docker build --target {TARGETS[0]} {arguments.folder}")
            return
        if arguments.command == "driver":
            for path in foreign_modules(arguments.folder, machine=platform.machine()):
                print(
                    f"warning: {path} is not for Python {PYTHON_VERSION} on {platform.machine()}, "
                    f"which the image has: run `drakit package`",
                    file=sys.stderr,
                )
            nodeplugin, *_ = build_images(
                lambda text: print(text, file=sys.stderr), minors=(DEFAULT_MINOR,)
            )
            print(driver_image(arguments.name, arguments.folder, nodeplugin=nodeplugin))
            return
        for archive in build_images(minors=[cluster().minor] if arguments.cluster else CEL_MINORS):
            print(archive)
        print(cache_note())
    except (ClusterError, ImageError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
