"""
One program with the explainer's helper for several minor releases of Kubernetes.

Each release has its own packages of Kubernetes and of CEL, because they determine the scheduler's
decisions. A Go program has only one version of an import path, so the packages of a release get the
release's name as a prefix: `k8s.io/api` of 1.36 becomes `drakit.dev/operator/cel/v136/k8s.io/api`.
All releases share Go's runtime and the other modules, in the newest version that any of them needs.
So the program for four releases has half the size of four programs. It derives the release from its
own name.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from e2e.images.cache import digest, kept, run
from e2e.images.go import BUILD_SECONDS, CEL_SOURCES, ENVIRONMENT, KEPT, LINKED, cel_flags

MODULE = "drakit.dev/operator/cel"
OWN = ("k8s.io/", "sigs.k8s.io/", "github.com/google/cel-go/")
"""Prefixes of the packages that differ between the releases."""

IMPORT = re.compile(
    rf'^((?:import )?\s*(?:[\w.]+ )?)"((?:{"|".join(map(re.escape, OWN))})[^"]*"\s*(?://.*)?)$',
    re.M,
)
REQUIRED = re.compile(r"^\s+(\S+) (v\S+)", re.M)

MAIN = """package main

import (
	"os"
	"strings"

{imports}
)

func main() {{
	switch name := os.Args[0]; {{
{cases}
	default:
		{newest}.Main()
	}}
}}
"""


def combined_programs(minors: Sequence[str], *, platform: str = "") -> Path:
    """
    Return a folder with the program, under the name `drakit-cel-MINOR` for each release.

    :param platform: such as linux/arm64; by default that of this machine.
    :raises ImageError: Go is missing, or the sources are invalid.
    """
    go = run(["go", "env", "GOVERSION"], what="asking Go's version", timeout_seconds=60)
    sources = [*CEL_SOURCES.glob("*.go"), *CEL_SOURCES.glob("go*.mod"), *CEL_SOURCES.glob("*.sum")]
    parts = (part for path in sorted(sources) for part in (path.name, path))
    native = run(
        ["go", "env", "GOHOSTOS", "GOHOSTARCH"], what="asking Go's platform", timeout_seconds=60
    ).split()
    system, architecture = platform.split("/") if platform else native
    environment = ENVIRONMENT | {"GOOS": system, "GOARCH": architecture}
    key = digest(go, Path(__file__), *environment.values(), *minors, *parts)
    return kept(
        "backends", f"cel-{key}", lambda folder: _build(folder, minors, environment), keep=KEPT
    )


def _build(folder: Path, minors: Sequence[str], environment: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix="drakit-cel-") as scratch:
        sources = Path(scratch)
        versions = [_copy_release(sources, minor, environment) for minor in minors]
        required: dict[str, str] = {}
        sums: set[str] = set()
        for minor in minors:
            file = _module_file(minor)
            sums |= set(file.with_suffix(".sum").read_text().splitlines())
            for module, version in REQUIRED.findall(file.read_text()):
                if not f"{module}/".startswith(OWN):
                    required[module] = max(required.get(module, ""), version, key=_order)
        (go,) = re.findall(r"^go .*", _module_file(minors[-1]).read_text(), re.M)
        lines = (f"require {module} {version}\n" for module, version in required.items())
        (sources / "go.mod").write_text(f"module {MODULE}\n\n{go}\n\n{''.join(lines)}")
        (sources / "go.sum").write_text("".join(f"{line}\n" for line in sorted(sums)))
        (sources / "main.go").write_text(_main(minors))
        names = " ".join(
            f"-X {MODULE}/{_prefix(minor)}/helper.linked={version}"
            for minor, version in zip(minors, versions, strict=True)
        )
        program = folder / f"drakit-cel-{minors[-1]}"
        run(
            ["go", "build", f"{LINKED} {names}", "-o", program, "."],
            what="building the helper for several releases of Kubernetes",
            timeout_seconds=BUILD_SECONDS,
            cwd=sources,
            env=environment,
        )
    for minor in minors[:-1]:
        (folder / f"drakit-cel-{minor}").symlink_to(program.name)


def _copy_release(sources: Path, minor: str, environment: dict[str, str]) -> str:
    """Copy the helper and the packages of a release, and return the release's version."""
    listed = run(
        [
            "go",
            "list",
            *cel_flags(minor),
            "-deps",
            "-json=ImportPath,Dir,GoFiles,EmbedFiles,Module",
            ".",
        ],
        what=f"listing the packages of the helper for Kubernetes {minor}",
        timeout_seconds=BUILD_SECONDS,
        cwd=CEL_SOURCES,
        env=environment,
    )
    version = ""
    prefix = f"{MODULE}/{_prefix(minor)}"
    for package in _objects(listed):
        path = package["ImportPath"]
        if path == MODULE:
            target = sources / _prefix(minor) / "helper"
        elif path.startswith(OWN):
            target = sources / _prefix(minor) / path
        else:
            continue
        if path.startswith("k8s.io/dynamic-resource-allocation/"):
            version = package["Module"]["Version"].replace("v0.", "1.", 1)
        target.mkdir(parents=True, exist_ok=True)
        for name in package.get("EmbedFiles", ()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(package["Dir"], name), target / name)
        for name in package["GoFiles"]:
            text = Path(package["Dir"], name).read_text()
            text = IMPORT.sub(rf'\1"{prefix}/\2', text)
            if path == MODULE:
                text = re.sub(r"^//go:build .*\n", "", text, flags=re.M)
                text = re.sub(r"^package main$", "package helper", text, flags=re.M)
                text = re.sub(r"^func main\(\)", "func Main()", text, flags=re.M)
            (target / name).write_text(text)
    return version


def _main(minors: Sequence[str]) -> str:
    names = [_prefix(minor) for minor in minors]
    return MAIN.format(
        imports="\n".join(f'\t{name} "{MODULE}/{name}/helper"' for name in names),
        cases="\n".join(
            f'\tcase strings.HasSuffix(name, "-{minor}"):\n\t\t{name}.Main()'
            for minor, name in zip(minors, names, strict=True)
        ),
        newest=names[-1],
    )


def _prefix(minor: str) -> str:
    return f"v{minor.replace('.', '')}"


def _module_file(minor: str) -> Path:
    flags = [flag for flag in cel_flags(minor) if flag.startswith("-modfile=")]
    return CEL_SOURCES / (flags[0].removeprefix("-modfile=") if flags else "go.mod")


def _order(version: str) -> list[int]:
    """Return the order of a Go module version, for the versions that these modules have."""
    return [int(number) for number in re.findall(r"\d+", version)]


def _objects(text: str) -> Iterator[dict[str, object]]:
    decoder, position = json.JSONDecoder(), 0
    while position < len(text.rstrip()):
        found, position = decoder.raw_decode(text, position)
        yield found
        while position < len(text) and text[position].isspace():
            position += 1
