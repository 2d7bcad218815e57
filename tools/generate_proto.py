"""
Regenerate the stubs of ``proto/``, or check that the committed ones are what would be generated.

Module names follow the file's path and not its package, so every .proto has a path of its own;
stubs import each other from the root of ``proto/`` and need no editing afterwards. They are
committed: nobody who installs drakit needs the generator.

It must not know what the contracts mean.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def stubs(folder: Path) -> dict[Path, str]:
    """Read all generated files below a folder, by their path within it."""
    found = (path for pattern in PATTERNS for path in folder.rglob(pattern))
    return {path.relative_to(folder): path.read_text() for path in sorted(found)}


def generate(target: Path) -> None:
    """Run the generator for all .proto files at once."""
    protos = sorted(SOURCES.rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCES}"]
    command += [f"--{kind}_out={target}" for kind in ("python", "grpc_python")]
    command += [f"--{kind}_out={target}" for kind in ("mypy", "mypy_grpc")]
    command += [str(path.relative_to(SOURCES)) for path in protos]
    # The mypy plugins are programs beside the interpreter, which need not be in PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        command,
        cwd=SOURCES,
        env={**os.environ, "PATH": path},
        timeout=120,
        check=False,
        text=True,
        capture_output=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"the generator failed:\n{done.stdout}{done.stderr}")


def differences(old: dict[Path, str], new: dict[Path, str]) -> list[str]:
    """Say what differs, as unified diffs."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a stub is not up to date")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = stubs(Path(folder))
    old = stubs(SOURCES)
    if check:
        lines = differences(old, fresh)
        if old.keys() != fresh.keys() or lines:
            sys.stdout.writelines(lines)
            print("stubs of proto/ are not what the generator makes: run 'make proto'")
            return 1
        return 0
    for path in old.keys() - fresh.keys():
        (SOURCES / path).unlink()
    for path, text in fresh.items():
        (SOURCES / path).write_text(text)
    print(f"{len(fresh)} stubs written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
