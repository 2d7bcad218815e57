"""Pages for contributors name folders, features and targets of make that exist."""

import re
import subprocess

import pytest

from e2e.features import FEATURES
from e2e.pages.page import USER_FOLDERS
from tests.unit.docs.listings import ROOT

FOLDER = ROOT / "docs/contributors"
PAGE = (FOLDER / "documentation.md").read_text()
TESTING = (FOLDER / "testing.md").read_text()
TARGETS = set(re.findall(r"^\.PHONY: (.+)", (ROOT / "Makefile").read_text(), re.M))


def test_the_folders_whose_commands_run_are_on_the_page():
    (sentence,) = re.findall(r"^`make e2e-docs` runs .*?\.", PAGE, re.M | re.S)
    assert re.findall(r"`docs/(\w+)`", sentence) == list(USER_FOLDERS)


@pytest.mark.parametrize("path", [ROOT / "CONTRIBUTING.md", *sorted(FOLDER.glob("*.md"))], ids=str)
def test_the_targets_of_a_page_exist(path):
    commands = re.findall(r"(?:^|`|    )(?:[A-Z]+=\S+ )*make ([^`#\n]*)", path.read_text(), re.M)
    named = {
        word
        for command in commands
        for word in re.sub(r'"[^"]*"', "", command).split()
        if re.fullmatch(r"[a-z0-9-]+", word)
    }
    assert named <= TARGETS


def test_make_help_lists_every_target():
    done = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert len(TARGETS) > 50
    assert {line.split()[0] for line in done.stdout.splitlines()} == TARGETS


def test_the_features_and_folders_of_the_page_about_tests_exist():
    features = {
        name for found in re.findall(r"FEATURES=([\w,]+)", TESTING) for name in found.split(",")
    }
    assert features
    assert features <= FEATURES.keys()
    rows = re.findall(r"^\| (`.*?) \| `", TESTING.partition("| Change in |")[2], re.M)
    for row in rows:
        first, *more = re.findall(r"`([^`]+)`", row)
        assert (ROOT / first).exists()
        # After a colon, the folders are in the first one.
        base = ROOT / first if ":" in row else ROOT
        assert [name for name in more if not (base / name).exists()] == []


def test_the_single_tests_of_the_page_exist():
    found = re.findall(r"^\.venv/bin/pytest (\S+\.py) .*?-k (\w+)", TESTING, re.M)
    assert found
    for file, part in found:
        assert re.search(rf"^(?:async )?def test_\w*{part}", (ROOT / file).read_text(), re.M)
