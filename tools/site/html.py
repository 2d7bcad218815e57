"""
Checks of the built site: links, anchors and images lead somewhere, and nothing comes from outside.

It reads HTML and CSS as a browser does, so that it also sees what the theme and raw HTML bring.
Zensical checks Markdown links before this, with line numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

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
"""Attributes that a browser fetches by itself, by element."""
NOT_FETCHED = {"canonical", "alternate", "prev", "next", "describedby"}
_CSS = re.compile(r"url\(\s*['\"]?(?!data:|#)([^'\")]+)|@import\s+['\"]([^'\"]+)")


@dataclass
class Page:
    ids: set[str] = field(default_factory=set)
    links: list[tuple[int, str]] = field(default_factory=list)
    assets: list[tuple[int, str]] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        line = self.getpos()[0]
        self.page.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.page.links.append((line, given["href"]))
        if tag == "link" and NOT_FETCHED & {*given.get("rel", "").split()}:
            return
        for name in ASSETS.get(tag, ()):
            if name in given:
                self.page.assets.append((line, given[name].split()[0] if given[name] else ""))
        for target in _css_targets(given.get("style", "")):
            self.page.assets.append((line, target))
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._style:
            self.page.assets += [(self.getpos()[0], target) for target in _css_targets(data)]

    def handle_endtag(self, tag: str) -> None:
        self._style = False


def _css_targets(text: str) -> list[str]:
    return [first or second for first, second in _CSS.findall(text)]


def read_page(file: Path) -> Page:
    reader = _Reader()
    reader.feed(file.read_text())
    return reader.page


def check_site(site: Path, *, place: str = "/") -> list[str]:
    """Return the faults of a site that is built for a place of a host, each with page and line."""
    read = {file: read_page(file) for file in sorted(site.rglob("*.html"))}
    faults = []
    for file, page in read.items():
        # The page of a missing page is shown at any address, so its links begin at the host's root.
        base = site if file.name == "404.html" else file.parent
        name = file.relative_to(site)
        for line, target in page.assets:
            if urlsplit(target).netloc or target.startswith(("http:", "https:")):
                faults.append(f"{name}:{line}: {target} comes from another host")
        for line, target in [*page.links, *page.assets]:
            if file.name == "404.html" and target.startswith(place):
                target = "/" + target.removeprefix(place)
            fault = _fault(target, file=file, base=base, site=site, read=read)
            if fault:
                faults.append(f"{name}:{line}: {target}: {fault}")
    for file in sorted(site.rglob("*.css")):
        for target in _css_targets(file.read_text()):
            if urlsplit(target).scheme or target.startswith("//"):
                faults.append(f"{file.relative_to(site)}: {target} comes from another host")
            elif not (file.parent / unquote(target.partition("#")[0])).exists():
                faults.append(f"{file.relative_to(site)}: {target} does not exist")
    return faults


def _fault(
    target: str, *, file: Path, base: Path, site: Path, read: dict[Path, Page]
) -> str | None:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    path = unquote(parts.path)
    if path.startswith("/") and file.name != "404.html":
        return "is absolute: the site is served below a version"
    found = (site / path.lstrip("/") if path.startswith("/") else base / path).resolve()
    if not path:
        found = file
    elif not found.is_relative_to(site.resolve()):
        # The version selector and the link to the newest version leave the folder of a version.
        return None if found == site.resolve().parent else "leaves the site"
    if found.is_dir():
        found /= "index.html"
    if not found.exists():
        return "does not exist"
    anchor = unquote(parts.fragment)
    if anchor and found in read and anchor not in read[found].ids and anchor != "__top":
        return "has no such anchor"
    return None
