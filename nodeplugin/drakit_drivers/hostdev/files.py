"""
Small files and links of sysfs.

A read can fail at any moment, because the device is being unplugged. An unreadable file counts as
missing, and is never an error.

It must not know the meaning of the files.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ("entries", "link_name", "read_attribute")


def read_attribute(directory: Path, name: str) -> str | None:
    """Read an attribute; None if it is missing, empty or fails."""
    try:
        text = (directory / name).read_bytes().decode(errors="replace")
    except OSError:
        return None
    return text.strip().strip("\0") or None


def link_name(link: Path) -> str | None:
    """Return the name of a link's target; None if there is no link."""
    try:
        return link.readlink().name
    except OSError:
        return None


def entries(directory: Path) -> list[Path]:
    """List a directory, sorted; empty if it is missing."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
