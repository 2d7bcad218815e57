"""
The source of the site for Zensical, written to build/docs from docs/ and mkdocs.yml.

Pages are copied line by line, so that the line number in a message is that of the page. Three
things change:

* A link to a file of the repository outside docs/ leads to a page of the site that shows this file,
  in the version that the site describes. The site therefore works offline, and from a fork.
* The marker `<!-- changes -->` is replaced with the fragments in changes/.
* Pages that show files are added below `repository/`.

Does not depend on the versions of the published site, or on HTML.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.site.links import anchors, find_links, is_external, replace_links

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
SHOWN = "repository"
"""The folder of the site with the pages that show files of the repository."""

LINKING = (DOCS, "changes", "examples", "tests")
"""Folders with Markdown files whose links are checked, because the site shows them."""

KINDS = {"removal": "Removals", "security": "Security", "feature": "Features", "fix": "Fixes"}
"""The kinds in the order of the page: changes that require action by the reader come first."""
LANGUAGES = {
    ".go": "go",
    ".json": "json",
    ".proto": "protobuf",
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
}
LISTED_FILES = 40
"""A folder with more files than this is shown as a list of names, because test data needs no
pages."""
MARKER = "<!-- changes -->"


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without the Python objects in it."""


_Loader.add_multi_constructor("!!python/", lambda *_: None)
_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def config(root: Path = ROOT) -> dict[str, Any]:
    return yaml.load((root / "mkdocs.yml").read_text(), _Loader)


def nav_pages(nav: Any) -> Iterator[str]:
    """Yield the pages of the nav, in order."""
    if isinstance(nav, str):
        yield nav
    for entry in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from nav_pages(entry)


def pages(root: Path = ROOT) -> list[str]:
    docs = root / DOCS
    return sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))


def check_nav(root: Path = ROOT) -> list[str]:
    """Return the faults of the nav: each page has one entry, and each entry has a page."""
    written, listed = pages(root), list(nav_pages(config(root)["nav"]))
    faults = [
        f"mkdocs.yml: the nav has no entry for docs/{page}"
        for page in written
        if page not in listed
    ]
    faults += [f"mkdocs.yml: docs/{page} does not exist" for page in listed if page not in written]
    faults += [
        f"mkdocs.yml: {page} is listed twice" for page in {*listed} if listed.count(page) > 1
    ]
    return faults


def check_links(root: Path = ROOT) -> list[str]:
    """Return the broken links."""
    faults = []
    files = [*root.glob("*.md"), *(f for name in LINKING for f in (root / name).rglob("*.md"))]
    for file in sorted(files):
        for line, target in find_links(file.read_text()):
            fault = _link_fault(file, target, root)
            if fault:
                faults.append(f"{file.relative_to(root)}:{line}: {fault}")
    return faults


def _link_fault(file: Path, target: str, root: Path) -> str | None:
    if is_external(target):
        return None
    path, _, anchor = target.partition("#")
    found = (file.parent / path).resolve() if path else file
    if path.startswith("/") or not found.is_relative_to(root):
        return f"{target} is outside the repository: write a relative path"
    if not found.exists():
        return f"{target} does not exist"
    if found.is_dir() and found.is_relative_to(root / DOCS):
        return f"{target} is a folder: link to a page of it"
    if anchor and found.suffix == ".md" and anchor not in anchors(found.read_text()):
        return f"{target}: the page does not have this heading"
    return None


def changes(root: Path = ROOT) -> str:
    """Return the fragments of changes/ as the sections of the next release, the newest first."""
    sections = ""
    for kind, title in KINDS.items():
        files = sorted(
            (root / "changes").glob(f"*.{kind}.md"), key=lambda f: -int(f.name.partition(".")[0])
        )
        if files:
            sections += f"\n### {title}\n"
        for file in files:
            text = _relocated(file.read_text(), file.parent, root / DOCS).strip()
            sections += text + "\n" if text.startswith("- ") else _item(text)
    return f"\n## Next release\n{sections}" if sections else ""


def _item(text: str) -> str:
    first, *rest = text.splitlines()
    return "\n".join([f"\n- {first}", *(f"  {line}" if line else "" for line in rest)]) + "\n"


def _relocated(text: str, old: Path, new: Path) -> str:
    """Return Markdown with relative links that have the same targets from another folder."""

    def moved(target: str) -> str:
        path, mark, anchor = target.partition("#")
        if is_external(target) or not path:
            return target
        return os.path.relpath((old / path).resolve(), new) + mark + anchor

    return replace_links(text, moved)


