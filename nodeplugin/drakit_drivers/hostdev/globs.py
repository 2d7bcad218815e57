"""
Globs of device paths: ``*``, ``?`` and brackets, each within one part of a path.

It must not know devices: it matches text.
"""

from __future__ import annotations

import re
from fnmatch import translate
from functools import lru_cache

__all__ = ("check_glob", "has_wildcard", "matches")


def has_wildcard(glob: str) -> bool:
    """Return whether it is a glob, not the path of one device."""
    return any(sign in glob for sign in "*?[")


def check_glob(glob: str) -> str:
    """Raise for globs that match no device, or other devices than intended."""
    if not glob.startswith("/dev/"):
        raise ValueError(f"{glob!r} must be an absolute path under /dev")
    if re.search(r"[\x00-\x1f\x7f]", glob):
        raise ValueError(f"{glob!r} has a control character")
    for part in glob.split("/")[2:]:
        if part in ("", ".", ".."):
            raise ValueError(f"{glob!r} has an empty part, '.' or '..' in it")
        if "**" in part:
            raise ValueError(f"{glob!r} has '**', which is not supported: a '*' matches one part")
        _check_brackets(part, glob)
    return glob


def _check_brackets(part: str, glob: str) -> None:
    rest = part
    while rest:
        sign, rest = rest[0], rest[1:]
        if sign not in "[]":
            continue
        # A ']' that stands first is one of the characters, not the end.
        inside = re.match(r"!?+(?:\][^\]]*|[^\]]+)(?=\])", rest)
        if sign == "]" or not inside:
            raise ValueError(f"{glob!r} has a bracket without its counterpart in the same part")
        if inside[0].startswith("^"):
            raise ValueError(f"{glob!r} has '[^': write '[!' for all other characters")
        for first, last in re.findall(r"(.)-(.)", inside[0].removeprefix("!")):
            if first > last:
                raise ValueError(f"{glob!r} has the range {first}-{last}, which matches nothing")
        rest = rest[inside.end() + 1 :]


def matches(glob: str, path: str) -> bool:
    """Return whether a glob matches a path; a ``*`` never crosses a ``/``."""
    patterns = _compiled(glob)
    parts = path.split("/")
    return len(parts) == len(patterns) and all(
        pattern.match(part) for pattern, part in zip(patterns, parts, strict=True)
    )


@lru_cache(maxsize=1024)
def _compiled(glob: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(translate(part)) for part in glob.split("/"))
