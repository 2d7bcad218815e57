"""
Writes the generated pages, or checks that the committed ones are up to date.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from tools.reference import (
    attributes,
    backend_api,
    cli,
    configuration,
    host_device_policy,
    metrics,
    python_api,
    values,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
PAGES = {
    "values.md": values.page,
    "configuration.md": configuration.page,
    "metrics.md": metrics.page,
    "host-device-policy.md": host_device_policy.page,
    "attributes.md": attributes.page,
    "cli.md": cli.page,
    "python-api.md": python_api.page,
    "python-testing.md": python_api.testing_page,
    "backend-api.md": backend_api.page,
}


def differences(name: str, page: str) -> list[str]:
    """Return the required changes to a committed page, as a unified diff."""
    path = FOLDER / name
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = (old.splitlines(keepends=True), page.splitlines(keepends=True))
    return list(difflib.unified_diff(*lines, f"committed/{name}", f"generated/{name}"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the generated pages of docs/reference.")
    parser.add_argument("--check", action="store_true", help="fail if a page is not up to date")
    check = parser.parse_args().check
    pages = {name: make() for name, make in PAGES.items()}
    if not check:
        for name, page in pages.items():
            (FOLDER / name).write_text(page, encoding="utf-8")
        print(f"{len(pages)} pages written to {FOLDER.relative_to(ROOT)}")
        return 0
    changed = [line for name, page in pages.items() for line in differences(name, page)]
    sys.stdout.writelines(changed)
    if changed:
        print("pages of docs/reference are not up to date: run 'make reference'")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
