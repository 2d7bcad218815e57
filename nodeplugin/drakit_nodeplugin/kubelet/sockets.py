"""
The sockets of one instance of a driver: their paths, and the removal of stale sockets.

Socket names contain the instance (the pod UID). Therefore, the two instances in a rolling update
never share a path, and a new instance never reuses the path of an old one. If an instance is
killed, its sockets remain on disk. The next instance removes the driver's sockets that refuse
connections, but never the sockets of running instances or other drivers.

:mod:`drakit_nodeplugin.state.lock` decides which instance is active. The module does not depend on
gRPC or on the services behind the sockets.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drakit.layout import MAX_SOCKET_PATH_BYTES, driver_directory, home_directory, private_directory
from drakit_daemon.sockets import is_socket, refuses_connections

logger = logging.getLogger(__name__)

PREDECESSOR_SECONDS = 5.0
"""Maximum time to wait for another process with the same pod UID to end. The previous container may
still be stopping."""

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"

_HASH = r"(?=.{0,10}[A-Z_])[A-Za-z0-9_-]{11}"
"""Matches a hash. It cannot be part of another driver's name, because driver names contain neither
capital letters nor ``_``."""

_PLAIN_UID = re.compile(r"[A-Za-z0-9-]{1,64}")


class SocketError(Exception):
    """A socket cannot be created. The message names the socket and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SocketPaths:
    """The sockets of one instance of a driver, as absolute paths."""

    driver: str

    home: Path
    """drakit's directory on the node, which is common to all drivers."""

    data: Path
    """The driver's directory, which its instances share."""

    registration: Path
    """The socket through which the kubelet discovers the driver."""

    dra: Path
    """The socket that serves DRA and health."""

    @property
    def sockets(self) -> tuple[Path, Path]:
        return self.registration, self.dra


def socket_paths(driver: str, *, kubelet_root: Path, instance_uid: str) -> SocketPaths:
    """
    Return the socket paths of an instance.

    If a path is too long for a Unix socket, hashes replace names in it. Otherwise, the registration
    socket has the name that the Kubernetes plugin helper gives it.

    :raises SocketError: `kubelet_root` is not an absolute path, or no socket path is short enough.
    """
    if not kubelet_root.is_absolute():
        raise SocketError(f"the kubelet root must be an absolute path, not {kubelet_root}")
    registry, home = kubelet_root / "plugins_registry", home_directory(kubelet_root)
    data = driver_directory(kubelet_root, driver)
    short = _hash(instance_uid)
    long = f"{_hash(driver)}{short}"
    plain = [instance_uid] if _PLAIN_UID.fullmatch(instance_uid) else []
    return SocketPaths(
        driver=driver,
        home=home,
        data=data,
        registration=_first_that_fits(
            [registry / f"{driver}-{uid}-reg.sock" for uid in [*plain, short]]
            + [registry / f"dra-{long}-reg.sock"]
        ),
        # The last candidate is outside the driver's directory, whose name can be 63 characters
        # long.
        dra=_first_that_fits(
            [data / f"dra-{uid}.sock" for uid in [*plain, short]] + [home / f"dra-{long}.sock"]
        ),
    )


def _hash(text: str) -> str:
    """Return a hash of 11 characters."""
    digest = hashlib.sha256(text.encode()).digest()[:8]
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


def create_directories(paths: SocketPaths) -> None:
    """
    Create the directories of an instance's sockets, and remove stale sockets of the driver.

    Raises :class:`SocketError`, including when another process serves the sockets of this instance.
    Blocks for at most :data:`PREDECESSOR_SECONDS`.
    """
    try:
        private_directory(paths.data)
        # The kubelet usually creates this directory, whose mode then remains unchanged.
        paths.registration.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        _wait_for_predecessor(paths)
        remove_sockets(paths)
        remove_stale_sockets(paths)
    except OSError as error:
        raise SocketError(
            f"driver {paths.driver}: the directories of its sockets cannot be used: "
            f"{error.filename}: {error.strerror}"
        ) from error


def remove_stale_sockets(paths: SocketPaths) -> None:
    """Remove the sockets of the driver's ended instances. Raises OSError. Blocks."""
    for path in _sockets_of(paths):
        if refuses_connections(path):
            _remove(path)
            logger.info("stale socket removed", extra={"driver": paths.driver, "path": str(path)})


def remove_sockets(paths: SocketPaths) -> None:
    """Remove any remaining sockets of this instance. Blocks."""
    for path in paths.sockets:
        if is_socket(path):
            _remove(path)


def _wait_for_predecessor(paths: SocketPaths) -> None:
    """Wait until no other process serves this instance's sockets, because binding a socket would
    take it over."""
    until = time.monotonic() + PREDECESSOR_SECONDS
    while served := [p for p in paths.sockets if is_socket(p) and not refuses_connections(p)]:
        if time.monotonic() > until:
            raise SocketError(
                f"driver {paths.driver}: another process serves {served[0]}; stop the other node "
                f"plugin that runs for the same pod UID"
            )
        time.sleep(0.05)


def _sockets_of(paths: SocketPaths) -> Iterator[Path]:
    """Yield the sockets of all instances of a driver. To exclude drivers with longer names, only
    complete UIDs, and hashes that cannot be part of a name, are matched."""
    name, own = re.escape(paths.driver), re.escape(_hash(paths.driver))
    patterns = {
        paths.registration.parent: rf"({name}-({_UUID}|{_HASH})|dra-{own}.{{11}})-reg\.sock",
        paths.data: r"dra-[A-Za-z0-9_-]{1,64}\.sock",
        paths.home: rf"dra-{own}.{{11}}\.sock",
    }
    for directory, pattern in patterns.items():
        for path in directory.iterdir():
            if re.fullmatch(pattern, path.name) and is_socket(path):
                yield path


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
