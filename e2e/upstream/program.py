"""
The programs of the suite, built from the Go module in `suite/` into the cache.

A minor release of Kubernetes has its own go.mod and go.sum there. It must not know clusters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from e2e.images.cache import ImageError, digest, kept, run

SUITE = Path(__file__).with_name("suite")
DEFAULT_MINOR = "1.36"
BUILD_SECONDS = 3600
"""The first build compiles about 1500 packages."""


@dataclass(frozen=True, kw_only=True)
class Programs:
    """The built programs of one minor release."""

    version: str
    """Such as v1.36.3."""

    folder: Path
    """Has the suite, and the programs of its pods."""

    @property
    def suite(self) -> Path:
        return self.folder / "dra.test"


def module_file(minor: str, folder: Path = SUITE) -> Path:
    """Return the go.mod of a minor release; raise ImageError if there is none."""
    path = folder / ("go.mod" if minor == DEFAULT_MINOR else f"go-{minor}.mod")
    if not path.exists():
        known = ", ".join(minors(folder))
        raise ImageError(f"there is no suite of Kubernetes {minor}; KUBERNETES can be: {known}")
    return path


def minors(folder: Path = SUITE) -> list[str]:
    """The minor releases whose suite can be built."""
    others = (path.stem.removeprefix("go-") for path in folder.glob("go-*.mod"))
    return [DEFAULT_MINOR, *sorted(others)]


def required_version(module: Path) -> str:
    """Return the version of k8s.io/kubernetes that a go.mod requires."""
    found = re.search(r"^\s*k8s\.io/kubernetes (v\S+)", module.read_text(), re.MULTILINE)
    if found is None:
        raise ImageError(f"{module} does not require k8s.io/kubernetes")
    return found[1]


def programs(minor: str) -> Programs:
    """Return the programs; they are built if they are not in the cache."""
    module = module_file(minor)
    compiler = run(["go", "-C", SUITE, "env", "GOVERSION"], what="asking Go", timeout_seconds=60)
    sources = [module, module.with_suffix(".sum"), *sorted(SUITE.rglob("*.go")), Path(__file__)]

    def make(folder: Path) -> None:
        print(f"building the suite of Kubernetes {minor} (minutes the first time)", flush=True)
        common = ("-trimpath", "-ldflags=-s -w", f"-modfile={module}")
        env = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"}
        for what, command in (
            ("the suite", ("test", "-c", *common, "-o", folder / "dra.test", ".")),
            (
                "the programs of its pods",
                ("build", *common, "-o", f"{folder}/", "tool", "./hostpathplugin"),
            ),
        ):
            argv = ["go", "-C", SUITE, *command]
            run(argv, what=f"building {what}", timeout_seconds=BUILD_SECONDS, env=env)

    folder = kept("upstream", f"{minor}-{digest(compiler, *sources)}", make, keep=4)
    return Programs(version=required_version(module), folder=folder)
