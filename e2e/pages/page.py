"""
Parses a page of the site into the steps that a reader takes: files to save and commands to run.

A page with an invalid format raises :class:`PageError`, whose message names the page and the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

USER_FOLDERS = ("start", "use", "admin", "vendors")
"""The folders of `docs/` whose commands and manifests run."""

ON_THE_NODE = "On the node"
"""The title of a bash block that runs on a node, as root, rather than on the reader's machine."""

OUTPUT = "Output"
"""The title of a text block with the output of the block before it."""


class Needs(StrEnum):
    """The state of the cluster that a page requires before its first step."""

    NOTHING = "nothing"
    INSTALLED = "installed"
    SIMULATED = "simulated"


class Program(StrEnum):
    """A program of another project whose image a page needs on the nodes."""

    SAMPLE_DEVICE_PLUGIN = "sample-device-plugin"


class Action(StrEnum):
    RUN = "run"
    RUN_ON_NODE = "run on a node"
    SAVE = "save"
    DRY_RUN = "dry run"


class PageError(Exception):
    """The format of a page is invalid."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{short(path)}:{line}: {problem}")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One action of the reader, or of a hidden comment."""

    action: Action
    line: int
    """Line of the page on which the text begins, from 1."""

    text: str
    file: str = ""
    """The file to save, relative to the working folder."""

    output: str | None = None
    fails: bool = False
    """Whether the command is expected to fail."""

    hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class NotRun:
    """A block that is not run, and the reason."""

    line: int
    language: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Page:
    path: Path
    needs: Needs
    nodes: int
    """Number of nodes on which drakit is installed."""

    steps: Sequence[Step]
    not_run: Sequence[NotRun]
    programs: Sequence[Program] = ()
    clean: bool = False
    """Whether the nodes must not contain files of drakit's earlier drivers."""


@dataclass
class _Block:
    """A fenced block in the page."""

    line: int
    language: str
    title: str
    text: str
    indent: int


@dataclass(frozen=True)
class _Comment:
    line: int
    kind: str
    text: str


@dataclass
class _Reader:
    """The state of parsing one page."""

    path: Path
    steps: list[Step] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    pending: _Comment | None = None
    """A comment that belongs to the next block."""

    last_run: int | None = None
    """The index of the step that an output block can follow."""


FRONT_MATTER = re.compile(r"\A---\n(.*?)^---\n", re.S | re.M)
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>[\w+-]*)(?P<rest>.*)$")
COMMENT = re.compile(r"^ *<!--\s*(?P<kind>not run|run|fails)\b:?(?P<text>.*?)(?P<end>-->)?\s*$")
TITLE = re.compile(r'\btitle="([^"]*)"')
STRAY = re.compile(r"^\s*\$ |^(?: {4,}|\t)(?:kubectl|helm|docker|make|drakit|rm|go|python) ")
FILE_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)*")
SHELLS = {"sh", "shell", "console", "shell-session", "zsh"}


def short(path: Path) -> str:
    """Return a page's path in the repository."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def front_matter(text: str) -> dict[str, Any]:
    """Return the front matter of a page, or an empty dictionary."""
    found = FRONT_MATTER.match(text)
    return (yaml.safe_load(found[1]) or {}) if found else {}


def user_pages() -> list[Path]:
    """Return the pages that run, in the order of the site's navigation. Others follow by name."""
    pages = [page for name in USER_FOLDERS for page in sorted((DOCS / name).glob("*.md"))]
    order = {path: place for place, path in enumerate(_navigation())}
    return sorted(pages, key=lambda page: order.get(page, len(order) + pages.index(page)))


class _Lenient(yaml.SafeLoader):
    """mkdocs.yml may contain Python objects, which are not needed here."""


_Lenient.add_multi_constructor("", lambda loader, suffix, node: None)


def _navigation() -> Iterator[Path]:
    site = ROOT / "mkdocs.yml"
    if site.exists():
        parsed = yaml.load(site.read_text(), Loader=_Lenient)
        yield from _leaves(parsed.get("nav") or [])


def _leaves(entry: Any) -> Iterator[Path]:
    if isinstance(entry, str):
        yield DOCS / entry
        return
    for child in entry.values() if isinstance(entry, dict) else entry:
        yield from _leaves(child)


def is_tested(path: Path) -> bool:
    """Return whether a page states its requirements in its front matter, and is therefore run."""
    return "test" in front_matter(path.read_text())


def is_slow(path: Path) -> bool:
    """Return whether a page takes so long that only `make test-all` runs it."""
    return bool((front_matter(path.read_text()).get("test") or {}).get("slow"))


def parse(path: Path) -> Page:
    """Parse a page that has `test` in its front matter."""
    text = path.read_text()
    settings = front_matter(text).get("test")
    if not isinstance(settings, dict) or (
        unknown := set(settings) - {"needs", "nodes", "programs", "clean", "slow"}
    ):
        problem = f"unknown keys {sorted(unknown)}" if isinstance(settings, dict) else "no `test`"
        raise PageError(path, 1, f"the front matter has {problem}")
    try:
        needs = Needs(settings.get("needs"))
    except ValueError:
        problem = f"`test.needs` is none of {', '.join(Needs)}"
        raise PageError(path, 1, problem) from None
    try:
        programs = [Program(name) for name in settings.get("programs", [])]
    except ValueError as error:
        raise PageError(path, 1, f"`test.programs`: {error}") from None
    reader = _Reader(path)
    for part in _parts(path, text):
        if isinstance(part, _Block):
            _take_block(reader, part)
        else:
            _take_comment(reader, part)
    if reader.pending:
        raise PageError(path, reader.pending.line, "no block follows this comment")
    _check_files_are_used(reader)
    return Page(
        path=path,
        needs=needs,
        nodes=settings.get("nodes", 1),
        steps=reader.steps,
        not_run=reader.not_run,
        programs=programs,
        clean=settings.get("clean", False),
    )


