"""
The version of the project, and the files that state it.

    python -m tools.release.version                    print it in each format
    python -m tools.release.version --set 0.2.0.dev0   write it to all files
    python -m tools.release.version --tag v0.2.0       fail unless it is the version of this tag

`pyproject.toml` defines the version. All other files repeat it, and a unit test compares them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FORMAT = r"\d+\.\d+\.\d+(?:\.dev\d+)?"
"""The versions of the project: 0.2.0 is a release, and 0.2.0.dev0 is the development before it."""

GO_TAGS = "proto/go/"
"""The prefix of the Go module's tags: the folder of the module in the repository."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version of the project, in the formats of Python, semantic versioning and the site."""

    python: str
    """The Python format, such as 0.1.0.dev0: Python packages, images, and the chart's
    appVersion."""

    @property
    def semantic(self) -> str:
        """Semantic versioning, such as 0.1.0-dev.0: the chart, the krew plugin and the Go
        module."""
        return self.python.replace(".dev", "-dev.")

    @property
    def release(self) -> str:
        """The release, such as 0.1.0, even during the development of 0.1.0."""
        return self.python.partition(".dev")[0]

    @property
    def tag(self) -> str:
        return f"v{self.semantic}"

    @property
    def go_tag(self) -> str:
        return GO_TAGS + self.tag

    @property
    def site(self) -> str:
        """The folder of the site with the pages about this version: 0.1, or dev."""
        return "dev" if self.python != self.release else self.release.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Files that state the version in one format."""

    files: str
    """A pattern of `git ls-files`."""

    pattern: str
    """A regular expression. Its group is the stated version."""

    form: Callable[[Version], str]


_EXAMPLE_IMAGES = r"(?:registry\.example\.com|REGISTRY)/drakit-(?:nodeplugin|operator):([\d.]+\d)"
_SITE = r"https://drakit\.github\.io/drakit/([\w.]+)/"

PLACES = (
    Place(files="pyproject.toml", pattern=r'^version = "(.*)"$', form=lambda v: v.python),
    Place(files="charts/drakit/Chart.yaml", pattern=r"^version: (.*)$", form=lambda v: v.semantic),
    Place(
        files="charts/drakit/Chart.yaml", pattern=r'^appVersion: "(.*)"$', form=lambda v: v.python
    ),
    Place(
        files="docs/stability.md",
        pattern=r"^\| Python package, .* \| `(.*)` \| `[\d.]*` \|$",
        form=lambda v: f"{v.release}.dev0",
    ),
    Place(
        files="docs/stability.md",
        pattern=r"^\| chart, krew plugin, .* \| `(.*)` \| `[\d.]*` \|$",
        form=lambda v: f"{v.release}-dev.0",
    ),
    Place(
        files="docs/stability.md",
        pattern=r"^\| (?:Python|chart|images).* \| `([\d.]*)` \|$",
        form=lambda v: v.release,
    ),
    *(
        Place(files=files, pattern=_EXAMPLE_IMAGES, form=lambda v: v.release)
        for files in ("README.md", "docs/**/*.md", "examples/**")
    ),
    # The notes of the chart, values, alerts and `kubectl drakit doctor` link to the pages for the
    # installed version, which stay when a later version moves or changes them.
    *(
        Place(files=files, pattern=_SITE, form=lambda v: v.site)
        for files in ("charts/drakit/**", "cli/**/*.py")
    ),
    Place(
        files="docs/vendors/go-backend.md",
        pattern=r"(?:--version |backend@)(v[\d.]+\d)",
        form=lambda v: f"v{v.release}",
    ),
)


def current() -> Version:
    """Return the version of this clone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return Version(python=project["version"])


def rewritten(place: Place, version: Version) -> Iterator[tuple[Path, str]]:
    """Yield the files of a place with their content for a version. Each place has at least one."""
    found = False
    for path in _listed(place.files):
        text = path.read_text()
        if re.search(place.pattern, text, re.MULTILINE):
            found = True
            yield path, _replaced(text, place, version)
    if not found:
        raise LookupError(f"{place.files}: nothing matches {place.pattern}")


def _replaced(text: str, place: Place, version: Version) -> str:
    def replacement(match: re.Match[str]) -> str:
        start, end = match.start(1) - match.start(), match.end(1) - match.start()
        return match[0][:start] + place.form(version) + match[0][end:]

    return re.sub(place.pattern, replacement, text, flags=re.MULTILINE)


def _listed(files: str) -> Sequence[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z", "--", f":(glob){files}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in done.stdout.split("\0") if name]


def write(version: Version) -> None:
    """Write a version to all files that state it."""
    for place in PLACES:
        for path, text in rewritten(place, version):
            path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tools.release.version", description="The version of the project."
    )
    parser.add_argument("--set", metavar="VERSION", help="write this version to all files")
    parser.add_argument("--tag", help="fail unless the version is that of this tag")
    given = parser.parse_args()
    if given.set:
        if not re.fullmatch(FORMAT, given.set):
            parser.error(f"{given.set} is not a version such as 0.2.0 or 0.2.0.dev0")
        write(Version(python=given.set))
    version = current()
    if given.tag and given.tag != version.tag:
        sys.exit(f"the tag is {given.tag}, but the version in pyproject.toml is {version.python}")
    for name in ("python", "semantic", "tag", "go_tag", "site"):
        print(f"{name:<10}{getattr(version, name)}")


if __name__ == "__main__":
    main()
