"""`make audit`: what it reports for findings, and for databases that it cannot reach."""

from __future__ import annotations

import pytest

from tests.unit.docs.listings import ROOT
from tools.audit import __main__ as audit

REQUIREMENTS = {path.name for path in (ROOT / "requirements").glob("*.txt")}

CLEAN = "exit 0"
FINDING = 'case "$*" in *operator.txt*) echo "aiohttp 3.9.0 PYSEC-1"; exit 1;; esac'
OFFLINE = 'echo "requests.exceptions.ConnectionError: Max retries exceeded" >&2; exit 1'


@pytest.fixture
def check(tmp_path, monkeypatch, capfd):
    """Run the audit with a script in the place of pip-audit; return its status and its output."""
    monkeypatch.setattr(audit, "go_is_there", lambda: False)

    def run(script: str, *, required: bool = False) -> tuple[int, str]:
        program = tmp_path / "pip-audit"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        status = audit.check_vulnerabilities(program, required=required)
        return status, capfd.readouterr().out

    return run


def test_all_pinned_requirements_are_searched(check):
    status, output = check(CLEAN)
    assert status == 0
    for name in REQUIREMENTS:
        assert f"requirements/{name}: no known vulnerabilities" in output


def test_a_finding_fails_and_is_printed(check):
    status, output = check(FINDING)
    assert status == 1
    assert "requirements/operator.txt:\naiohttp 3.9.0 PYSEC-1" in output
    assert "requirements/nodeplugin.txt: no known vulnerabilities" in output


@pytest.mark.parametrize(("required", "status"), [(False, 0), (True, 1)])
def test_a_database_that_cannot_be_reached_fails_only_if_it_is_required(check, required, status):
    found, output = check(OFFLINE, required=required)
    assert found == status
    assert output.count("not checked, because the database cannot be reached") == len(REQUIREMENTS)


def test_the_go_modules_that_are_searched_exist():
    assert [module for module in audit.MODULES if not (ROOT / module / "go.mod").exists()] == []
