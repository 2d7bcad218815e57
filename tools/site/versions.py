"""
The versions of the published site: a folder for each, and the list that the version selector reads.

    python -m tools.site.versions FOLDER --tag v0.2.1    add the built site to the published ones

    0.2/  latest/  dev/     one built site each; an alias is a copy, as not every host has symlinks
    versions.json           the entries of the version selector
    index.html              leads to `latest`, or to `dev` before the first release
    404.html                that of the same version: GitHub Pages shows it for every missing page

Zensical does not support versions yet, but its theme reads the list that mike writes. This module
writes the same list, without mike, which supports Zensical only in a Git branch. It needs only the
standard library, because the job that publishes can write to the repository.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

HTML = Path(__file__).resolve().parents[2] / "build" / "docs" / "html"
"""The built site."""

NAME = re.compile(r"[0-9]+\.[0-9]+|dev")
REDIRECT = """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <title>drakit</title>
    <meta http-equiv="refresh" content="0; url={target}/">
    <link rel="canonical" href="{target}/">
  </head>
  <body><a href="{target}/">drakit's documentation</a></body>
</html>
"""


def publish(html: Path, *, site: Path, version: str, aliases: list[str]) -> None:
    """Copy a built site into the published one, as a version and as its aliases."""
    if not NAME.fullmatch(version):
        raise SystemExit(f"{version}: a version of the site is X.Y or dev")
    site.mkdir(parents=True, exist_ok=True)
    for name in (version, *aliases):
        shutil.rmtree(site / name, ignore_errors=True)
        shutil.copytree(html, site / name)
    file = site / "versions.json"
    known = json.loads(file.read_text()) if file.exists() else []
    listed = with_version(known, version, aliases)
    file.write_text(json.dumps(listed, indent=2) + "\n")
    targets = {name for entry in listed for name in entry["aliases"]}
    target = "latest" if "latest" in targets else listed[0]["version"]
    (site / "index.html").write_text(REDIRECT.format(target=target))
    shutil.copy(site / target / "404.html", site)
    (site / ".nojekyll").touch()  # GitHub Pages hides folders that start with an underscore


def with_version(
    known: list[dict[str, Any]], version: str, aliases: list[str]
) -> list[dict[str, Any]]:
    """Return the list with a version added or replaced. An alias belongs to only one version."""
    others = [
        {**entry, "aliases": [name for name in entry["aliases"] if name not in aliases]}
        for entry in known
        if entry["version"] != version
    ]
    own = {name for entry in known if entry["version"] == version for name in entry["aliases"]}
    new = {"version": version, "title": version, "aliases": sorted(own | {*aliases})}
    return sorted([*others, new], key=_rank, reverse=True)


def _rank(entry: dict[str, Any]) -> tuple[float, float]:
    if entry["version"] == "dev":
        return (-1, 0)
    major, minor = entry["version"].split(".")
    return (int(major), int(minor))


def newest(known: list[dict[str, Any]], version: str) -> bool:
    """Return whether no published version is newer, so that `latest` moves to this one."""
    rank = _rank({"version": version})
    return all(_rank(entry) <= rank for entry in known)


def version_of(tag: str | None) -> str:
    """Return the site's version for the tag of a release, or for no tag."""
    if not tag:
        return "dev"
    found = re.fullmatch(r"v(\d+\.\d+)\.\d+", tag)
    if found is None:
        raise SystemExit(f"{tag}: a tag that publishes the site is vX.Y.Z")
    return found[1]


def publish_tag(html: Path, site: Path, tag: str | None) -> None:
    """Publish a release as X.Y, and as `latest` if no newer one is published. Without a tag,
    publish `dev`."""
    version, aliases = version_of(tag), []
    if tag:
        file = site / "versions.json"
        known = json.loads(file.read_text()) if file.exists() else []
        aliases = ["latest"] if newest(known, version) else []
    publish(html, site=site, version=version, aliases=aliases)
    print("published", version, *aliases)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tools.site.versions", description="Add the built site to the published versions."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", help="vX.Y.Z of a release; without it the version is dev")
    given = parser.parse_args()
    publish_tag(HTML, given.folder, given.tag)


if __name__ == "__main__":
    main()
