"""
The commands of the site: `make docs` and `make docs-serve`.

    python -m tools.site build [--tag v0.2.1]       build and check the site: build/docs/site
    python -m tools.site serve [--address :8000]    serve it, and rebuild it when files change

:mod:`.versions` adds a built site to the published ones.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tools.site.html import check_site
from tools.site.source import ROOT, Source, check_links, check_nav, clean
from tools.site.versions import HTML, publish, version_of

BUILD = ROOT / "build" / "docs"
SITE = BUILD / "site"
ZENSICAL = [str(Path(sys.executable).parent / "zensical")]


def fail(found: Iterable[str]) -> None:
    faults = list(found)
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        raise SystemExit(f"{len(faults)} faults in the documentation")


def build(version: str) -> None:
    fail([*check_nav(), *check_links()])
    clean(BUILD)
    Source(BUILD, version=version).write()
    # Zensical checks the links between pages, and their anchors.
    command = [*ZENSICAL, "build", "--strict", "--clean", "-f", str(BUILD / "mkdocs.yml")]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("Zensical found faults in the documentation")
    fail(check_site(HTML))
    publish(HTML, site=SITE, version=version, aliases=[])
    count = len(list(HTML.rglob("index.html")))
    print(f"{SITE.relative_to(ROOT)}: {count} pages, no broken link, nothing from another host")


def serve(address: str) -> None:
    """Serve the site, and update the source, which Zensical watches, when the repository
    changes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends the server
    source = Source(BUILD)
    source.write()
    server = subprocess.Popen([*ZENSICAL, "serve", "-a", address, "-f", str(BUILD / "mkdocs.yml")])
    try:
        while server.poll() is None:
            time.sleep(0.5)
            source.write()
    except KeyboardInterrupt:
        server.terminate()
    raise SystemExit(server.wait())


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.site", description="The documentation site.")
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="build and check the site")
    building.add_argument("--tag", help="vX.Y.Z of a release; without it the version is dev")
    serving = commands.add_parser("serve", help="serve the site and rebuild it on changes")
    serving.add_argument("--address", default="localhost:8000")
    given = parser.parse_args()
    if given.command == "build":
        build(version_of(given.tag))
    else:
        serve(given.address)


if __name__ == "__main__":
    main()
