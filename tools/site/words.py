"""
Counts the words of the documentation: `python -m tools.site.words` prints them per section.

The count includes tables, but not front matter, comments and fenced code.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tools.site.source import DOCS, ROOT

_UNCOUNTED = (
    re.compile(r"\A---\n.*?\n---\n", re.S),
    re.compile(r"<!--.*?-->", re.S),
    re.compile(r"^\s*(```|~~~).*?^\s*\1", re.S | re.M),
)


def count_words(text: str) -> int:
    """Count the words of a page: tokens with a letter or a digit."""
    for pattern in _UNCOUNTED:
        text = pattern.sub("", text)
    return sum(1 for token in text.split() if re.search(r"\w", token))


def words_per_section(docs: Path) -> Counter[str]:
    """Count the words of each section: the pages of a folder."""
    words: Counter[str] = Counter()
    for page in docs.rglob("*.md"):
        section = page.relative_to(docs).parent
        words["/".join((docs.name, *section.parts))] += count_words(page.read_text())
    return words


def main() -> None:
    words = words_per_section(ROOT / DOCS)
    for section in sorted(words):
        print(f"{words[section]:>7,} words  {section}")
    print(f"{words.total():>7,} words")


if __name__ == "__main__":
    main()
