"""
One block device: opened exclusively, and wiped.

The kernel refuses an exclusive open while the disk or one of its partitions is in use by a file
system, swap, device mapper, md, or another exclusive open. The mount namespace does not matter. A
program that reads the disk without O_EXCL does not count.

Wiping discards all blocks, then zeroes the places where file systems, volumes and partition tables
keep their signatures. A disk that cannot discard is zeroed completely, which takes as long as
writing all of it.

It must not know sockets, requests, or clients.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ("DiskBusyError", "DiskError", "Disks")

_BLKGETSIZE64 = 0x80081272
_BLKGETDISKSEQ = 0x80081280
_BLKDISCARD = 0x1277
_BLKZEROOUT = 0x127F
_IN_BYTES = 512
"""Ranges must be multiples of a sector."""

_DISCARD_BYTES = 4 << 30
_ZERO_BYTES = 64 << 20
"""Bytes per call. Between two calls, the helper reports progress and can be stopped."""

_EDGE_BYTES = 4 << 20
"""Bytes that are zeroed at both ends: the signatures of partition tables, LVM, md, ZFS and most
file systems."""

_BTRFS_COPIES = (64 << 20, 256 << 30)
"""Offsets of btrfs's superblock copies; 64 KiB are zeroed at each."""

_COPY_BYTES = 64 << 10


class DiskError(Exception):
    """The disk cannot be used; the text is the reason, as a clause."""


class DiskBusyError(DiskError):
    """Something uses the disk."""


class Disks:
    """Opens disks below the host's directories."""

    def __init__(self, *, dev_root: Path, sys_root: Path) -> None:
        self._dev_root = dev_root
        self._sys_root = sys_root

    def check(self, number: str, sequence: int) -> None:
        """Open a disk exclusively and close it. Raises DiskError."""
        # Read-only: udev processes a disk again after it was open for writing.
        with self._opened(number, sequence, os.O_RDONLY):
            pass

    def wipe(self, number: str, sequence: int, *, progress: Callable[[str], None]) -> None:
        """
        Erase a disk. Blocks for seconds to hours.

        :param progress: gets clauses such as ``40 % zeroed``.
        :raises DiskError: the disk is in use, gone, read-only, or fails.
        """
        with self._opened(number, sequence, os.O_RDWR) as disk:
            try:
                size = _size(disk)
                if _discard(disk, size, progress):
                    for start, length in _signatures(size):
                        _call(disk, _BLKZEROOUT, start, length)
                else:
                    for start, length in _pieces(size, _ZERO_BYTES):
                        progress(f"{100 * start // size} % zeroed")
                        _call(disk, _BLKZEROOUT, start, length)
                os.fsync(disk)
            except OSError as error:
                raise DiskError(f"it cannot be erased: {error.strerror}") from error

    @contextmanager
    def _opened(self, number: str, sequence: int, mode: int) -> Generator[int]:
        path = self._path(number)
        try:
            disk = os.open(path, mode | os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise DiskBusyError("another program has it open exclusively") from error
            raise DiskError(f"it cannot be opened: {error.strerror}") from error
        try:
            found = os.fstat(disk)
            wanted = os.makedev(*(int(part) for part in number.split(":")))
            if not stat.S_ISBLK(found.st_mode) or found.st_rdev != wanted:
                raise DiskError(f"{path} is not the block device {number}")
            if _sequence(disk) != sequence:
                raise DiskError(f"another disk now has the device number {number}")
            yield disk
        finally:
            os.close(disk)

    def _path(self, number: str) -> Path:
        try:
            text = (self._sys_root / "dev" / "block" / number / "uevent").read_text()
        except OSError as error:
            raise DiskError("it is no longer connected to the node") from error
        for line in text.splitlines():
            key, _, value = line.partition("=")
            if key == "DEVNAME" and ".." not in value.split("/"):
                return self._dev_root / value
        raise DiskError("the kernel reports no device node for it")


def _size(disk: int) -> int:
    answer = fcntl.ioctl(disk, _BLKGETSIZE64, bytes(8))
    return struct.unpack("Q", answer)[0]


def _sequence(disk: int) -> int:
    try:
        answer = fcntl.ioctl(disk, _BLKGETDISKSEQ, bytes(8))
    except OSError as error:
        raise DiskError("the kernel has no disk sequence numbers (Linux before 5.15)") from error
    return struct.unpack("Q", answer)[0]


def _discard(disk: int, size: int, progress: Callable[[str], None]) -> bool:
    """Discard all blocks; return whether the disk supports it."""
    for start, length in _pieces(size, _DISCARD_BYTES):
        progress(f"{100 * start // size} % discarded")
        try:
            _call(disk, _BLKDISCARD, start, length)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                return False
            raise
    return True


def _signatures(size: int) -> Iterator[tuple[int, int]]:
    """List the ranges in which file systems and volume managers store their signatures."""
    yield 0, min(size, _EDGE_BYTES)
    for start in _BTRFS_COPIES:
        if start + _COPY_BYTES <= size:
            yield start, _COPY_BYTES
    if size > _EDGE_BYTES:
        yield size - _EDGE_BYTES, _EDGE_BYTES


def _pieces(size: int, length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, length):
        yield start, min(length, size - start)


def _call(disk: int, operation: int, start: int, length: int) -> None:
    if length := length // _IN_BYTES * _IN_BYTES:
        fcntl.ioctl(disk, operation, struct.pack("QQ", start // _IN_BYTES * _IN_BYTES, length))
