"""
The linter: finds all problems of a spec, or of directories of specs.

:mod:`.fields` has the rules of fields, :mod:`.version` those of versions; :mod:`.reading` finds the
files and their conflicts. tests/data/cdi shows every problem in a file.

It must not know the caller, or how problems are shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from drakit_formats.cdi.checks import Found
from drakit_formats.cdi.fields import check_spec
from drakit_formats.cdi.problems import Problem
from drakit_formats.cdi.reading import DEFAULT_DIRECTORIES, read_directories
from drakit_formats.cdi.version import check_version

__all__ = ("lint_directories", "lint_spec")


def lint_spec(spec: object) -> list[Problem]:
    """Find all problems of a spec that was parsed from JSON or YAML."""
    found: Found = []
    check_spec(spec, "", found)
    check_version(spec, found)
    return found


def lint_directories(paths: Iterable[Path | str] = DEFAULT_DIRECTORIES) -> list[Problem]:
    """
    Find all problems of directories of CDI files, the directory of lowest priority first.

    It blocks. A directory that does not exist is not a problem; an unreadable one is.
    """
    return list(read_directories(paths, check=lint_spec).problems)
