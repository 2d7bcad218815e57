"""
The linter finds all problems in a spec, or in directories of CDI files, which it reads as runtimes
do.

:mod:`.fields` contains the rules for fields, and :mod:`.spec` those for versions. tests/data/cdi
contains a file for each problem.

A directory later in the list has priority over the earlier ones. If two files in one directory
define the same device, runtimes ignore it, even if a file in a later directory also defines it,
because they remove it at the end (``pkg/cdi/cache.go`` of the reference library). A file with an
error is skipped, because runtimes reject it.

Functions that read directories block.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from drakit_formats.cdi.checks import Found, Problem, Severity, has_errors
from drakit_formats.cdi.fields import check_spec
from drakit_formats.cdi.spec import check_version
from drakit_formats.cdi.text import UnreadableSpecError, parse_json, parse_yaml

# ---------------------------------------------------------------- directories

DEFAULT_DIRECTORIES = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""The directories that runtimes read by default: one for admins' specs, and one for generated
specs."""

CheckSpec = Callable[[object], list[Problem]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecFile:
    """A file, and the devices that it defines."""

    path: Path
    priority: int
    """The position of the file's directory in the list. The highest priority applies."""

    spec: object = None
    """The parsed content, of any type. None if the file could not be read."""

    problems: tuple[Problem, ...]
    """The problems in this file, not including conflicts with other files."""

    @property
    def devices(self) -> dict[str, str]:
        """The qualified names of the file's devices, and their fields in the spec. Empty if the
        file has errors."""
        if has_errors(self.problems):
            return {}
        spec = cast("Mapping[str, Any]", self.spec)
        return {
            f"{spec['kind']}={device['name']}": f"devices[{index}].name"
            for index, device in enumerate(spec["devices"])
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Directories:
    """The content of all directories."""

    files: tuple[SpecFile, ...]
    """The files, in the order in which runtimes read them."""

    devices: Mapping[str, SpecFile]
    """The devices that runtimes find, keyed by qualified name, each with its file."""

    problems: tuple[Problem, ...]
    """The problems in all files and directories, including conflicts."""


def read_directories(paths: Iterable[Path | str], *, check: CheckSpec) -> Directories:
    """Read directories of CDI files as a runtime does. A directory does not have to exist."""
    problems: list[Problem] = []
    files: list[SpecFile] = []
    for priority, directory in enumerate(paths):
        for path in _listing(Path(directory), problems):
            file = SpecFile(path=path, priority=priority, **_read(path, check))
            files.append(file)
            problems += file.problems
    holders, lost = _resolve(files, problems)
    devices = {name: file for name, file in holders.items() if name not in lost}
    return Directories(files=tuple(files), devices=devices, problems=tuple(problems))


def _listing(directory: Path, problems: list[Problem]) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            names = sorted(e.name for e in entries if not e.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    except OSError as error:
        text = (
            f"cannot be listed, and runtimes do not read the directories after it: {error.strerror}"
        )
        problems.append(_problem(directory, text))
        return []
    for name in names:
        if name.endswith(".yml"):
            text = "is not read by runtimes; rename it to *.yaml"
            problems.append(_problem(directory / name, text, severity="warning"))
    return [directory / name for name in names if name.endswith((".json", ".yaml"))]


def _read(path: Path, check: CheckSpec) -> dict[str, Any]:
    try:
        data = _bytes(path)
        spec = parse_json(data) if path.name.endswith(".json") else parse_yaml(data)
    except UnreadableSpecError as error:
        return {"problems": (_problem(path, str(error)),)}
    except OSError as error:
        return {"problems": (_problem(path, f"cannot be read: {error.strerror}"),)}
    found = (replace(problem, file=str(path)) for problem in check(spec))
    return {"spec": spec, "problems": tuple(found)}


def _bytes(path: Path) -> bytes:
    # Opening a named pipe would block forever.
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnreadableSpecError("is not a regular file")
    return path.read_bytes()


def _resolve(
    files: list[SpecFile], problems: list[Problem]
) -> tuple[dict[str, SpecFile], dict[str, SpecFile]]:
    """Return the file with the highest priority for each device, and the ignored devices, each with
    one of its files."""
    holders: dict[str, SpecFile] = {}
    lost: dict[str, SpecFile] = {}
    for file in files:
        for name in file.devices:
            holder = holders.get(name)
            if holder is None or holder.priority < file.priority:
                if holder is not None:
                    text = f"is overridden by {file.path}, which also defines {name}"
                    problems.append(_problem_of(holder, name, text, severity="warning"))
                holders[name] = file
            else:
                lost[name] = file
                for one, other in ((file, holder), (holder, file)):
                    text = f"conflicts: {other.path} also defines {name}, so runtimes use neither"
                    problems.append(_problem_of(one, name, text))
    for name, loser in lost.items():
        holder = holders[name]
        if holder.priority != loser.priority:
            text = (
                f"is ignored: two files of {loser.path.parent} also define {name}, and runtimes "
                "then ignore all its definitions"
            )
            problems.append(_problem_of(holder, name, text))
    return holders, lost


def _problem(path: Path, text: str, *, field: str = "", severity: Severity = "error") -> Problem:
    return Problem(file=str(path), path=field, severity=severity, text=text)


def _problem_of(file: SpecFile, device: str, text: str, *, severity: Severity = "error") -> Problem:
    return _problem(file.path, text, field=file.devices[device], severity=severity)


# ---------------------------------------------------------------- all problems


def lint_spec(spec: object) -> list[Problem]:
    """Return all problems in a spec that was parsed from JSON or YAML."""
    found: Found = []
    check_spec(spec, "", found)
    check_version(spec, found)
    return found


def lint_directories(paths: Iterable[Path | str] = DEFAULT_DIRECTORIES) -> list[Problem]:
    """
    Return all problems in directories of CDI files. The first directory has the lowest priority.

    Blocks. A directory that does not exist is not a problem; an unreadable one is.
    """
    return list(read_directories(paths, check=lint_spec).problems)
