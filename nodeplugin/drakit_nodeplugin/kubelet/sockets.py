"""
The paths of a driver's sockets, and a guard that notices their loss.

Names contain the instance (the pod's UID), so that two instances of a rolling update never share a
path, nor does a new instance with the remains of an old one. :mod:`.ownership` decides who may
remove the files; :mod:`.server` serves them.

It must not know gRPC, or what is served.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drakit.layout import driver_directory, home_directory
from drakit_nodeplugin.endpoints.host_paths import MAX_PATH_BYTES

__all__ = ("MAX_PATH_BYTES", "SocketError", "SocketGuard", "SocketPaths", "socket_paths")

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
        if len(os.fsencode(path)) <= MAX_PATH_BYTES:
            return path
    shortest = candidates[-1]
    raise SocketError(
        f"the path of a socket is too long: {shortest} has {len(os.fsencode(shortest))} bytes, and "
        f"Linux takes {MAX_PATH_BYTES}; use a kubelet root with a shorter path"
    )


class SocketGuard:
    """
    Notices that a socket's path does not lead to us any more.

    The server itself does not: it keeps listening on a socket that no client can reach.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None

    def remember(self) -> None:
        """Remember the file that is there now as ours, and restrict it to root."""
        os.chmod(self.path, 0o600)
        self._identity = self._identity_now()

    def lost(self) -> str | None:
        """Return what happened to our socket; None if it is in place."""
        found = self._identity_now()
        if found is None:
            return "it was removed"
        return None if found == self._identity else "another file is in its place"

    def _identity_now(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino
