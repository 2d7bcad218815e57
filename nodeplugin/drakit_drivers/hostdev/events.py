"""
Events of the host that require a new scan: the kernel's uevents, and changes to udev's database.

The kernel reports on a netlink socket when a device is plugged in or unplugged. Its messages also
arrive in a pod's network namespace, if the pod uses the user namespace of the host. Other processes
can send to such sockets, so only messages of the kernel itself are accepted. udev processes a
device after the kernel has reported it. Then udev's database changes, which inotify reports.

Events carry no data for the driver, because a scan reads the host. Therefore, a single scan covers
any number of events, even events that were lost because the socket was full. Without the socket, or
without udev, the full scans of :mod:`.driver` detect the changes.

Does not depend on policies or devices.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_NETLINK_KOBJECT_UEVENT = 15
_KERNEL_GROUP = 1
"""The multicast group of the kernel. udev sends to group 2."""

_RECEIVE_BUFFER_BYTES = 1 << 20
_MAX_MESSAGE_BYTES = 8192
"""The kernel's limit is 2,048 bytes of environment, plus a path."""

_MAX_MESSAGES = 512
"""Maximum number of messages that are read in one turn of the event loop."""

_IN_NONBLOCK, _IN_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_IN_CLOSE_WRITE, _IN_MOVED_TO, _IN_DELETE = 0x8, 0x80, 0x200
_IN_Q_OVERFLOW, _IN_IGNORED = 0x4000, 0x8000
_INOTIFY_HEADER = struct.Struct("iIII")
_DATABASE_ENTRY = re.compile(r"[bc]\d+:\d+")


class HostEvents:
    """
    Listens for the host's events until it is closed, in the running event loop. Unavailable sources
    are logged.

    :param subsystems: returns the relevant subsystems. Containers that start and stop cause many
        events of network interfaces.
    """

    def __init__(self, *, udev_root: Path, subsystems: Callable[[], set[str]]) -> None:
        self._udev_data = udev_root / "data"
        self._subsystems = subsystems
        self._due = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._inotify: int | None = None
        try:
            self._socket = _uevent_socket()
        except OSError as error:
            logger.warning(
                "uevents of the kernel cannot be received; only full scans find devices",
                extra={"error": str(error)},
            )
        else:
            self._loop.add_reader(self._socket, self._read_socket, self._socket)
        self.watch_udev()

    def watch_udev(self) -> None:
        """Watch udev's database if it exists. Call this repeatedly to find a daemon that starts
        later."""
        if self._inotify is None:
            self._inotify = _watch(self._udev_data)
            if self._inotify is not None:
                self._loop.add_reader(self._inotify, self._read_inotify, self._inotify)

    def close(self) -> None:
        """Stop listening."""
        self._forget_socket()
        self._forget_udev()

    def notify(self) -> None:
        """Request a scan."""
        self._due.set()

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait for a request for a scan. Return False on a timeout."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._due.wait()
        except TimeoutError:
            return False
        return True

    def acknowledge(self) -> None:
        """Discard the requests so far, because a scan begins."""
        self._due.clear()

    def _read_socket(self, uevents: socket.socket) -> None:
        for _ in range(_MAX_MESSAGES):
            try:
                message, (sender, groups) = uevents.recvfrom(_MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._due.set()
                if error.errno == errno.ENOBUFS:
                    continue
                logger.warning(
                    "uevents of the kernel are no longer received; only full scans find devices",
                    extra={"error": str(error)},
                )
                self._forget_socket()
                return
            if sender == 0 and groups & _KERNEL_GROUP and self._is_relevant(message):
                self._due.set()

    def _is_relevant(self, message: bytes) -> bool:
        subsystem = re.search(rb"\0SUBSYSTEM=([^\0]*)", message)
        return subsystem is None or subsystem[1].decode(errors="replace") in self._subsystems()

    def _read_inotify(self, inotify: int) -> None:
        try:
            data = os.read(inotify, 1 << 16)
        except BlockingIOError:
            return
        while data:
            _, mask, _, length = _INOTIFY_HEADER.unpack_from(data)
            end = _INOTIFY_HEADER.size + length
            name = data[_INOTIFY_HEADER.size : end].rstrip(b"\0").decode(errors="replace")
            data = data[end:]
            if mask & (_IN_Q_OVERFLOW | _IN_IGNORED) or _DATABASE_ENTRY.fullmatch(name):
                self._due.set()
            if mask & _IN_IGNORED:  # the directory was removed
                self._forget_udev()
                return

    def _forget_socket(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _forget_udev(self) -> None:
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify)
            os.close(self._inotify)
            self._inotify = None


def _uevent_socket() -> socket.socket:
    made = socket.socket(
        socket.AF_NETLINK,
        socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC,
        _NETLINK_KOBJECT_UEVENT,
    )
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        made.bind((0, _KERNEL_GROUP))
    except OSError:
        made.close()
        raise
    return made


def _watch(directory: Path) -> int | None:
    """Watch a directory with inotify. Return None if that is impossible. Python has no inotify
    API."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
    if descriptor < 0:
        return None
    mask = _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_DELETE
    if libc.inotify_add_watch(descriptor, os.fsencode(directory), mask) < 0:
        os.close(descriptor)
        return None
    return descriptor
