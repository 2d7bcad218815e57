"""
Kubernetes' own tables of tests, as JSON: its CEL selectors and its claims to allocate.

A copy of the module `k8s.io/dynamic-resource-allocation` gets a test from `dump/`, which writes a
table. The selectors are those of the newest minor release. It must not depend on what is compared
with a table.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from e2e.images.cache import ImageError, digest, kept, run
from e2e.images.go import ENVIRONMENT

MODULE = "k8s.io/dynamic-resource-allocation"
VERSIONS = {
    "1.34": "v0.34.13",
    "1.35": "v0.35.10",
    "1.36": "v0.36.6",
    "1.37": "v0.37.2",
    "1.38": "v0.38.0-alpha.0",
}
"""The versions of the module, by minor release of Kubernetes."""

SELECTORS = Path(__file__).with_name("selectors.json")
BUILD_SECONDS = 3600
"""The first build compiles about 700 packages."""

_ALLOCATIONS = "structured/internal/allocatortesting"
_LOOP = "\tfor name, tc := range testcases {\n"
_DUMP = """\
		dump(name, tc.features, tc.node, unwrap(tc.claimsToAllocate...), tc.classes, tc.slices,
			tc.allocatedDevices, tc.allocatedSharedDeviceIDs, tc.allocatedCapacityDevices,
			tc.expectResults, tc.expectError)
"""


def allocations(minor: str) -> dict[str, Any]:
    """Return the cases of the allocator's table by name."""
    return _dumped(VERSIONS[minor], _ALLOCATIONS, "allocations_test.go")


def selectors() -> str:
    """Return the content of `selectors.json`."""
    version = list(VERSIONS.values())[-1]
    cases = _dumped(version, "cel", "selectors_test.go")
    table = {"module": f"{MODULE} {version}", "cases": cases}
    return json.dumps(table, indent=1, sort_keys=True) + "\n"


def with_dump(source: str) -> str:
    """Return the file that runs the allocator's table, with a call of `dump` for each case."""
    if source.count(_LOOP) != 1:
        raise ImageError(f"the loop over the table in {_ALLOCATIONS} has changed")
    return source.replace(_LOOP, _LOOP + _DUMP)


def _dumped(version: str, package: str, test: str) -> dict[str, Any]:
    added = Path(__file__).parent / "dump" / test

    def make(folder: Path) -> None:
        what = f"the tables of {MODULE} {version}"
        download = ["go", "mod", "download", "-json", f"{MODULE}@{version}"]
        found = run(download, what=f"downloading {what}", timeout_seconds=600, cwd=folder)
        copy = folder / "module"
        # The files of Go's cache are read-only.
        shutil.copytree(json.loads(found)["Dir"], copy, copy_function=shutil.copyfile)
        for each in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
            each.chmod(0o755)
        shutil.copyfile(added, copy / package / "drakit_dump_test.go")
        if package == _ALLOCATIONS:
            runner = copy / package / "allocator_testing.go"
            runner.write_text(with_dump(runner.read_text()))
        print(f"building {what} (minutes the first time)", flush=True)
        run(
            ["go", "test", "-vet=off", "-count=1", "-run=^TestDump$", f"./{package}"],
            what=f"writing {what}",
            timeout_seconds=BUILD_SECONDS,
            cwd=copy,
            env={**ENVIRONMENT, "DUMP": str(folder / "cases.json")},
        )
        shutil.rmtree(copy)

    key = f"{version}-{digest(package, added, Path(__file__))}"
    return json.loads((kept("tables", key, make, keep=8) / "cases.json").read_text())
