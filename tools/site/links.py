"""
Finds the links in Markdown pages, their targets, and the anchors of headings.

A page of docs/ is read in two places: in the repository and on the site. It links to files with
relative paths, which work in the repository. :mod:`.source` rewrites them for the site.

Does not depend on Zensical or HTML.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

_FENCE = re.compile(r"^\s*(?:>\s*)*(?P<mark>`{3,}|~{3,})")
_TOKEN = re.compile(
    r"(?P<comment><!--.*?-->)"
    r"|(?P<ticks>(?<!`)`+(?!`))(?:(?!\n\s*\n).)+?(?<!`)(?P=ticks)(?!`)"
    r"|\]\((?P<inline>[^)\s]+)"
    r"|^\[[^\]]+\]:\s+(?P<definition>\S+)"
    r"|\s(?:href|src)=\"(?P<html>[^\"]+)\"",
    re.DOTALL | re.MULTILINE,
)

_HEADING = re.compile(r"^#+ (?P<title>.+?)(?: \{ *#(?P<id>[\w.-]+) *\})?$", re.MULTILINE)
_LINKED = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_ID = re.compile(r"\sid=\"([^\"]+)\"")


def _prose(text: str) -> Iterator[tuple[int, str, bool]]:
    """Split a page into code blocks and prose: yield offset, text, and whether it is prose."""
    fence, start, offset = "", 0, 0
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if found is not None:
            mark = found["mark"]
            if not fence:
                yield start, text[start:offset], True
                fence, start = mark, offset
            elif mark.startswith(fence) and not line.strip().lstrip("> ").strip(mark[0]):
                offset += len(line)
                yield start, text[start:offset], False
                fence, start = "", offset
                continue
        offset += len(line)
    yield start, text[start:], not fence


def _spans(text: str) -> Iterator[tuple[int, int]]:
    for offset, part, prose in _prose(text):
        for found in _TOKEN.finditer(part) if prose else ():
            for name in ("inline", "definition", "html"):
                if found[name]:
                    yield offset + found.start(name), offset + found.end(name)


def find_links(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and target of each link, image and `href` or `src` of a page."""
    for start, end in _spans(text):
        yield text.count("\n", 0, start) + 1, text[start:end]


def replace_links(text: str, replacement: Callable[[str], str]) -> str:
    """Return the page with each target replaced. Line numbers stay the same."""
    result, position = "", 0
    for start, end in _spans(text):
        result += text[position:start] + replacement(text[start:end])
        position = end
    return result + text[position:]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: of its headings, as Python-Markdown names them, and of its
    HTML."""
    found: set[str] = set()
    for _, part, prose in _prose(text):
        if not prose:
            continue
        found.update(_ID.findall(part))
        for heading in _HEADING.finditer(part):
            name = heading["id"] or anchor(_LINKED.sub(r"\1", heading["title"]))
            names = itertools.chain([name], (f"{name}_{each}" for each in itertools.count(1)))
            found.add(next(each for each in names if each not in found))
    return found


def anchor(title: str) -> str:
    """Return the anchor of the first heading with a title, as Python-Markdown names it."""
    words = re.sub(r"[^\w\s-]", "", title).strip().lower()
    return re.sub(r"[-\s]+", "-", words)


def is_external(target: str) -> bool:
    """Return whether a target has a scheme (https:, mailto:) or names a host."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:|//", target) is not None