def _parts(path: Path, text: str) -> Iterator[_Block | _Comment]:
    """Yield the fenced blocks of a page, and the comments that define how they run."""
    matter = FRONT_MATTER.match(text)
    skipped = matter[0].count("\n") if matter else 0
    lines = text.split("\n")
    number = skipped
    while number < len(lines):
        line, start = lines[number], number + 1
        number += 1
        if fence := FENCE.match(line):
            body: list[str] = []
            while number < len(lines) and lines[number].strip() != fence["fence"]:
                body.append(lines[number])
                number += 1
            if number == len(lines):
                raise PageError(path, start, "the block has no end")
            number += 1
            indent = len(fence["indent"])
            title = TITLE.search(fence["rest"])
            yield _Block(
                line=start + 1,
                language=fence["language"],
                title=title[1] if title else "",
                text="".join(f"{_dedented(path, start, one, indent)}\n" for one in body),
                indent=indent,
            )
        elif comment := COMMENT.match(line):
            words = [comment["text"]]
            closed = comment["end"]
            while not closed:
                if number == len(lines):
                    raise PageError(path, start, "the comment has no end")
                before, closed, _ = lines[number].partition("-->")
                words.append(before)
                number += 1
            yield _Comment(start, comment["kind"], "\n".join(words).strip())
        elif STRAY.match(line):
            raise PageError(path, start, "a command outside of a ```bash block is not run")


def _dedented(path: Path, start: int, line: str, indent: int) -> str:
    if line[:indent].strip():
        raise PageError(path, start, "a line of the block is indented less than its fence")
    return line[indent:]


def _take_comment(reader: _Reader, comment: _Comment) -> None:
    if comment.kind == "run":
        if not comment.text:
            raise PageError(reader.path, comment.line, "the hidden command is empty")
        reader.steps.append(
            Step(action=Action.RUN, line=comment.line, text=f"{comment.text}\n", hidden=True)
        )
        reader.last_run = None
        return
    if comment.kind == "not run" and len(comment.text) < 10:
        raise PageError(reader.path, comment.line, "`not run` lacks its reason")
    if reader.pending:
        raise PageError(reader.path, reader.pending.line, "no block follows this comment")
    reader.pending = comment


def _take_block(reader: _Reader, block: _Block) -> None:
    pending, reader.pending = reader.pending, None
    last_run, reader.last_run = reader.last_run, None
    if pending and pending.kind == "not run":
        reader.not_run.append(NotRun(line=block.line, language=block.language, reason=pending.text))
        return
    fails = pending is not None
    if block.language in SHELLS or block.language == "yml":
        raise PageError(reader.path, block.line, "write ```bash for commands, ```yaml for YAML")
    if fails and block.language != "bash":
        raise PageError(reader.path, block.line, "only a bash block can fail")
    if block.language == "bash":
        on_node = block.title == ON_THE_NODE
        if not block.title or on_node:
            action = Action.RUN_ON_NODE if on_node else Action.RUN
            reader.steps.append(Step(action=action, line=block.line, text=block.text, fails=fails))
            reader.last_run = len(reader.steps) - 1
            return
    if block.language == "text":
        if block.title == OUTPUT:
            _take_output(reader, block, last_run)
        return
    if block.title:
        _take_file(reader, block)
    elif block.language == "yaml":
        _take_manifest(reader, block)


def _take_output(reader: _Reader, block: _Block, last_run: int | None) -> None:
    if last_run is None:
        raise PageError(reader.path, block.line, "an output block follows a bash block that is run")
    step = reader.steps[last_run]
    reader.steps[last_run] = Step(**{**step.__dict__, "output": block.text})


def _take_file(reader: _Reader, block: _Block) -> None:
    name = PurePosixPath(block.title)
    if not FILE_NAME.fullmatch(block.title) or ".." in name.parts:
        raise PageError(reader.path, block.line, f"the title {block.title!r} is not a file's name")
    reader.steps.append(
        Step(action=Action.SAVE, line=block.line, text=block.text, file=block.title)
    )


def _take_manifest(reader: _Reader, block: _Block) -> None:
    try:
        documents = [one for one in yaml.safe_load_all(block.text) if one is not None]
    except yaml.YAMLError as error:
        raise PageError(reader.path, block.line, f"this is not YAML: {error}") from None
    if not all(isinstance(one, dict) and "apiVersion" in one for one in documents):
        problem = "YAML that is no manifest needs a title, or a reason why it is not run"
        raise PageError(reader.path, block.line, problem)
    reader.steps.append(Step(action=Action.DRY_RUN, line=block.line, text=block.text))


def _check_files_are_used(reader: _Reader) -> None:
    """Check that every YAML file that the reader saves is used in a later command."""
    for place, step in enumerate(reader.steps):
        if step.action is not Action.SAVE or not step.file.endswith((".yaml", ".yml")):
            continue
        later = reader.steps[place + 1 :]
        name = PurePosixPath(step.file)
        words = (step.file, name.parts[0])
        if not any(word in one.text for one in later for word in words):
            raise PageError(reader.path, step.line, f"no later command uses {step.file}")
