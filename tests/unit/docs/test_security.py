"""Each promise of the two pages on security has a test or a reason in tests/security.md."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.unit.docs.listings import ROOT
from tests.unit.docs.test_scenarios import REFERENCE, functions

LIST = (ROOT / "tests" / "security.md").read_text()
PAGES = ("SECURITY.md", "docs/admin/security.md")
LINKS = "What's next"
ROWS = [
    (page, *(cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]))
    for page in PAGES
    for line in LIST.partition(f"## {page}\n")[2].partition("\n## ")[0].splitlines()
    if line.startswith("|") and not line.startswith(("| section", "|---"))
]


def statements(page: str) -> Iterator[tuple[str, str]]:
    """Yield each sentence, list item and row of a table, with the heading of its section."""
    text = re.sub(r"\A---\n.*?\n---\n|^```.*?^```$|^<!--.*?-->$", "", read(page), flags=re.M | re.S)
    section = ""
    for block in re.split(r"\n\n|\n(?=[-|#]|\d\. )", text):
        line = re.sub(r"^\d\. ", "", " ".join(block.split()))
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("|"):
            yield section, line
        elif line and section != LINKS:
            yield from ((section, each) for each in re.split(r"(?<=[.:]) (?=[A-Z`])", line))


def read(page: str) -> str:
    return (ROOT / page).read_text()


def rows_of(page: str, section: str, text: str) -> list[str]:
    """The statements of the list that cover a statement of the page."""
    general = "(tables)" if text.startswith("|") else "(rest)"
    return [
        statement
        for known, heading, statement, _ in ROWS
        if (known, heading) == (page, section) and (statement in text or statement == general)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_statement_has_a_row(page):
    found = [*statements(page)]
    assert len(found) > 10
    heads = re.findall(r"^(\|.*\|)\n\|-", read(page), re.M)
    bare = [(s, text) for s, text in found if not rows_of(page, s, text)]
    assert [each for each in bare if each[1] not in heads and "|---" not in each[1]] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", f"{row[1]}-{row[2]}"))
def test_a_row_is_about_the_page_and_has_tests_or_a_reason(row):
    page, section, statement, shown = row
    assert any(statement in rows_of(page, s, t) for s, t in statements(page) if s == section)
    references = REFERENCE.findall(shown)
    assert len(references) == shown.count(".py")
    assert references or re.match(r"Reason: .{10,}", shown)
    for file, name, _ in references:
        assert (ROOT / file).exists(), file
        assert not name or name in functions(file), f"{file} has no {name}"