class Source:
    """Writes the source of the site to a folder, and only files that differ."""

    def __init__(self, target: Path, root: Path = ROOT, *, version: str = "") -> None:
        self.root, self.target, self._version = root, target, version
        self._written: set[Path] = set()
        self._shown: list[Path] = []

    def write(self) -> None:
        """Write mkdocs.yml and all pages. Remove files that no page uses any more."""
        self._written.clear()
        self._shown.clear()
        text = (self.root / "mkdocs.yml").read_text()
        text = re.sub(r"^docs_dir:.*$", "docs_dir: source", text, flags=re.MULTILINE)
        text = re.sub(r"^site_dir:.*$", "site_dir: html", text, flags=re.MULTILINE)
        # Each published version is a folder of the site. `serve` has no URL.
        address = rf"\g<1>{self._version}/" if self._version else ""
        text = re.sub(r"^(site_url: .*/)$", address, text, flags=re.MULTILINE)
        text = re.sub(
            r"^( +custom_dir:) (.*)$", rf"\g<1> {self.root}/\g<2>", text, flags=re.MULTILINE
        )
        self._put(self.target / "mkdocs.yml", text.encode())
        for file in sorted((self.root / DOCS).rglob("*")):
            if file.suffix == ".md":
                self._put(self._place(file), self._page(file).encode())
            elif file.is_file():
                self._put(self._place(file), file.read_bytes())
        # A page that shows a file can itself link to files.
        for file in self._shown:
            self._put(self._place(file), self._view(file).encode())
        self._remove_others()

    def _place(self, file: Path) -> Path:
        """Return the path of a file of the repository in the source of the site."""
        path = file.relative_to(self.root)
        if path.parts[0] == DOCS:
            return self.target / "source" / path.relative_to(DOCS)
        page = path / "index.md" if file.is_dir() else path.with_name(path.name + ".md")
        return self.target / "source" / SHOWN / page

    def _page(self, file: Path) -> str:
        here = self._place(file).parent

        def for_the_site(target: str) -> str:
            path, mark, anchor = target.partition("#")
            found = (file.parent / path).resolve()
            page = found.is_relative_to(self.root / DOCS)
            if is_external(target) or not path or not (page or found.exists()):
                return target
            if not page and found not in self._shown:
                self._shown.append(found)
            place = os.path.relpath(self._place(found), here)
            return place + mark + anchor

        text, docs = file.read_text(), self.root / DOCS
        if MARKER in text:
            text = text.replace(MARKER, _relocated(changes(self.root), docs, file.parent))
        return replace_links(text, for_the_site)

    def _view(self, file: Path) -> str:
        """Return the page that shows a file or a folder."""
        title = file.relative_to(self.root).as_posix()
        head = f"---\ntitle: {title}\nsearch:\n  exclude: true\n---\n"
        if file.suffix == ".md":
            return head + self._page(file)
        if file.is_dir():
            return head + f"# `{title}/`\n\n" + "".join(self._entries(file))
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            text = "(not a text file)"
        fence = "`" * (1 + max([2, *(len(ticks) for ticks in re.findall(r"`+", text))]))
        language = LANGUAGES.get(file.suffix, "dockerfile" if file.name == "Dockerfile" else "text")
        return head + f"# `{title}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"

    def _entries(self, folder: Path) -> Iterator[str]:
        few = sum(file.is_file() for file in folder.rglob("*")) <= LISTED_FILES
        for file in sorted(folder.iterdir()):
            if file.name.startswith((".", "__pycache__")):
                continue
            if not few:
                yield f"- `{file.name}`\n"
                continue
            if file not in self._shown:
                self._shown.append(file)
            place = os.path.relpath(self._place(file), self._place(folder).parent)
            yield f"- [{file.name}{'/' if file.is_dir() else ''}]({place})\n"

    def _put(self, path: Path, content: bytes) -> None:
        self._written.add(path)
        if path.exists() and path.read_bytes() == content:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def _remove_others(self) -> None:
        source = self.target / "source"
        for path in sorted(source.rglob("*"), reverse=True):
            if path.is_file() and path not in self._written:
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def clean(target: Path) -> None:
    """Remove the files of an earlier build."""
    shutil.rmtree(target, ignore_errors=True)
