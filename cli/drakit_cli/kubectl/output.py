"""
Writes the results of commands: tables and sentences for users, JSON and YAML for programs.

Uses color only on a terminal, and not with ``NO_COLOR``. Escapes control characters in strings from
the cluster.

Does not depend on clusters or the meaning of a result.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import yaml

from drakit_cli.answers import table, visible
from drakit_daemon.command_line import columns, wrapped
from drakit_explain.wording import cut

API_VERSION = "drakit.dev/cli/v1"
"""The version of the output for programs. Later versions of drakit only add fields to it."""

_COLORS = {"good": "32", "bad": "31", "unsure": "33", "head": "1"}

MAX_NAMES = 3
"""Maximum number of names in a sentence or table cell."""


def shortened(names: Collection[str], *, most: int = MAX_NAMES) -> str:
    """Return the first few names, and the number of the others."""
    return cut(list(names), most)


class Answer(Protocol):
    """A command result that can be rendered for programs and for users."""

    def body(self) -> Mapping[str, Any]: ...

    def show(self, output: Output) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """The stream and the format of a command's output."""

    format: str = ""
    stream: TextIO | None = None

    @property
    def for_programs(self) -> bool:
        return self.format in ("json", "yaml")

    @property
    def names_only(self) -> bool:
        return self.format == "name"

    @property
    def wide(self) -> bool:
        return self.format == "wide"

    def write(self, kind: str, answer: Answer) -> None:
        """Print a result in the output's format. Output for programs includes the result's
        `kind`."""
        if self.for_programs:
            self.data(kind, answer.body())
        else:
            answer.show(self)

    def data(self, kind: str, body: Mapping[str, Any]) -> None:
        """Print a result for programs, with the version and the kind of its format."""
        self.manifest({"apiVersion": API_VERSION, "kind": kind, **body})

    def manifest(self, body: Mapping[str, Any]) -> None:
        """Print an API object as JSON or YAML."""
        if self.format == "json":
            self._print(json.dumps(body, indent=2, ensure_ascii=True))
        else:
            self._print(yaml.safe_dump(dict(body), sort_keys=False, allow_unicode=False).rstrip())

    def names(self, names: Iterable[str]) -> None:
        """Print names, one per line."""
        for name in names:
            self._print(visible(name))

    def progress(self, text: str) -> None:
        """Print a line about the progress of a command immediately, unless only names are
        printed."""
        if not self.names_only:
            self.line(text)
            self.flush()

    def line(self, text: str = "", *, color: str = "", indent: int = 0) -> None:
        """Print one line of text."""
        stream = self.stream or sys.stdout
        shown = wrapped(visible(text), stream, indent=indent)
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        if color and stream.isatty() and not plain:
            unescaped = getattr(stream, "unescaped", stream)  # The string is already escaped.
            print(f"\x1b[{_COLORS[color]}m{shown}\x1b[0m", file=unescaped)
        else:
            self._print(shown)

    def lines(self, head: str, texts: Iterable[str]) -> None:
        """Print lines below a heading, if there are any."""
        found = list(texts)
        if found:
            self.line()
            self.line(f"{head}:", color="head")
            for text in found:
                self.line(text, indent=2)

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        indent: int = 0,
        cut: bool = False,
    ) -> None:
        """
        Print a table.

        :param cut: whether to cut lines to the width of the terminal.
        """
        for line in table(head, rows).splitlines():
            shown = f"{' ' * indent}{line}"
            if cut and (width := columns(self.stream or sys.stdout)) and len(shown) > width:
                shown = f"{shown[: width - 1]}…"
            self._print(shown)

    def flush(self) -> None:
        """Flush the stream."""
        (self.stream or sys.stdout).flush()

    def _print(self, text: str) -> None:
        print(text, file=self.stream or sys.stdout)
