"""
The instances of one driver on this node: usually one, two during a rolling update. Each holds a
lock while it lives, owns its sockets, and removes stale ones.

Names contain the instance (the pod's UID). So two instances never share a path, and a new instance
never uses the path of an old one.

A lock file in the driver's directory lists the sockets of one instance. If another process can lock
it, the instance is gone, regardless of its exit. A socket is removed only if its owner is gone
*and* it refuses connections; sockets of live instances and of other drivers are never touched.

All instances of the driver share one more lock. Its holder is the primary instance. Only the
primary instance publishes slices and collects stale claims. The kernel releases the locks of a
process that ends, so no instance waits for a killed one.

:class:`Ownership` blocks, for at most `LOCK_SECONDS` per call; :class:`RunningInstances` calls it
in threads. It must not know gRPC, the services behind the sockets, or the users of its answers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from drakit.layout import MAX_SOCKET_PATH_BYTES, driver_directory, home_directory, private_directory
from drakit.logs import ProblemLog
from drakit_nodeplugin.file_poller import FilePoller, FileWatch

__all__ = (
    "Ownership",
    "RunningInstances",
    "SocketError",
    "SocketPaths",
    "is_served",
    "new_owner",
    "socket_paths",
)

logger = logging.getLogger(__name__)

LOCK_SECONDS = 5.0
"""Maximum wait for our own lock. Another instance that cleans up holds it for a moment."""

SETTLED_SECONDS = 0.05
"""Two changes within this time may have the same timestamp: more than the longest tick of common
kernels (10 ms)."""

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_SHORT = r"[A-Za-z0-9_-]{11}"


_LOCK = re.compile(r"instance-.*\.lock")
_PLAIN_UID = re.compile(r"[A-Za-z0-9-]{1,64}")


class SocketError(Exception):
    """A socket cannot be created. The text names it and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SocketPaths:
    """The files of one instance of a driver, as absolute paths."""

    home: Path
    """drakit's directory on the node, shared by all drivers."""

    data: Path
    """The driver's directory, shared by its instances."""

    registration: Path
    """The socket by which the kubelet discovers the driver."""

    dra: Path
    """The socket that serves DRA and health."""

    lock: Path
    """Held by the instance while it lives; lists its sockets."""

    @property
    def sockets(self) -> tuple[Path, Path]:
        return self.registration, self.dra

    @property
    def directories(self) -> frozenset[Path]:
        """Every directory that can contain a socket of this driver's instances."""
        return frozenset({self.data, self.home, self.registration.parent})

    def lock_of(self, instance_uid: str) -> Path:
        """Return the lock of any instance of the driver."""
        return self.data / f"instance-{_short(instance_uid)}.lock"


def socket_paths(driver: str, *, kubelet_root: Path, instance_uid: str) -> SocketPaths:
    """
    Return the paths of an instance; hashes replace long names until the path fits.

    The registration socket is named as Kubernetes' own helper names it. Raises
    :class:`SocketError`.
    """
    if not kubelet_root.is_absolute():
        raise SocketError(f"the kubelet root must be an absolute path, not {kubelet_root}")
    registry, home = kubelet_root / "plugins_registry", home_directory(kubelet_root)
    data = driver_directory(kubelet_root, driver)
    short = _short(instance_uid)
    long = _hash(f"{driver}\0{instance_uid}".encode(), 16)
    plain = [instance_uid] if _PLAIN_UID.fullmatch(instance_uid) else []
    return SocketPaths(
        home=home,
        data=data,
        registration=_first_that_fits(
            [registry / f"{driver}-{uid}-reg.sock" for uid in [*plain, short]]
            + [registry / f"dra-{long}-reg.sock"]
        ),
        # The last one is outside the driver's directory, whose name can have 63 characters.
        dra=_first_that_fits(
            [data / f"dra-{uid}.sock" for uid in [*plain, short]] + [home / f"dra-{long}.sock"]
        ),
        lock=data / f"instance-{short}.lock",
    )


def _short(instance_uid: str) -> str:
    return _hash(instance_uid.encode(), 8)


def _hash(text: bytes, size: int) -> str:
    digest = hashlib.sha256(text).digest()[:size]
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _first_that_fits(candidates: Sequence[Path]) -> Path:
    for path in candidates:
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
    shortest = candidates[-1]
    raise SocketError(
        f"the path of a socket is too long: {shortest} has {len(os.fsencode(shortest))} bytes, and "
        f"Linux allows {MAX_SOCKET_PATH_BYTES}; use a kubelet root with a shorter path"
    )


