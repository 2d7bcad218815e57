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

from drakit.layout import MAX_SOCKET_PATH_BYTES, restricted_socket
from drakit.settings import SettingsError

NAME = "driver.sock"
"""The name of the socket in a directory."""

SUFFIX = ".sock"


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
    if (size := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
        raise SettingsError(
            f"{option}: the path {path} has {size} bytes, and a socket's path has at most "
            f"{MAX_SOCKET_PATH_BYTES}; choose a shorter one"
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
        self._own: tuple[int, ...] | None = None

    def publish(self) -> None:
        """Put the socket in place, which listens under the hidden name; raises
        :class:`SettingsError`. Blocks."""
        try:
            with suppress(FileNotFoundError):
                if not stat.S_ISSOCK(self.path.lstat().st_mode):
                    raise SettingsError(f"{self.path} exists and is not a socket; remove it")
            with restricted_socket(self.hidden, self._mode) as opened:
                self._own = _identity(os.fstat(opened))
                self.hidden.rename(self.path)
        except OSError as error:
            raise SettingsError(
                f"socket {self.path} cannot be created: {error.strerror}"
            ) from error

    def is_in_place(self) -> bool:
        """Return whether the path still has this socket. Blocks."""
        return self._own is not None and socket_identity(self.path) == self._own

    def remove(self) -> None:
        """Remove the socket, unless another instance has replaced it. Blocks."""
        with suppress(OSError):
            self.hidden.unlink()
        # Only once: another instance's socket can get the same inode number.
        own, self._own = self._own, None
        with suppress(OSError):
            if own is None or socket_identity(self.path) != own:
                return
            # Another instance can put its socket in place at this moment.
            self.path.rename(self.hidden)
            if socket_identity(self.hidden) == own:
                self.hidden.unlink()
            else:
                self.hidden.rename(self.path)


def socket_identity(path: Path) -> tuple[int, ...] | None:
    """Distinguish a socket from another one at its path; None if there is none. Blocks."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return _identity(found) if stat.S_ISSOCK(found.st_mode) else None


def _identity(found: os.stat_result) -> tuple[int, ...]:
    # The time, too: a new socket can get the number of one that was removed.
    return found.st_dev, found.st_ino, found.st_mtime_ns
