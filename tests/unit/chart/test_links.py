"""Links of the chart and the alert rules: users have the site, and no file of the repository."""

from __future__ import annotations

import re

import pytest

from tests.unit.chart.conftest import CHART
from tests.unit.docs.listings import ROOT
from tools.release.version import current

SITE = f"https://drakit.github.io/drakit/{current().site}/"
LINK = re.compile(rf'{re.escape(SITE)}([\w/-]+(?:#[\w-]+)?)|include "drakit\.site" "([^"]+)"')
FILES = [
    file
    for file in sorted(CHART.rglob("*"))
    if file.suffix in (".yaml", ".tpl", ".txt", ".json") and "crds" not in file.parts
]


def targets(text: str) -> list[str]:
    """Return the pages that a string links to, by URL or by the chart's helper."""
    return [one or other for one, other in LINK.findall(text)]


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.*)$", page, re.M)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("file", [pytest.param(file, id=file.name) for file in FILES])
def test_links_lead_to_pages_of_the_site_that_exist(file):
    text = file.read_text()
    assert not re.findall(r"\bdocs/[\w/.-]+\.md|\bexamples/", text)
    for target in targets(text):
        path, _, anchor = target.partition("#")
        page = ROOT / "docs" / f"{path.rstrip('/')}.md"
        assert path.endswith("/")
        assert page.exists(), target
        assert not anchor or anchor in anchors(page.read_text()), target
