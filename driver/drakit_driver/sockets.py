"""
The socket of a driver's server: created under a hidden name, then put in place.

A rename puts the socket in place. So it is never visible with other permissions, and the path
always exists in a rolling update, in which the new instance replaces the socket of the previous
one. The node plugin ignores names that begin with a dot.

It must not know what is served.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from drakit.settings import SettingsError

NAME = "driver.sock"
"""The name of the socket in a directory."""

SUFFIX = ".sock"

MAX_PATH = 107
"""Bytes of a socket's path: the kernel's limit."""


def socket_path(*, file: Path | None, directory: Path | None) -> Path:
    """Return the path of the socket for the arguments of a command line; raises
    :class:`SettingsError`."""
    path = file if directory is None else directory / NAME
    assert path is not None
    path = path.absolute()
    option = "--socket" if directory is None else "--directory"
    if path.suffix != SUFFIX or path.name.startswith("."):
        raise SettingsError(
            f"{option}: {path} is ignored by the node plugin: its name must end in {SUFFIX} and "
            "must not begin with a dot"
        )
    if (size := len(os.fsencode(path))) > MAX_PATH:
        raise SettingsError(
            f"{option}: the path {path} has {size} bytes, and a socket's path has at most "
            f"{MAX_PATH}; choose a shorter one"
        )
    if not path.parent.is_dir():
        raise SettingsError(
            f"{option}: {path.parent} is not a directory; mount the directory of the driver's "
            "entry in backends.allowed there"
        )
    return path


class ServerSocket:
    """One socket: listening under :attr:`hidden` first, and then at its path."""

    def __init__(self, path: Path, *, mode: int) -> None:
        """`mode` has the permissions of the socket."""
        self.path = path
        self._mode = mode
        # As long as the shortest name of a socket, so that the kernel accepts both or neither.
        self.hidden = path.with_name(f".{secrets.token_hex(2)}")
        self._own: tuple[int, int] | None = None

    def publish(self) -> None:
        """Put the socket in place, which listens under the hidden name; raises
        :class:`SettingsError`. Blocks."""
        try:
            with suppress(FileNotFoundError):
                if not stat.S_ISSOCK(self.path.lstat().st_mode):
                    raise SettingsError(f"{self.path} exists and is not a socket; remove it")
            self.hidden.chmod(self._mode)
            self._own = _identity(self.hidden)
            self.hidden.rename(self.path)
        except OSError as error:
            raise SettingsError(
                f"socket {self.path} cannot be created: {error.strerror}"
            ) from error

    def remove(self) -> None:
        """Remove the socket, unless another instance has replaced it. Blocks."""
        with suppress(OSError):
            self.hidden.unlink()
        # Only once: another instance's socket can get the same inode number.
        own, self._own = self._own, None
        with suppress(OSError):
            if own is None or _identity(self.path) != own:
                return
            # Another instance can put its socket in place at this moment.
            self.path.rename(self.hidden)
            if _identity(self.hidden) == own:
                self.hidden.unlink()
            else:
                self.hidden.rename(self.path)


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino
