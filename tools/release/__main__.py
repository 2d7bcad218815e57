"""
Builds a release in a folder: `make release-dry-run`.

The build needs no registry and no key. All files depend only on the sources and on pinned
requirements: two runs write equal files, and `--compare FOLDER` fails if their checksums differ.

    drakit-VERSION.tar.gz, *.whl        the Python packages: sources, and wheels for each platform
    images/drakit-COMPONENT/            an OCI layout with the images for amd64 and arm64
    drakit-VERSION.tgz                  the chart, with the digests of these images
    kubectl-drakit-*.tar.gz             the archives of the krew plugin; drakit.yaml is its manifest
    sbom/*.cdx.json                     the contents of images and archives (CycloneDX)
    RELEASE-NOTES.md, SHA256SUMS
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

from drakit_cli.package import MACHINES
from e2e.images.cache import ImageError, run
from e2e.images.go import cel_programs
from tools import wheel
from tools.krew.__main__ import write_archives
from tools.krew.archive import PLATFORMS
from tools.programs import go_programs
from tools.release.files import CHECKSUMS, release_notes, write_chart, write_checksums
from tools.release.images import AssemblyError, write_layouts
from tools.release.version import ROOT, current
from tools.site.source import config


class Build:
    """A release that is being built in a folder."""

    def __init__(self, folder: Path, *, architectures: Iterable[str], repository: str) -> None:
        self._folder = folder
        self._architectures = tuple(architectures)
        self._repository = repository
        self._version = current()
        self._began = time.monotonic()

    def run(self) -> None:
        """
        Build all files.

        :raises ImageError: a part cannot be built.
        :raises AssemblyError: an image for arm64 lacks a file.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        with self._step("Python packages"):
            self._write_packages()
        with self._step("images"):
            digests = write_layouts(
                self._folder / "images", architectures=self._architectures, report=self._report
            )
        with self._step("chart"):
            write_chart(self._folder, self._version, repository=self._repository, digests=digests)
        with self._step("krew archives"):
            self._write_krew()
        with self._step("SBOMs"):
            self._write_sboms()
        (self._folder / "RELEASE-NOTES.md").write_text(release_notes(self._version))
        write_checksums(self._folder)
        self._report(f"{self._version.python} is in {self._folder}")

    def _write_packages(self) -> None:
        wheel.hatchling("sdist", self._folder)
        wheel.hatchling("wheel", self._folder)
        for architecture in self._architectures:
            programs = cel_programs(platform=f"linux/{architecture}")
            wheel.build(programs, self._folder, machine=MACHINES[architecture])

    def _write_krew(self) -> None:
        url = f"{config()['repo_url']}/releases/download/{self._version.tag}"
        complete = set(self._architectures) == set(MACHINES)
        platforms = [
            each
            for each in PLATFORMS
            if complete or (each.os == "linux" and each.arch in self._architectures)
        ]
        write_archives(self._folder, url, platforms)

    def _write_sboms(self) -> None:
        syft = go_programs("sbom") / "syft"
        target = self._folder / "sbom"
        target.mkdir()
        for layout in sorted((self._folder / "images").iterdir()):
            for architecture in self._architectures:
                name = f"{layout.name}-{architecture}"
                self._scan(syft, f"oci-dir:{layout}", name, f"--platform=linux/{architecture}")
        for archive in sorted(self._folder.glob("kubectl-drakit-*.tar.gz")):
            with tempfile.TemporaryDirectory() as scratch:
                with tarfile.open(archive) as tar:
                    tar.extractall(scratch, filter="data")
                name = archive.name.removesuffix(".tar.gz")
                self._scan(syft, f"dir:{scratch}", name)

    def _scan(self, syft: Path, source: str, name: str, *options: str) -> None:
        """Write the contents of a source, without the time and the number of this run."""
        output = run(
            [
                *(syft, "scan", source, "--quiet", "--output=cyclonedx-json"),
                *(f"--source-name={name}", f"--source-version={self._version.python}", *options),
            ],
            what=f"writing the SBOM of {name}",
            timeout_seconds=900,
            env={"SYFT_CHECK_FOR_APP_UPDATE": "false"},
        )
        found = json.loads(output)
        found.pop("serialNumber", None)
        found["metadata"].pop("timestamp", None)
        if source.startswith("dir:"):
            # An archive contains each package once for each Python version, and syft links any of
            # them. The reference is derived from the path, which is temporary.
            found.pop("dependencies", None)
            found["metadata"]["component"].pop("bom-ref", None)
        file = self._folder / "sbom" / f"{name}.cdx.json"
        file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")

    @contextmanager
    def _step(self, title: str):
        began = time.monotonic()
        yield
        self._report(f"{title}: {time.monotonic() - began:.0f} s")

    def _report(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:4.0f} s] {text}", flush=True)


def differences(one: Path, other: Path) -> list[str]:
    """Return the files of two releases that differ, by their checksums."""
    first, second = _checksums(one), _checksums(other)
    return sorted(name for name in first | second if first.get(name) != second.get(name))


def _checksums(folder: Path) -> Mapping[str, str]:
    lines = (folder / CHECKSUMS).read_text().splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.release", description=(__doc__ or "").strip())
    parser.add_argument("--folder", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--repository",
        default="ghcr.io/drakit/drakit",
        help="the prefix of the image names that the chart has",
    )
    parser.add_argument(
        "--architecture",
        action="append",
        choices=tuple(MACHINES),
        help="only this one, and only for Linux; by default all",
    )
    parser.add_argument(
        "--compare", type=Path, help="fail if the release in this folder is not equal"
    )
    given = parser.parse_args()
    folder = given.folder.absolute()
    try:
        Build(
            folder,
            architectures=given.architecture or tuple(MACHINES),
            repository=given.repository,
        ).run()
    except (ImageError, AssemblyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if given.compare is not None:
        different = differences(given.compare, folder)
        if different:
            print("error: these files differ: " + ", ".join(different), file=sys.stderr)
            return 1
        print(f"{folder} and {given.compare} have equal checksums")
    return 0


if __name__ == "__main__":
    sys.exit(main())