# ---------------------------------------------------------------- locks and sockets


def is_served(data: Path) -> bool:
    """Return whether an instance of a driver lives, by the driver's directory. Raises OSError.
    Blocks."""
    return any(_is_locked(data / name) for name in os.listdir(data) if _LOCK.fullmatch(name))


class Ownership:
    """The lock of one instance, and its right to remove sockets without an owner."""

    def __init__(self, driver: str, paths: SocketPaths) -> None:
        self.driver = driver
        self.paths = paths
        self._primary = paths.data / "primary.lock"
        self._fd: int | None = None
        self._primary_fd: int | None = None
        self._directory = FileWatch(paths.data, settled_seconds=SETTLED_SECONDS)
        self._others: list[Path] | None = None
        """The locks of other instances, dead or alive."""
        self._changing = threading.Lock()
        """Held while the primary lock changes hands: threads take it, and a thread may outlive its
        caller, up to our release."""

    def acquire(self) -> None:
        """
        Create the directories, become the owner of our sockets, and remove stale ones.

        Raises :class:`SocketError`.
        """
        try:
            private_directory(self.paths.data)
            # The kubelet's own directory, if it exists.
            self.paths.registration.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._fd = self._lock_own()
            # Written before the sockets exist, so that they are found even after a crash.
            text = "".join(f"{path}\n" for path in self.paths.sockets)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, os.fsencode(text), 0)
        except OSError as error:
            raise SocketError(
                f"driver {self.driver}: the directories of its sockets cannot be used: {error}"
            ) from error
        for path in self.paths.sockets:
            # Sockets from before a restart of the container: no other process can hold our lock.
            _unlink_socket(path)
        self._remove_stale()

    def release(self) -> None:
        """Remove our sockets and our locks; nothing of this instance remains."""
        with self._changing:
            if self._fd is None:
                return
            self._unlock_primary()
            for path in self.paths.sockets:
                _unlink_socket(path)
            _unlock(self.paths.lock, self._fd)
            self._fd = None

    def try_primary(self) -> bool:
        """Return whether this instance is the driver's primary one, or becomes it now. It
        remains so until its release. Does not wait."""
        with self._changing:
            if self._fd is None:
                return False
            if self._primary_fd is not None and not _is_at(self._primary, self._primary_fd):
                # The file was removed, and another instance may already hold a new one.
                os.close(self._primary_fd)
                self._primary_fd = None
            if self._primary_fd is None:
                self._primary_fd = _try_lock(self._primary, create=True)
            return self._primary_fd is not None

    def leave_primary(self) -> None:
        """Let another instance become the primary one, before the sockets drain."""
        with self._changing:
            self._unlock_primary()

    def _unlock_primary(self) -> None:
        if self._primary_fd is not None:
            _unlock(self._primary, self._primary_fd)
            self._primary_fd = None

    def others_alive(self) -> bool:
        """Return whether another instance of the driver lives: two serve it during an update."""
        # The directory is listed only if it has changed: that costs as much as everything else
        # that is polled for a driver.
        if self._directory.changed():
            self._others = None
        if self._others is None:
            self._others = self._locks_of_others()
        return any(_is_locked(lock) for lock in self._others)

    def alive(self, instance_uid: str) -> bool:
        """Return whether an instance of the driver lives, by the UID that it was started with."""
        return _is_locked(self.paths.lock_of(instance_uid))

    def _locks_of_others(self) -> list[Path]:
        names = {name for name in os.listdir(self.paths.data) if _LOCK.fullmatch(name)}
        return [self.paths.data / name for name in sorted(names - {self.paths.lock.name})]

    def _lock_own(self) -> int:
        until = time.monotonic() + LOCK_SECONDS
        while True:
            fd = _try_lock(self.paths.lock, create=True)
            if fd is not None:
                return fd
            if time.monotonic() > until:
                raise SocketError(
                    f"driver {self.driver}: another process holds {self.paths.lock}; stop the "
                    f"other node plugin that runs for the same pod UID"
                )
            time.sleep(0.05)

    def _remove_stale(self) -> None:
        alive: set[Path] = set()
        for lock in self._locks_of_others():
            fd = _try_lock(lock, create=False)
            if fd is None:
                alive.update(_listed(lock))
                continue
            try:
                for path in _listed(lock):
                    # A lock file must not cause the removal of files in other directories.
                    if path.parent in self.paths.directories:
                        self._remove_if_dead(path)
                lock.unlink(missing_ok=True)
            finally:
                os.close(fd)
        for path in self._named_like_ours():
            if path not in alive and path not in self.paths.sockets:
                self._remove_if_dead(path)

    def _named_like_ours(self) -> Iterator[Path]:
        """Find sockets whose lock file is gone; a UID in the name excludes longer driver names.
        In the driver's own directory, the hash of a UID is enough."""
        for pattern, directory in (
            (rf"{re.escape(self.driver)}-{_UUID}-reg\.sock", self.paths.registration.parent),
            (rf"dra-({_UUID}|{_SHORT})\.sock", self.paths.data),
        ):
            yield from (path for path in directory.iterdir() if re.fullmatch(pattern, path.name))

    def _remove_if_dead(self, path: Path) -> None:
        if _is_socket(path) and _refuses_connections(path):
            _unlink_socket(path)
            logger.info("stale socket removed", extra={"driver": self.driver, "path": str(path)})


