"""
The kernel's text formats of mounts (``mountinfo``) and swap areas (``/proc/swaps``).

A malformed line is an error. The caller must know whether a device is in use, and a skipped line
could be the one that shows it.

It must not know files, sysfs, or the use of the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ("MountEntry", "parse_mountinfo", "parse_swaps", "unescape")

_ESCAPE = re.compile(r"\\([0-3][0-7]{2})")


@dataclass(frozen=True, kw_only=True, slots=True)
class MountEntry:
    """One mount, as far as devices are concerned."""

    number: str
    """``MAJOR:MINOR`` of the file system; major 0 where it belongs to no single device."""

    root: str
    """The part of the file system that is mounted."""

    mount_point: str
    fs_type: str
    source: str


def unescape(text: str) -> str:
    r"""Undo the kernel's ``\040`` for characters that would break a line into wrong fields."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def parse_mountinfo(text: str) -> list[MountEntry]:
    """Read a mountinfo file; raises ValueError for a malformed line."""
    return [_mount(line) for line in text.split("\n") if line]


def _mount(line: str) -> MountEntry:
    # Single spaces: a source may be empty, and then there are two in a row.
    fields = line.split(" ")
    try:
        separator = fields.index("-", 6)
        fs_type, source = fields[separator + 1 : separator + 3]
    except ValueError:
        raise ValueError(f"a line of mountinfo has no file system: {line!r}") from None
    if not re.fullmatch(r"\d+:\d+", fields[2]):
        raise ValueError(f"a line of mountinfo has no device number: {line!r}")
    return MountEntry(
        number=fields[2],
        root=unescape(fields[3]),
        mount_point=unescape(fields[4]),
        fs_type=unescape(fs_type),
        source=unescape(source),
    )


def parse_swaps(text: str) -> list[str]:
    """Read the paths of swap areas; raises ValueError for another file."""
    header, *lines = text.split("\n")
    if not header.startswith("Filename"):
        raise ValueError(f"the list of swap areas begins with {header!r}, not with its header")
    return [unescape(re.split(r"[ \t]", line, maxsplit=1)[0]) for line in lines if line]
