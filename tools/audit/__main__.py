"""
Searches the pinned requirements and the Go modules for known vulnerabilities: `make audit`.

pip-audit queries the package index, and govulncheck queries vuln.go.dev. A database that cannot be
reached is reported, and fails the run only with `--required`. `make check-workflows` runs
actionlint on the workflows of CI.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from e2e.images.cache import ImageError
from tools.programs import go_is_there, go_programs

ROOT = Path(__file__).resolve().parents[2]

MODULES = ("proto/go", "examples/backend", "operator/cel")
"""The Go modules with programs or packages that run in clusters."""

UNREACHABLE = (
    "ConnectionError",
    "ConnectTimeout",
    "connection refused",
    "dial tcp",
    "Max retries exceeded",
    "no such host",
    "Service Unavailable",
    "fetching vulnerabilities",
)
"""Strings in the output of both programs if their database cannot be reached."""


def check_workflows() -> int:
    if not go_is_there():
        print("Go is not installed: the workflows are not checked")
        return 0
    return subprocess.run([go_programs("audit") / "actionlint"], cwd=ROOT, check=False).returncode


def check_vulnerabilities(pip_audit: Path, *, required: bool) -> int:
    """Run both programs. Return 1 if there is a finding, or if a required database is
    unreachable."""
    failed = False
    for name, argv, folder in _commands(pip_audit):
        done = subprocess.run(
            argv, cwd=folder, capture_output=True, text=True, timeout=900, check=False
        )
        output = f"{done.stdout}{done.stderr}".strip()
        if done.returncode == 0:
            print(f"{name}: no known vulnerabilities", flush=True)
        elif any(text in output for text in UNREACHABLE):
            print(f"{name}: not checked, because the database cannot be reached", flush=True)
            failed |= required
        else:
            print(f"{name}:\n{output}", flush=True)
            failed = True
    return int(failed)


def _commands(pip_audit: Path) -> list[tuple[str, list[str], Path]]:
    found = [
        (
            str(path.relative_to(ROOT)),
            [
                str(pip_audit),
                "--progress-spinner=off",
                "--disable-pip",
                "--require-hashes",
                f"-r{path}",
            ],
            ROOT,
        )
        for path in sorted((ROOT / "requirements").glob("*.txt"))
    ]
    if not go_is_there():
        print("Go is not installed: the Go modules are not checked")
        return found
    govulncheck = go_programs("audit") / "govulncheck"
    return [*found, *((module, [str(govulncheck), "./..."], ROOT / module) for module in MODULES)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.audit", description=(__doc__ or "").strip())
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("workflows", help="check the workflows of CI")
    audit = commands.add_parser("vulnerabilities", help="search for known vulnerabilities")
    audit.add_argument("--pip-audit", type=Path, required=True, help="the program")
    audit.add_argument(
        "--required", action="store_true", help="fail if a database cannot be reached"
    )
    given = parser.parse_args()
    try:
        if given.command == "workflows":
            return check_workflows()
        return check_vulnerabilities(given.pip_audit.absolute(), required=given.required)
    except ImageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
