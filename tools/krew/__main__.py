"""
Builds the krew plugin in `build/krew`: `make krew URL=...`.

The archives lie below the URL, where the release publishes them.
"""

from __future__ import annotations

import argparse
import hashlib
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path

import yaml

from tools.krew.archive import PLATFORMS, REPOSITORY, Platform, build

TEMPLATE = Path(__file__).with_name("drakit.yaml")


def render(version: str, url: str, archives: Mapping[Platform, Path]) -> str:
    """Return the manifest of a version, with the checksums of its archives."""
    added = {
        "version": f"v{version}",
        "platforms": [
            {
                "selector": {"matchLabels": {"os": platform.os, "arch": platform.arch}},
                "uri": f"{url.rstrip('/')}/{archive.name}",
                "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
                "bin": "kubectl-drakit",
            }
            for platform, archive in archives.items()
        ],
    }
    of_spec = textwrap.indent(yaml.safe_dump(added, sort_keys=False, width=1000), "  ")
    return TEMPLATE.read_text() + of_spec


def semantic(version: str) -> str:
    """Return a version of Python packages as krew wants it: 0.1.0.dev0 becomes 0.1.0-dev.0."""
    release, dev, number = version.partition(".dev")
    return f"{release}-dev.{number}" if dev else release


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.krew", description=(__doc__ or "").strip())
    parser.add_argument("--url", required=True, help="the folder of the archives on the web")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "krew")
    parser.add_argument(
        "--platform",
        action="append",
        choices=[each.name for each in PLATFORMS],
        help="only this platform",
    )
    options = parser.parse_args()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    version = semantic(project["version"])
    options.folder.mkdir(parents=True, exist_ok=True)
    archives: dict[Platform, Path] = {}
    for platform in PLATFORMS:
        if options.platform and platform.name not in options.platform:
            continue
        archive = options.folder / f"kubectl-drakit-{version}-{platform.name}.tar.gz"
        build(platform, archive)
        archives[platform] = archive
        print(f"{archive} ({archive.stat().st_size / 2**20:.1f} MiB)")
    manifest = options.folder / "drakit.yaml"
    manifest.write_text(render(version, options.url, archives))
    print(manifest)


if __name__ == "__main__":
    main()
