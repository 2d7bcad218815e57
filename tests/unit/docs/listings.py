"""Finding listings in the documentation, and running them."""

from __future__ import annotations

import ast
import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def listings(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def listing(page: str, name: str) -> str:
    """The listing of a page whose first line names it, as in `# lamp.py`."""
    (found,) = [
        text
        for language in ("python", "yaml", "dockerfile", "console")
        for text in listings(page, language)
        if text.startswith((f"# {name}\n", f"# {name}:"))
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
    """Import a listing under the name that its first line has."""
    made = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    exec(compile(source, f"{name}.py", "exec"), made.__dict__)
    return made
