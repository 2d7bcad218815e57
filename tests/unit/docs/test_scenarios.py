"""tests/scenarios.md names existing tests, and the make target that runs them."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (ROOT / "tests" / "scenarios.md").read_text().splitlines()
    if line.startswith("|") and not line.startswith(("| scenario", "|---"))
]
REFERENCE = re.compile(r"`((?:e2e|tests)/[\w/]+\.py)(?:::(\w+)(?:\[([\w-]+)\])?)?`")


@cache
def functions(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The test functions of a file."""
    tree = ast.parse((ROOT / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


def is_slow_file(file: str) -> bool:
    """Whether all tests of a file run in `make test-all` only."""
    found = re.search(r"^pytestmark = (.*?)^\S", (ROOT / file).read_text(), re.M | re.S)
    return found is not None and "pytest.mark.slow" in found[1]


def is_slow(function: ast.AST, case: str | None) -> bool:
    """Whether a test, or one case of it, runs in `make test-all` only."""
    for decorator in function.decorator_list:
        if ast.unparse(decorator) == "pytest.mark.slow":
            return True
        for call in ast.walk(decorator):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.param":
                words = {word.arg: ast.unparse(word.value) for word in call.keywords}
                if words.get("id") == repr(case):
                    return "pytest.mark.slow" in words.get("marks", "")
    return False


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row[0]).strip("-"))
def test_the_tests_of_a_scenario_exist_and_run_where_the_list_says(row):
    _, shown, runs_in = row
    references = REFERENCE.findall(shown)
    assert len(references) == shown.count(".py"), "each file is written as a path in backquotes"
    if not references:
        assert re.search(r"Does not apply|Not supported", shown)
        assert runs_in == ""
    for file, name, case in references:
        assert (ROOT / file).exists(), file
        if name:
            assert name in functions(file), f"{file} has no {name}"
            assert not case or f"id={case!r}" in ast.unparse(functions(file)[name]), case
            slow = is_slow(functions(file)[name], case or None) or is_slow_file(file)
            expected = "test-all" if slow else "test"
            assert runs_in == expected, f"{name} runs in make {expected}"


def test_every_scenario_test_is_in_the_list():
    named = {name for row in ROWS for _, name, _ in REFERENCE.findall(row[1])}
    for path in sorted((ROOT / "e2e").glob("test_scenarios_*.py")):
        tests = {name for name in functions(f"e2e/{path.name}") if name.startswith("test_")}
        assert tests <= named, path.name
