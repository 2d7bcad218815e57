"""
The linter's word on every file of tests/data/cdi; e2e/test_cdi.py asks containerd the same.

A file shows one concern, and its name says which.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from drakit_formats.cdi import lint_spec
from drakit_formats.cdi.lint import read_directories

CORPUS = Path(__file__).parents[2] / "data" / "cdi"
VERDICTS = yaml.safe_load((CORPUS / "verdicts.yaml").read_text())


def files(*folders: str) -> list:
    found = [path for folder in folders for path in sorted((CORPUS / folder).iterdir())]
    return [pytest.param(path, id=f"{path.parent.name}/{path.name}") for path in found]


def lint(path: Path, tmp_path: Path) -> list:
    """The linter's findings for a directory with only this file, without the file's name."""
    (tmp_path / path.name).write_bytes(path.read_bytes())
    problems = read_directories([tmp_path], check=lint_spec).problems
    assert {problem.file for problem in problems} <= {str(tmp_path / path.name)}
    return list(problems)


def said(problems: list) -> list[str]:
    return [f"{problem.path} {problem.text}".strip() for problem in problems]


@pytest.mark.parametrize("path", files("good"))
def test_the_linter_finds_nothing_in_a_good_file(path, tmp_path):
    assert said(lint(path, tmp_path)) == []


@pytest.mark.parametrize("path", files("warned", "strict", "bad"))
def test_the_linter_reports_what_is_wrong_and_nothing_else(path, tmp_path):
    verdict = VERDICTS[path.parent.name][path.name]
    expected = verdict["problems"] if path.parent.name == "strict" else verdict
    problems = lint(path, tmp_path)
    found = said(problems)
    assert len(found) == len(expected), found
    for sentence, beginning in zip(found, expected, strict=True):
        assert sentence.startswith(beginning)
    severity = "warning" if path.parent.name == "warned" else "error"
    assert {problem.severity for problem in problems} == {severity}


@pytest.mark.parametrize("folder", ["warned", "strict", "bad"])
def test_every_file_has_a_verdict_and_every_verdict_a_file(folder):
    assert set(VERDICTS[folder]) == {path.name for path in (CORPUS / folder).iterdir()}


def test_where_the_linter_is_stricter_than_containerd_there_is_a_reason():
    assert all(len(verdict["reason"]) > 20 for verdict in VERDICTS["strict"].values())