def new_owner(instance_uid: str) -> str:
    """Return the owner name of this process for the entries that it writes. A restarted container
    keeps its pod's UID, but not the work of its predecessor."""
    return f"{instance_uid}/{secrets.token_hex(4)}"


class RunningInstances:
    """Implements :class:`drakit_nodeplugin.claims.work.Instances`."""

    def __init__(self, driver: str, ownership: Ownership, *, instance_uid: str) -> None:
        self._driver = driver
        self._ownership = ownership
        self._instance_uid = instance_uid
        self._alone = False
        self._log = ProblemLog(
            logger,
            "other instances cannot be found",
            recovered="other instances can be found again",
            level=logging.ERROR,
            facts={"driver": driver},
        )
        self.primary = asyncio.Event()
        """Set while this process is the driver's primary instance."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after each change of `primary`, because no task can wait until an event is
        cleared."""

    def alone(self) -> bool:
        """Return whether the last check found no other process of the driver."""
        return self._alone

    async def works(self, owner: str) -> bool:
        """Return whether another process that wrote an entry is alive."""
        instance_uid, slash, _ = owner.rpartition("/")
        if not slash or instance_uid == self._instance_uid:
            # This process, or our container before its restart: two cannot hold one pod's lock.
            return False
        try:
            return await asyncio.to_thread(self._ownership.alive, instance_uid)
        except (OSError, SocketError) as error:
            self._log.report(str(error))
            return True  # unknown: the other process may still be working

    async def check(self) -> None:
        """Check once. The sockets, and with them our own lock, must exist before."""
        self._alone = not await asyncio.to_thread(self._ownership.others_alive)
        primary = await asyncio.to_thread(self._ownership.try_primary)
        if primary == self.primary.is_set():
            return
        facts = {"driver": self._driver}
        if primary:
            self.primary.set()
            logger.info("this instance is the primary one", extra=facts)
        else:
            self.primary.clear()
            logger.info("another instance is primary now", extra=facts)
        self.on_change()

    async def run(self, poller: FilePoller) -> None:
        """Check after each change until canceled; a check that fails is logged and repeated."""
        while True:
            await poller.until(self._changed)
            try:
                await self.check()
                self._log.report(None)
            except OSError as error:
                self._log.report(str(error))

    def _changed(self) -> bool:
        """Return whether a check would find something new. Blocks."""
        return (
            self._ownership.others_alive() == self._alone
            or self._ownership.try_primary() != self.primary.is_set()
        )


def _try_lock(path: Path, *, create: bool) -> int | None:
    """Lock a file without waiting; None if another process holds it, or it is gone."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between our open and our lock its last owner may have removed the file.
        if _is_at(path, fd):
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def _unlock(path: Path, fd: int) -> None:
    """Remove a file that we have locked, then unlock it: no process can lock it in between."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    os.close(fd)


def _is_locked(path: Path) -> bool:
    """Return whether a process holds a lock. The check takes a shared lock, so that two instances
    that check at the same time do not mistake each other for the holder."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _is_at(path: Path, fd: int) -> bool:
    """Return whether a file that we opened is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _listed(lock: Path) -> list[Path]:
    try:
        return [Path(line) for line in lock.read_text().splitlines() if line.startswith("/")]
    except (FileNotFoundError, UnicodeDecodeError):
        return []


def _refuses_connections(path: Path) -> bool:
    """Return whether a socket has no listener. One that is only slow to accept is alive."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # also a path that is too long
            return False
    return False


def _unlink_socket(path: Path) -> None:
    if _is_socket(path):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:  # absent, or a name that no file can have
        return False
