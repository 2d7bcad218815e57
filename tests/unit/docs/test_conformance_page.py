"""docs/vendors/conformance.md: its listings run, and its rules are the kit's rules."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drakit.testing.conformance.rule import rules
from tests.unit.docs.listings import ROOT, listing, listings

PAGE = "docs/vendors/conformance.md"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A vendor's folder with the files of the page, and the driver that it speaks of."""
    (tmp_path / "lamp.py").write_text(listing("docs/vendors/python-driver.md", "lamp.py"))
    for name in ("lamps.yaml", "test_conformance.py", "test_two_claims.py"):
        (tmp_path / name).write_text(listing(PAGE, name))
    return tmp_path


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {"PATH": path}
    return subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_tests_the_driver(project):
    (console,) = listings(PAGE, "console")
    (command,) = re.findall(r"^\$ (drakit conformance .*)$", console, re.M)
    done = run(f"{command} --rule prepare", project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_suites_pass(project):
    done = run(
        "python -m pytest -q -W error --disable-plugin-autoload -p drakit.testing.plugin "
        "test_two_claims.py 'test_conformance.py::test_conformance[prepare]'",
        project,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_table_has_all_rules():
    page = (ROOT / PAGE).read_text()
    found = re.findall(r"^\| `([a-z-]+)` \| (.*?) \| (.*) \|$", page, re.M)
    assert found == [(rule.id, rule.title, rule.why) for rule in rules()]
