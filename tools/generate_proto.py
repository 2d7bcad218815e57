"""
Regenerates the stubs of ``proto/``, or checks that the committed ones are up to date.

Module names follow the path of a file, not its package, so every .proto file has a unique path.
Stubs import each other from the root of ``proto/``, and need no editing after the generation. They
are committed, so that users of drakit do not need the generator. The Go stubs of the backend
contract are generated here as well, with the same protoc. Without Go, they stay unchanged.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.programs import go_is_there, go_programs, path_with

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
BACKEND = "drakit_proto/backend/v1/backend.proto"
GO_MODULE = "drakit.dev/backend"
"""The module in `proto/go`. The package in it is the `go_package` of the contract."""


@dataclass(frozen=True, kw_only=True)
class Stubs:
    """The stubs of one language: their location, and the function that generates them in another
    folder."""

    folder: Path
    patterns: tuple[str, ...]
    generate: Callable[[Path], None]

    def read(self, folder: Path) -> dict[Path, str]:
        """Read all generated files below a folder, keyed by their path within it."""
        found = (path for pattern in self.patterns for path in folder.rglob(pattern))
        return {path.relative_to(folder): path.read_text() for path in sorted(found)}


def protoc(arguments: Sequence[str], *, path: str) -> None:
    """Run the protoc of grpcio-tools."""
    done = subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCES}", *arguments],
        cwd=SOURCES,
        env={**os.environ, "PATH": path},
        timeout=120,
        check=False,
        text=True,
        capture_output=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"the generator failed:\n{done.stdout}{done.stderr}")


def generate_python(target: Path) -> None:
    """Run the generator for all .proto files at once."""
    protos = sorted(SOURCES.rglob("*.proto"))
    arguments = [f"--{kind}_out={target}" for kind in ("python", "grpc_python")]
    arguments += [f"--{kind}_out={target}" for kind in ("mypy", "mypy_grpc")]
    arguments += [str(path.relative_to(SOURCES)) for path in protos]
    # The mypy plugins are programs next to the interpreter, which need not be in PATH.
    protoc(arguments, path=path_with(Path(sys.executable).parent))


def generate_go(target: Path) -> None:
    """Write the stubs of the backend contract."""
    arguments = [f"--{kind}_out={target}" for kind in ("go", "go-grpc")]
    arguments += [f"--{kind}_opt=module={GO_MODULE}" for kind in ("go", "go-grpc")]
    protoc([*arguments, BACKEND], path=path_with(go_programs("generators")))


PYTHON = Stubs(
    folder=SOURCES,
    patterns=("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi"),
    generate=generate_python,
)
GO = Stubs(folder=SOURCES / "go", patterns=("*.pb.go",), generate=generate_go)


def differences(old: dict[Path, str], new: dict[Path, str]) -> list[str]:
    """Return the differences as unified diffs."""
    lines: list[str] = []
    for path in sorted(old.keys() | new.keys()):
        before, after = old.get(path, ""), new.get(path, "")
        if before != after or (path in old) != (path in new):
            lines += difflib.unified_diff(
                before.splitlines(keepends=True),
                after.splitlines(keepends=True),
                f"committed/{path}" if path in old else "/dev/null",
                f"generated/{path}" if path in new else "/dev/null",
            )
    return lines


def up_to_date(stubs: Stubs, *, write: bool) -> bool:
    """Return whether the committed stubs are up to date, or write them."""
    with tempfile.TemporaryDirectory() as folder:
        stubs.generate(Path(folder))
        fresh = stubs.read(Path(folder))
    old = stubs.read(stubs.folder)
    if not write:
        sys.stdout.writelines(differences(old, fresh))
        return old == fresh
    for path in old.keys() - fresh.keys():
        (stubs.folder / path).unlink()
    for path, text in fresh.items():
        (stubs.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (stubs.folder / path).write_text(text)
    print(f"{len(fresh)} stubs written below {stubs.folder.relative_to(ROOT)}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a stub is not up to date")
    check = parser.parse_args().check
    languages = [PYTHON]
    if go_is_there():
        languages.append(GO)
    else:
        print("Go is not installed: the stubs in proto/go stay unchanged")
    results = [up_to_date(stubs, write=not check) for stubs in languages]
    if all(results):
        return 0
    print("stubs are not what the generator makes: run 'make proto'")
    return 1


if __name__ == "__main__":
    sys.exit(main())
