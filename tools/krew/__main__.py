"""
Builds the krew plugin in `build/krew`: `make krew URL=...`.

The manifest expects the archives below the URL, where the release publishes them.
"""

from __future__ import annotations

import argparse
import hashlib
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from tools.krew.archive import PLATFORMS, REPOSITORY, Platform, build
from tools.release.version import current

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


def write_archives(
    folder: Path, url: str, platforms: Iterable[Platform] = PLATFORMS
) -> dict[Platform, Path]:
    """Write the archives of platforms and their manifest, with the address of their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    version = current().semantic
    archives: dict[Platform, Path] = {}
    for platform in platforms:
        archive = folder / f"kubectl-drakit-{version}-{platform.name}.tar.gz"
        build(platform, archive)
        archives[platform] = archive
    (folder / "drakit.yaml").write_text(render(version, url, archives))
    return archives


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
    wanted = options.platform or [each.name for each in PLATFORMS]
    platforms = [each for each in PLATFORMS if each.name in wanted]
    for archive in write_archives(options.folder, options.url, platforms).values():
        print(f"{archive} ({archive.stat().st_size / 2**20:.1f} MiB)")
    print(options.folder / "drakit.yaml")


if __name__ == "__main__":
    main()
