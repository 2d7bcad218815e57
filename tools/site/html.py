"""
Checks that a browser loads nothing from another host for the built site.

The check reads HTML and CSS as a browser does, so that it includes the theme and raw HTML. Before
that, :mod:`.source` and Zensical check the targets of links.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

ASSETS = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "image": ("href", "xlink:href"),
    "img": ("src", "srcset"),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "use": ("href", "xlink:href"),
    "video": ("src", "poster"),
}
"""Attributes whose URLs a browser fetches automatically, by element."""
NOT_FETCHED = {"canonical", "alternate", "prev", "next", "describedby"}
_CSS = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.assets: list[tuple[int, str]] = []
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        line = self.getpos()[0]
        if tag == "link" and NOT_FETCHED & {*given.get("rel", "").split()}:
            return
        for name in ASSETS.get(tag, ()):
            target = given.get(name, "")
            # A srcset has several URLs, each with a descriptor.
            parts = target.split(",") if name == "srcset" else [target]
            self.assets += [(line, part.strip()) for part in parts if part.strip()]
        self.assets += [(line, target) for target in _css_targets(given.get("style", ""))]
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._style:
            self.assets += [(self.getpos()[0], target) for target in _css_targets(data)]

    def handle_endtag(self, tag: str) -> None:
        self._style = False


def _css_targets(text: str) -> list[str]:
    return [first or second for first, second in _CSS.findall(text)]


def check_site(site: Path) -> Iterator[str]:
    """Yield the faults of a site, each with page and line."""
    for file in sorted(site.rglob("*.html")):
        reader = _Reader()
        reader.feed(file.read_text())
        for line, target in reader.assets:
            if urlsplit(target).netloc:
                yield f"{file.relative_to(site)}:{line}: {target} comes from another host"
    for file in sorted(site.rglob("*.css")):
        for target in _css_targets(file.read_text()):
            if urlsplit(target).netloc:
                yield f"{file.relative_to(site)}: {target} comes from another host"
