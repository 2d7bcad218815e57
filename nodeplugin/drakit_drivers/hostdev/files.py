"""
Small files and links of the host, mostly of sysfs.

Missing and unknown differ. A missing file or value is a fact: there is no such device, the device
is being unplugged, or it has no such attribute. Any other error (no file descriptor, no memory, no
permission) leaves it unknown and raises :class:`UnreadableError`. A caller that took it for missing
would remove a device that is still there.

It must not depend on the meaning of the files.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ("UnreadableError", "entries", "is_missing", "link_name", "listing", "read_attribute")

ValueT = TypeVar("ValueT")

_MISSING = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO))
"""The file does not exist, or its device is being unplugged."""

_WITHOUT_VALUE = frozenset((errno.EINVAL, errno.EISDIR, errno.ENODATA, errno.EOPNOTSUPP))
"""The kernel's driver has no value for the attribute, or the file is of another kind."""


class UnreadableError(Exception):
    """A file that may exist cannot be read. The text is a clause that names the file."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(f"{path} cannot be read: {reason}")


def is_missing(error: OSError) -> bool:
    """Return whether an error means that a file does not exist."""
    return error.errno in _MISSING


def read_attribute(directory: Path, name: str) -> str | None:
    """Read an attribute; None if it is missing or has no value."""
    path = directory / name
    content = _value(path, path.read_bytes)
    return content.decode(errors="replace").strip().strip("\0") or None if content else None


def link_name(link: Path) -> str | None:
    """Return the name of a link's target; None if there is no link."""
    target = _value(link, link.readlink)
    return target.name if target else None


def entries(directory: Path) -> list[Path]:
    """List a directory, sorted; empty if it is missing."""
    return listing(directory) or []


def listing(directory: Path) -> list[Path] | None:
    """List a directory, sorted; None if it is missing."""
    return _value(directory, lambda: sorted(directory.iterdir()))


def _value(path: Path, read: Callable[[], ValueT]) -> ValueT | None:
    try:
        return read()
    except OSError as error:
        if error.errno in _MISSING | _WITHOUT_VALUE:
            return None
        raise UnreadableError(path, error.strerror) from error
