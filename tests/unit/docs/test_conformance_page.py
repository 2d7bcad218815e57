"""docs/vendors/conformance.md: its listings run, and its rules are the kit's rules."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drakit.testing.conformance.rules import rules
from drakit.testing.conformance.targets import parse_target
from tests.unit.docs.listings import ROOT, commands, listing

PAGE = "docs/vendors/conformance.md"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A vendor's folder with the files of the page, and the driver that it speaks of."""
    (tmp_path / "lamp.py").write_text(listing("docs/vendors/driver-contract.md", "lamp.py"))
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
    (command,) = [line for line in commands(PAGE) if "lamp:Lamps" in line]
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


@pytest.mark.parametrize(
    ("page", "kind"),
    [(PAGE, "backend"), (PAGE, "device-plugin"), ("docs/vendors/backend.md", "backend")],
)
def test_the_programs_of_the_pages_are_targets_of_the_kit(page, kind):
    (words,) = [
        words
        for line in commands(page)
        if (words := shlex.split(line))[:2] == ["drakit", "conformance"]
        and words[2].startswith(f"{kind}:")
    ]
    setup = words[words.index("--setup") + 1] if "--setup" in words else None
    entry = yaml.safe_load(listing(page, words[words.index("--config") + 1]))
    assert parse_target(words[2], config=entry, setup=setup).kind == kind
    if kind == "backend":
        flags = set(re.findall(r" -([a-z-]+)", words[2]))
        assert all(f'"{flag}"' in (ROOT / "examples/backend/main.go").read_text() for flag in flags)


def test_the_table_has_all_rules():
    _, _, table = (ROOT / PAGE).read_text().partition("## The rules")
    found = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", table, re.M)
    assert found == [(rule.id, rule.title) for rule in rules()]
