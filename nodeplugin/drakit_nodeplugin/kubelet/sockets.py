"""
Where a driver's sockets are, and whether they are still ours.

Names carry the instance (the pod's UID), so that two instances of a rolling update, and a new one
beside the remains of an old one, never share a path. Who owns the files is said in
:mod:`.ownership`; who serves them, in :mod:`.server`.

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

from drakit_nodeplugin.endpoints.names import MAX_PATH_BYTES

__all__ = ("MAX_PATH_BYTES", "SocketError", "SocketGuard", "SocketPaths", "socket_paths")

_PLAIN_UID = re.compile(r"[A-Za-z0-9-]{1,64}")


class SocketError(Exception):
    """A socket cannot be made. The text says which and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SocketPaths:
    """The files of one instance of a driver, all of them absolute."""

    data: Path
    """Directory of the driver, shared by its instances."""

    registration: Path
    """The socket at which the kubelet notices the driver."""

    dra: Path
    """The socket that serves DRA and health."""

    lock: Path
    """Held by the instance for as long as it lives; lists its sockets."""

    @property
    def sockets(self) -> tuple[Path, Path]:
        return self.registration, self.dra

    @property
    def directories(self) -> frozenset[Path]:
        """Where sockets of this driver can be."""
        return frozenset({self.data, self.data.parent, self.registration.parent})


def socket_paths(driver: str, *, kubelet_root: Path, instance_uid: str) -> SocketPaths:
    """
    Name the sockets of an instance; long names are replaced by hashes until the path fits.

    The names of the registration socket are those of upstream's helper, so that people find what
    they know. Raises :class:`SocketError`.
    """
    if not kubelet_root.is_absolute():
        raise SocketError(f"the kubelet root must be an absolute path, not {kubelet_root}")
    registry, plugins = kubelet_root / "plugins_registry", kubelet_root / "plugins"
    short = _hash(instance_uid.encode(), 8)
    long = _hash(f"{driver}\0{instance_uid}".encode(), 16)
    plain = [instance_uid] if _PLAIN_UID.fullmatch(instance_uid) else []
    return SocketPaths(
        data=plugins / driver,
        registration=_first_that_fits(
            [registry / f"{driver}-{uid}-reg.sock" for uid in [*plain, short]]
            + [registry / f"dra-{long}-reg.sock"]
        ),
        # The last one is beside the driver's directory, whose name can be 63 characters long.
        dra=_first_that_fits(
            [plugins / driver / f"dra-{uid}.sock" for uid in [*plain, short]]
            + [plugins / f"dra-{long}.sock"]
        ),
        lock=plugins / driver / f"instance-{short}.lock",
    )


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

    The server itself does not: it goes on listening on a socket that nobody can reach.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None

    def remember(self) -> None:
        """Take what is there now for ours, and let root alone use it."""
        os.chmod(self.path, 0o600)
        self._identity = self._look()

    def lost(self) -> str | None:
        """Say what became of our socket; None if it is in its place."""
        found = self._look()
        if found is None:
            return "it was removed"
        return None if found == self._identity else "another file is in its place"

    def _look(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino
