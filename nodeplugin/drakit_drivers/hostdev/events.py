"""
Watches the host for events that require a new scan: kernel uevents, and changes to the udev
database.

The kernel reports on a netlink socket when a device is plugged in or unplugged. Its messages also
arrive in a pod's network namespace, if the pod uses the host's user namespace. Other processes can
send to such sockets, so only messages from the kernel itself are accepted. After the kernel has
reported a device, udev processes it and changes its database, which inotify reports.

Events carry no data for the driver, because a scan reads the complete state from the host.
Therefore, a single scan covers any number of events, including those that were lost because the
socket buffer was full. Without the socket, or without udev, the full scans of :mod:`.driver` detect
the changes.

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
"""The kernel's multicast group. udev sends to group 2."""

_RECEIVE_BUFFER_BYTES = 1 << 20
_MAX_MESSAGE_BYTES = 8192
"""Maximum size of a message. The kernel's limit is 2,048 bytes for the environment, plus a path."""

_MAX_MESSAGES = 512
"""Maximum number of messages to read in one iteration of the event loop."""

_IN_NONBLOCK, _IN_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_IN_CLOSE_WRITE, _IN_MOVED_TO, _IN_DELETE = 0x8, 0x80, 0x200
_IN_Q_OVERFLOW, _IN_IGNORED = 0x4000, 0x8000
_INOTIFY_HEADER = struct.Struct("iIII")
_DATABASE_ENTRY = re.compile(r"[bc]\d+:\d+")


class HostEvents:
    """
    Listens for host events in the running event loop, until it is closed. Unavailable sources are
    logged.

    :param subsystems: returns the relevant subsystems. Others are ignored, because containers that
        start and stop cause many events for network interfaces.
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
        """Watch the udev database if it exists. Call this repeatedly, because a udev daemon may
        start later."""
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
        """Wait until a scan is requested. Return False on a timeout."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._due.wait()
        except TimeoutError:
            return False
        return True

    def acknowledge(self) -> None:
        """Discard the requests so far, because a scan is beginning."""
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
    """Watch a directory with inotify. Return the file descriptor, or None if that is impossible.
    Python does not have an inotify API."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
    if descriptor < 0:
        return None
    mask = _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_DELETE
    if libc.inotify_add_watch(descriptor, os.fsencode(directory), mask) < 0:
        os.close(descriptor)
        return None
    return descriptor
