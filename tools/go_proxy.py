"""
Writes the Go module of the backend contract as a module proxy in a folder: `python -m
tools.go_proxy FOLDER --version v0.1.0`.

With it, a vendor can use the module before it has a release: `GOPROXY=file://FOLDER,...`. The
layout follows the GOPROXY protocol, and the archive follows the rules of golang.org/x/mod/zip.
"""

from __future__ import annotations

import argparse
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tools.generate_proto import GO_MODULE
from tools.release.version import current

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto" / "go"

DAY = "2026-01-01T00:00:00Z"
"""The fixed time of a version, so that equal sources result in equal files."""


def write_proxy(folder: Path, *, version: str) -> Path:
    """Add a version of the module to the proxy in a folder. Return the archive."""
    versions = folder / GO_MODULE / "@v"
    versions.mkdir(parents=True, exist_ok=True)
    (versions / f"{version}.info").write_text(json.dumps({"Version": version, "Time": DAY}))
    (versions / f"{version}.mod").write_bytes((SOURCES / "go.mod").read_bytes())
    archive = versions / f"{version}.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writer:
        for name, path in _files():
            # The entry has no time, because it would be that of the file.
            entry = zipfile.ZipInfo(f"{GO_MODULE}@{version}/{name}")
            entry.compress_type = zipfile.ZIP_DEFLATED
            writer.writestr(entry, path.read_bytes())
    known = {path.stem for path in versions.glob("*.zip")}
    (versions / "list").write_text("".join(f"{each}\n" for each in sorted(known)))
    return archive


def _files() -> Iterator[tuple[str, Path]]:
    """Yield the files of the module. A module in a subfolder has the license of its repository."""
    yield "LICENSE", ROOT / "LICENSE"
    for path in sorted(SOURCES.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(SOURCES)), path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.go_proxy", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", default=current().tag, help="such as v0.1.0")
    arguments = parser.parse_args()
    if not re.fullmatch(r"v[01]\.\d+\.\d+(-[0-9A-Za-z.-]+)?", arguments.version):
        parser.error(f"--version {arguments.version} is not a version such as v0.1.0")
    write_proxy(arguments.folder, version=arguments.version)
    proxy = arguments.folder.resolve().as_uri()
    module = f"{GO_MODULE}@{arguments.version}"
    print(
        f"{module} is in {arguments.folder}. To use it in your module, run:\n\n"
        f"  go mod edit -dropreplace {GO_MODULE} -require {module}\n"
        f'  GOPROXY="{proxy},$(go env GOPROXY)" GONOSUMDB={GO_MODULE} go get {module}'
    )


if __name__ == "__main__":
    main()
