"""
``drakit cdi lint``: prints the problems of CDI files.

Does not depend on the rules, which are in :mod:`drakit_formats.cdi.lint`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from drakit_cli.answers import UsageError
from drakit_formats.cdi import Problem, lint_directories, lint_spec
from drakit_formats.cdi.checks import has_errors
from drakit_formats.cdi.text import UnreadableSpecError, parse_json, parse_yaml


def lint(options: argparse.Namespace) -> int:
    """Print the problems of files and directories. Return 1 if there are errors."""
    problems = list(_problems(options.paths))
    if options.json:
        print(json.dumps({"problems": [asdict(problem) for problem in problems]}, indent=2))
    else:
        for problem in problems:
            print(f"{problem.severity}: {problem}")
        if not problems:
            print("no problems found")
    return 1 if has_errors(problems) else 0


def _problems(paths: list[Path]) -> Iterable[Problem]:
    if not paths:
        return lint_directories()
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist")
    files = [path for path in paths if not path.is_dir()]
    folders = [path for path in paths if path.is_dir()]
    found = [problem for path in files for problem in _of_file(path)]
    return [*found, *(lint_directories(folders) if folders else ())]


def _of_file(path: Path) -> list[Problem]:
    try:
        data = path.read_bytes()
        spec = parse_json(data) if path.suffix == ".json" else parse_yaml(data)
    except UnreadableSpecError as error:
        return [Problem(file=str(path), path="", severity="error", text=str(error))]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    return [replace(problem, file=str(path)) for problem in lint_spec(spec)]
