"""
The socket of a driver's server. It is created under a hidden name, and then renamed to its path.

Because of the rename, the socket is never visible with wrong permissions, and the path always
exists during a rolling update, in which the new instance replaces the socket of the previous one.
The node plugin ignores names that begin with a dot.

Any process that can connect can prepare claims, so only the driver's own user, root, and the users
given in an option can connect. File permissions enforce this, because gRPC for Python does not
expose the user of a peer. If the driver is not root, an access control list gives root access,
because the node plugin does not have a capability that overrides permissions.

Does not depend on the service.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from drakit.layout import MAX_SOCKET_PATH_BYTES, restricted_socket
from drakit.settings import SettingsError
from drakit_daemon.sockets import refuses_connections

NAME = "driver.sock"
"""The file name of the socket in a directory."""

SUFFIX = ".sock"


def socket_path(*, file: Path | None, directory: Path | None) -> Path:
    """Return the socket path for the command line arguments. Raises :class:`SettingsError`."""
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
    """One socket, which first listens at :attr:`hidden`, and then at its path."""

    def __init__(self, path: Path, *, peers: Collection[int] = ()) -> None:
        """Create the object, but not the socket file. `peers` are the user IDs that can connect, in
        addition to root and the driver's own user."""
        self.path = path
        self._peers = {0, *peers} - {os.geteuid()}
        # The hidden name is not longer than any socket name. Therefore, if the kernel accepts the
        # path, it also accepts the hidden one.
        self.hidden = path.with_name(f".{secrets.token_hex(2)}")
        self._own: tuple[int, ...] | None = None
        self._predecessor: int | None = None
        """A file descriptor of the socket that this one replaced."""

    def publish(self) -> None:
        """Move the socket, which is listening under the hidden name, to its path. Raises
        :class:`SettingsError`. Blocks."""
        try:
            with suppress(FileNotFoundError):
                if not stat.S_ISSOCK(self.path.lstat().st_mode):
                    raise SettingsError(f"{self.path} exists and is not a socket; remove it")
                self._predecessor = os.open(self.path, os.O_PATH | os.O_NOFOLLOW)
            with restricted_socket(self.hidden, 0o600) as opened:
                self._admit_peers(opened)
                self._own = _identity(os.fstat(opened))
                self.hidden.rename(self.path)
        except OSError as error:
            raise SettingsError(
                f"socket {self.path} cannot be created: {error.strerror}"
            ) from error

    def _admit_peers(self, opened: int) -> None:
        if not self._peers:
            return
        try:
            os.setxattr(f"/proc/self/fd/{opened}", _ACL, access_list(self._peers))
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            raise SettingsError(
                f"the file system of {self.path.parent} has no access control lists, so only user "
                f"{os.geteuid()} could connect to {self.path}; run the driver as root, or put the "
                "directory on another file system"
            ) from error

    def predecessor_serves(self) -> bool:
        """Return whether the instance whose socket was replaced is still serving. During an update,
        the node plugin uses that instance until it ends."""
        opened = self._predecessor
        if opened is None or refuses_connections(Path(f"/proc/self/fd/{opened}")):
            self._forget_predecessor()
            return False
        return True

    def _forget_predecessor(self) -> None:
        opened, self._predecessor = self._predecessor, None
        if opened is not None:
            os.close(opened)

    def is_in_place(self) -> bool:
        """Return whether the path still leads to this socket. Blocks."""
        return self._own is not None and socket_identity(self.path) == self._own

    def remove(self) -> None:
        """Remove the socket, unless another instance has replaced it. Blocks."""
        self._forget_predecessor()
        with suppress(OSError):
            self.hidden.unlink()
        # Remove the socket only once, because another instance's socket can get the same inode
        # number.
        own, self._own = self._own, None
        with suppress(OSError):
            if own is None or socket_identity(self.path) != own:
                return
            # Rename the socket and check it again, because another instance can rename its own
            # socket to the path at this moment.
            self.path.rename(self.hidden)
            if socket_identity(self.hidden) == own:
                self.hidden.unlink()
            else:
                self.hidden.rename(self.path)


_ACL = "system.posix_acl_access"
_READ_WRITE, _NOTHING = 6, 0
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 1, 2, 4, 16, 32
_NO_ID = 0xFFFF_FFFF


def access_list(users: Collection[int]) -> bytes:
    """Return an access control list that gives only a file's owner and these users access, in the
    kernel's format (linux/posix_acl_xattr.h)."""
    entries = [
        (_OWNER, _READ_WRITE, _NO_ID),
        *((_USER, _READ_WRITE, user) for user in sorted(users)),
        (_GROUP, _NOTHING, _NO_ID),
        (_MASK, _READ_WRITE, _NO_ID),
        (_OTHERS, _NOTHING, _NO_ID),
    ]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def socket_identity(path: Path) -> tuple[int, ...] | None:
    """Return a value that distinguishes the socket at a path from later ones, or None if there is
    no socket. Blocks."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return _identity(found) if stat.S_ISSOCK(found.st_mode) else None


def _identity(found: os.stat_result) -> tuple[int, ...]:
    # Include the modification time, because a new socket can get the inode number of a removed one.
    return found.st_dev, found.st_ino, found.st_mtime_ns
