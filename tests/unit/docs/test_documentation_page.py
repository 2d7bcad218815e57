"""docs/contributors/documentation.md: it names the pages whose commands run, and make's targets."""

import re

from e2e.pages.page import USER_FOLDERS
from tests.unit.docs.listings import ROOT

PAGE = (ROOT / "docs/contributors/documentation.md").read_text()


def test_the_folders_whose_commands_run_are_on_the_page():
    (sentence,) = re.findall(r"^`make e2e-docs` runs .*?\.", PAGE, re.M | re.S)
    assert re.findall(r"`docs/(\w+)`", sentence) == list(USER_FOLDERS)


def test_the_targets_of_the_page_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = re.findall(r"(?:^|`)make ([a-z0-9-]+)((?: [a-z0-9-]+)*)", PAGE, re.M)
    assert {word for first, more in named for word in (first, *more.split())} <= targets
