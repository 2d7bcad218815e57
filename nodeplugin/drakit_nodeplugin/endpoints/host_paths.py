"""
Handles paths from vendor processes: host device nodes, directories and sockets.

When the kubelet passes device paths to a runtime, the runtime follows symbolic links to device
nodes, and adds all device nodes in a directory. A CDI spec allows neither. Therefore, this module
resolves both in the host's ``/dev``, as this process sees it. A path that is not visible here
remains unchanged, and the runtime reports problems with it.

A vendor process owns the content of its directory: it can replace a socket with a symbolic link, or
rename it, at any time. Therefore, a socket is opened only once, without following links, and all
checks and connections use the open file.

The host's ``/dev`` is in memory, so the daemon's loop may look up a path that is not a directory.
All other functions block.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

DEVICES = "/dev"
MOUNTED = Path("/host/dev")
"""Where the chart mounts the host's ``/dev``."""

MAX_LINKS = 40
"""Maximum length of a chain of symbolic links, as in Linux."""

MAX_ENTRIES = 1024
"""Maximum number of entries to read in a directory and its subdirectories, which may also contain
other files."""

MAX_NODES = 256
"""Maximum number of device nodes in a directory. A larger number must be a mistake."""

_LEFT_OUT = frozenset({"pts", "shm", "fd", "mqueue", "console", ".lxc", ".lxd-mounts", ".udev"})
"""Directory entries that are skipped, because runtimes also skip them."""


class DirectoryError(Exception):
    """A path is a directory, but reading directories is disabled."""


class TooManyNodesError(Exception):
    """A directory has more device nodes than a container can get."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"directory {path}, which contains more than {MAX_NODES} device nodes or "
            f"{MAX_ENTRIES:,} files"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNode:
    """A path in the host's ``/dev``."""

    path: str
    """The path with symbolic links resolved."""

    device: tuple[Literal["b", "c"], int, int] | None = None
    """The type, major number and minor number. None if no device node is visible at the path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostDeviceNodes:
    """The host's ``/dev``, as this process sees it."""

    root: Path

    walk: bool = True
    """Whether to read directories, which can take a long time. If false, directories raise
    DirectoryError."""

    @classmethod
    def found(cls) -> HostDeviceNodes:
        """Return the host's ``/dev``. In a pod, it is mounted in addition to the pod's own
        ``/dev``."""
        return cls(root=MOUNTED if MOUNTED.is_dir() else Path(DEVICES))

    def nodes(self, path: str) -> list[tuple[str, str]]:
        """
        Return the device nodes at or below a host path. For each, return its path relative to the
        given path (empty for the given path itself), and its own path with symbolic links resolved.

        Raises :class:`TooManyNodesError`, :class:`DirectoryError`.
        """
        try:
            real = self._real(path)
            if not real.startswith(f"{DEVICES}/") or not self._seen(real).is_dir():
                return [("", real)]
        except (OSError, ValueError):  # the path is too long, or contains a null byte
            return [("", path)]
        if not self.walk:
            raise DirectoryError(path)
        found: list[tuple[str, str]] = []
        for entries, (node, is_device) in enumerate(self._within(real), start=1):
            if is_device:
                found.append((node.removeprefix(f"{real}/"), node))
            if len(found) > MAX_NODES or entries > MAX_ENTRIES:
                raise TooManyNodesError(path)
        return sorted(found) or [("", real)]

    def node(self, path: str) -> HostNode:
        """Return the target of a path, with symbolic links resolved, and its device."""
        real = path
        try:
            real = self._real(path)
            mode, number = self._status(real)
        except (OSError, ValueError):  # the path is missing, is too long, or contains a null byte
            return HostNode(path=real)
        if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
            return HostNode(path=real)
        type_ = "b" if stat.S_ISBLK(mode) else "c"
        return HostNode(path=real, device=(type_, os.major(number), os.minor(number)))

    def _status(self, path: str) -> tuple[int, int]:
        """Return the mode and device number of a path. Both are zero for a path outside
        ``/dev``."""
        if not path.startswith(f"{DEVICES}/"):
            return 0, 0
        status = os.lstat(self._seen(path))
        return status.st_mode, status.st_rdev

    def _seen(self, path: str) -> Path:
        """Return the path at which this process sees a path in ``/dev``."""
        return self.root / path.removeprefix(f"{DEVICES}/")

    def _real(self, path: str) -> str:
        """Follow symbolic links in every part of the path."""
        if not path.startswith(f"{DEVICES}/"):
            return path
        done, todo, links = DEVICES, path.removeprefix(f"{DEVICES}/").split("/"), 0
        while todo:
            at = posixpath.normpath(posixpath.join(done, todo.pop(0)))
            try:
                target = self._link(at)
            except FileNotFoundError:
                # Nothing can be below this path.
                return posixpath.normpath(posixpath.join(at, *todo))
            if target is None:
                done = at
                continue
            links += 1
            if links > MAX_LINKS:
                return path
            if target.startswith("/"):
                done = "/"
            todo = [part for part in target.split("/") if part] + todo
        return done

    def _link(self, path: str) -> str | None:
        """Return a link's target, or None if it is not a link, or not in ``/dev``. Raises
        FileNotFoundError."""
        if not path.startswith(f"{DEVICES}/"):
            return None
        try:
            return os.readlink(self._seen(path))
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError from None
        except OSError:
            return None

    def _within(self, path: str) -> Iterator[tuple[str, bool]]:
        """Yield each entry below a directory as it is read, and whether it is a device node."""
        directories = [path]
        while directories:
            directory = directories.pop()
            with suppress(OSError), os.scandir(self._seen(directory)) as entries:
                for entry in entries:
                    at = f"{directory}/{entry.name}"
                    mode = 0
                    if entry.name not in _LEFT_OUT:
                        with suppress(OSError):
                            mode = entry.stat(follow_symlinks=False).st_mode
                    if stat.S_ISDIR(mode):
                        directories.append(at)
                    yield at, stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


class SocketFile(NamedTuple):
    """
    Identifies a file, to distinguish it from another file at the same path.

    The file system may reuse an inode immediately. However, renaming or linking a file, or changing
    its owner, updates its change time.
    """

    device: int
    inode: int
    changed_ns: int
    mode: int
    uid: int
    gid: int

    @property
    def is_socket(self) -> bool:
        """Whether the file is a socket."""
        return stat.S_ISSOCK(self.mode)


def socket_file(found: os.stat_result) -> SocketFile:
    """Return the identity of a file from its status."""
    return SocketFile(
        found.st_dev, found.st_ino, found.st_ctime_ns, found.st_mode, found.st_uid, found.st_gid
    )


class OpenSocket:
    """An open descriptor for a socket file. The descriptor is closed when the last reference to
    this object is dropped, if not earlier, so a canceled call does not leak it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.file = socket_file(os.fstat(descriptor))

    @property
    def path(self) -> str:
        """A path that leads only to this file until it is closed."""
        return path_of(self._descriptor)

    def close(self) -> None:
        """Close the descriptor. `path` must not be used after that."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close


def path_of(descriptor: int) -> str:
    """Return a path that leads to an open file."""
    return f"/proc/self/fd/{descriptor}"


@contextmanager
def open_directory(path: Path) -> Generator[int]:
    """Open a directory, unless it is a symbolic link. Raises OSError. Blocks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_socket(path: Path) -> OpenSocket:
    """Open a file as a socket, without following a symbolic link. Raises OSError. Blocks."""
    with open_directory(path.parent) as directory:
        return OpenSocket(os.open(path.name, os.O_PATH | os.O_NOFOLLOW, dir_fd=directory))
