"""
Who owns sockets: a lock that its owner holds for life, and the removal of what the dead left.

A lock file in the driver's directory lists the sockets of one instance. Whoever can lock it knows
that the instance is gone, however it ended. A socket is removed only if its owner is gone *and* it
refuses connections; those of live instances and of other drivers are never touched.

All functions block, for at most `LOCK_SECONDS` each. It must not know gRPC, or what is served.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from drakit_nodeplugin.kubelet.sockets import MAX_PATH_BYTES, SocketError, SocketPaths

__all__ = ("Ownership",)

logger = logging.getLogger(__name__)

LOCK_SECONDS = 5.0
"""How long our own lock is waited for: another instance that cleans up holds it for a moment."""

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class Ownership:
    """The lock of one instance, and its right to remove what belongs to nobody."""

    def __init__(self, driver: str, paths: SocketPaths) -> None:
        self._driver = driver
        self._paths = paths
        self._fd: int | None = None

    def acquire(self) -> None:
        """
        Make the directories, become the owner of our sockets, and remove what the dead left.

        Raises :class:`SocketError`.
        """
        try:
            for directory in (self._paths.data, self._paths.registration.parent):
                directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._fd = self._lock_own()
            # Written before the sockets exist: whatever ends us later, they can be found.
            text = "".join(f"{path}\n" for path in self._paths.sockets)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, os.fsencode(text), 0)
        except OSError as error:
            raise SocketError(
                f"driver {self._driver}: the directories of its sockets cannot be used: {error}"
            ) from error
        for path in self._paths.sockets:
            # Left by ourselves before a restart of the container; nobody else can hold our lock.
            _unlink_socket(path)
        self._remove_stale()

    def release(self) -> None:
        """Remove our sockets and our lock; nothing of this instance remains."""
        if self._fd is None:
            return
        for path in self._paths.sockets:
            _unlink_socket(path)
        with contextlib.suppress(FileNotFoundError):
            self._paths.lock.unlink()
        os.close(self._fd)
        self._fd = None

    def _lock_own(self) -> int:
        until = time.monotonic() + LOCK_SECONDS
        while True:
            fd = _try_lock(self._paths.lock, create=True)
            if fd is not None:
                return fd
            if time.monotonic() > until:
                raise SocketError(
                    f"driver {self._driver}: another process holds {self._paths.lock}; stop the "
                    f"other node plugin that runs for the same pod UID"
                )
            time.sleep(0.05)

    def _remove_stale(self) -> None:
        alive: set[Path] = set()
        for lock in sorted(self._paths.data.glob("instance-*.lock")):
            if lock == self._paths.lock:
                continue
            fd = _try_lock(lock, create=False)
            if fd is None:
                alive.update(_listed(lock))
                continue
            try:
                for path in _listed(lock):
                    # What a file says is not enough to remove something elsewhere.
                    if path.parent in self._paths.directories:
                        self._remove_if_dead(path)
                lock.unlink(missing_ok=True)
            finally:
                os.close(fd)
        for path in self._named_like_ours():
            if path not in alive and path not in self._paths.sockets:
                self._remove_if_dead(path)

    def _named_like_ours(self) -> Iterator[Path]:
        """Find sockets whose lock file is gone; a UID in the name excludes longer driver names."""
        registration = re.compile(rf"{re.escape(self._driver)}-{_UUID}-reg\.sock")
        dra = re.compile(rf"dra-{_UUID}\.sock")
        for pattern, directory in (
            (registration, self._paths.registration.parent),
            (dra, self._paths.data),
        ):
            yield from (path for path in directory.iterdir() if pattern.fullmatch(path.name))

    def _remove_if_dead(self, path: Path) -> None:
        if _refuses_connections(path):
            _unlink_socket(path)
            logger.info("stale socket removed", extra={"driver": self._driver, "path": str(path)})


def _try_lock(path: Path, *, create: bool) -> int | None:
    """Lock a file without waiting; None if somebody else holds it, or it is gone."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between our open and our lock its last owner may have removed the file.
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def _listed(lock: Path) -> list[Path]:
    try:
        return [Path(line) for line in lock.read_text().splitlines() if line.startswith("/")]
    except (FileNotFoundError, UnicodeDecodeError):
        return []


def _refuses_connections(path: Path) -> bool:
    """Tell a socket without a listener. One that is only slow to accept is alive."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES or not _is_socket(path):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def _unlink_socket(path: Path) -> None:
    if _is_socket(path):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False
