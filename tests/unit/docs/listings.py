"""Finding listings in the documentation, and running them."""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "drakit"
PAGES = (
    "README.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "examples").rglob("*.md")),
)


_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.M | re.S,
)
"""A code block, also within a list or a tab."""


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield the language, the options and the text of each code block of a page."""
    for block in _FENCE.finditer((ROOT / page).read_text()):
        yield block["language"], block["options"], textwrap.dedent(block["text"])


_HERE_DOCUMENT = re.compile(r"<<-?'?(?P<end>\w+)'?[^\n]*\n(?P<text>.*?)^\s*(?P=end)$", re.M | re.S)


def documents() -> Iterator[tuple[str, Any]]:
    """
    Yield the page with the title, and the content, of each YAML document of the pages, also of
    the manifests in commands.

    Fields that `make reference` generates are left out: `make check-generated` compares them.
    """
    for page in PAGES:
        generated = "`make reference` " in (ROOT / page).read_text().partition("\n# ")[0]
        for language, options, text in blocks(page):
            name = page + options.replace(' title="', "-").rstrip('"')
            if language == "yaml":
                for body in yaml.safe_load_all(text):
                    if not generated or is_manifest(body):
                        yield name, body
            elif language == "bash":
                for found in _HERE_DOCUMENT.finditer(text):
                    if "apiVersion:" in found["text"]:
                        given = re.sub(r"\$\{?\w+\}?", "x", found["text"])
                        yield from ((name, body) for body in yaml.safe_load_all(given))


def is_manifest(body: Any) -> bool:
    """Whether a document is a Kubernetes object; Helm's Chart.yaml has only an `apiVersion`."""
    return isinstance(body, dict) and {"apiVersion", "kind"} <= body.keys()


def is_values(body: Any) -> bool:
    """Whether a document of a page has values of drakit's chart."""
    return isinstance(body, dict) and "kind" not in body and not _defaults().keys().isdisjoint(body)


def listings(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in a language."""
    return [text for found, _, text in blocks(page) if found == language]


def commands(page: str) -> list[str]:
    """Return the commands of a page's bash blocks, those of several lines in one."""
    texts = "".join(listings(page, "bash"))
    lines = re.sub(r" *\\\n *", " ", texts).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def listing(page: str, name: str) -> str:
    """Return the code block with this title; on some pages the first line has it: `# lamp.py`."""
    (found,) = [
        text
        for language, options, text in blocks(page)
        if f'title="{name}"' in options
        or (language != "bash" and text.startswith((f"# {name}\n", f"# {name}:")))
    ]
    return found


def code_lines(source: str) -> int:
    """Count lines as a vendor would: without imports, comments and empty ones."""
    imports = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in imports
        for number, line in enumerate(source.splitlines(), start=1)
    )


def module(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Import a listing as a module."""
    made = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    exec(compile(source, f"{name}.py", "exec"), made.__dict__)
    return made


def merged(defaults: Any, given: Any) -> Any:
    """Return values of the chart as Helm merges them into the defaults."""
    if not isinstance(defaults, dict):
        return given
    return defaults | {key: merged(defaults.get(key), given[key]) for key in given}


@cache
def _defaults() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def validated(given: dict[str, Any]) -> dict[str, Any]:
    """Return all values of the chart with those given, which its schema accepts."""
    values = merged(_defaults(), given)
    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text()))
    return values
