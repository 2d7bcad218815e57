"""
The files of a release that are written from the sources: the chart's package, the release notes and
the checksums. Equal sources result in equal files.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tools.krew.archive import write
from tools.release.version import ROOT, Version
from tools.site.links import is_external, replace_links
from tools.site.source import MARKER, changes, config

CHART = ROOT / "charts" / "drakit"
NOTES = ROOT / "docs" / "release-notes.md"
CHECKSUMS = "SHA256SUMS"


def write_chart(
    folder: Path, version: Version, *, repository: str, digests: Mapping[str, str]
) -> Path:
    """
    Write the package of the chart, with images that are pinned by digest.

    :param repository: the prefix of the image names, as in the value `image.repository`.
    :param digests: the digest of each component's image, such as `sha256:...`.
    """
    package = folder / f"drakit-{version.semantic}.tgz"
    with tempfile.TemporaryDirectory() as scratch:
        chart = Path(scratch, "drakit")
        shutil.copytree(CHART, chart)
        values = chart / "values.yaml"
        values.write_text(pinned(values.read_text(), repository=repository, digests=digests))
        write(package, Path(scratch))
    return package


def pinned(values: str, *, repository: str, digests: Mapping[str, str]) -> str:
    """Return the content of values.yaml with the repository and the digests as its defaults."""
    section = re.search(r"^image:\n(?:(?: .*)?\n)+", values, re.MULTILINE)
    if section is None:
        raise LookupError("values.yaml does not have the section image")
    text = section[0]
    for key, value in {"repository": repository, **digests}.items():
        text, count = re.subn(rf'^( +{key}: )""$', rf'\g<1>"{value}"', text, flags=re.MULTILINE)
        if count != 1:
            raise LookupError(f"values.yaml has {count} empty values named {key} in image, not 1")
    return values.replace(section[0], text)


def release_notes(version: Version) -> str:
    """Return the section of a release in the release notes, with the changes since the last one."""
    page = NOTES.read_text().replace(MARKER, changes())
    _, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    heading = re.compile(rf"(?:{re.escape(version.release)}\b|Next release$)", re.MULTILINE)
    found = [section.partition("\n")[2].strip() for section in sections if heading.match(section)]
    if not found:
        raise LookupError(f"{NOTES.name} does not have a section for {version.release}")
    text = "\n\n".join(found) + "\n"
    return replace_links(text, lambda target: _address(target, version))


def _address(target: str, version: Version) -> str:
    """Return the URL of a link's target, because release notes are read outside the site."""
    path, mark, anchor = target.partition("#")
    if is_external(target):
        return target
    if path.startswith("../"):
        return f"{config()['repo_url']}/blob/{version.tag}/{path.removeprefix('../')}{mark}{anchor}"
    page = re.sub(r"(?:^|(?<=/))index\.md$", "", path) if path else "release-notes/"
    page = re.sub(r"\.md$", "/", page)
    return f"{config()['site_url']}{version.site}/{page}{mark}{anchor}"


def write_checksums(folder: Path) -> Path:
    """Write the checksums of all files in a folder, in the format of `sha256sum`."""
    lines: list[str] = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != CHECKSUMS:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(folder).as_posix()}\n")
    target = folder / CHECKSUMS
    target.write_text("".join(lines))
    return target
