"""
The layout of drakit's files below the kubelet's root directory, and their modes.

Except for registration sockets, all files are in one directory, so that the node plugin does not
need to mount the kubelet's whole `plugins` directory, which also contains the global mounts of CSI
drivers. The directories of drivers are in a subdirectory, because any DNS subdomain can be a driver
name, including `backends`.

Only root can access the data, because checkpoints contain the opaque parameters of tenants. A mode
passed to ``mkdir`` or ``open`` applies only to new entries, and the umask removes bits from it, so
the ``private_*`` functions set the mode afterwards. They change only the file that they have
opened: if its path is replaced by a symbolic link, the link is not followed.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 107
"""Maximum length of a Unix socket path on Linux in bytes, without the terminating null byte."""


def home_directory(kubelet_root: Path) -> Path:
    """Return drakit's directory on a node, which contains all its other directories."""
    return kubelet_root / "plugins" / "drakit.dev"


def drivers_directory(kubelet_root: Path) -> Path:
    """Return the parent directory of all driver data directories."""
    return home_directory(kubelet_root) / "drivers"


def driver_directory(kubelet_root: Path, driver: str) -> Path:
    """Return the data directory of a driver, which contains its checkpoint and DRA socket."""
    return drivers_directory(kubelet_root) / driver


def backends_directory(kubelet_root: Path) -> Path:
    """Return the default parent directory of the backend directories."""
    return home_directory(kubelet_root) / "backends"


def device_plugins_directory(kubelet_root: Path) -> Path:
    """Return the default parent directory of the device plugin directories."""
    return home_directory(kubelet_root) / "device-plugins"


def private_directory(path: Path) -> None:
    """Create a directory if it is missing, and restrict it to root. Raises OSError. Blocks."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    opened = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        _restrict(opened, 0o700)
    finally:
        os.close(opened)


def private_file(path: Path) -> None:
    """Restrict a regular file to root. Ignore other file types. Raises OSError. Blocks."""
    try:
        opened = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        if stat.S_ISREG(os.fstat(opened).st_mode):
            _restrict(opened, 0o600)
    finally:
        os.close(opened)


@contextmanager
def restricted_socket(path: Path | str, mode: int, *, dir_fd: int | None = None) -> Generator[int]:
    """Open the socket file at a path, and set its mode. Raises OSError if the path is another type
    of file. Yields a descriptor that can be used for ``fstat`` and for linking. Blocks."""
    opened = os.open(path, os.O_PATH | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        if not stat.S_ISSOCK(os.fstat(opened).st_mode):
            raise OSError(errno.EEXIST, f"{path} was replaced while it was created")
        _restrict(opened, mode)
        yield opened
    finally:
        os.close(opened)


def write_private(path: Path, content: bytes) -> None:
    """Replace a file's content atomically, and restrict it to root. Raises OSError. Blocks."""
    # Two instances may write the same file, and in containers they can have the same process ID.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            private_file(temporary)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        temporary.unlink(missing_ok=True)


def _restrict(opened: int, mode: int) -> None:
    if stat.S_IMODE(os.fstat(opened).st_mode) != mode:
        os.chmod(f"/proc/self/fd/{opened}", mode)  # fchmod does not accept an O_PATH descriptor
