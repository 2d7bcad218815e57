"""
Finds the block devices that the host uses.

A device is in use if it is mounted, a swap area, part of a mounted btrfs, the backing file of a
loop device, or if another device is built on it (``holders`` in sysfs, which :mod:`.host` reads).
Some uses are invisible: ZFS opens a device like any other program, and mounts in other mount
namespaces are not listed.

If a file cannot be read or parsed, :class:`.sysfs.UnreadableError` is raised, because a skipped
line could be the one that shows that a device is in use.

Does not depend on policies or claims.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from drakit_drivers.hostdev.sysfs import Sysfs, UnreadableError, entries, read_attribute

T = TypeVar("T")

_ESCAPE = re.compile(r"\\([0-3][0-7]{2})")

_VOLUME = re.compile(r"/pods/[^/]+/volume|/plugins/kubernetes[.]io/")
"""Matches mount points of the kubelet and of CSI for volumes, including subPaths and raw
devices."""

_ANONYMOUS = "0:"
"""The major number, with its colon, of file systems that do not belong to a single device (btrfs,
overlay, tmpfs)."""

_NO_LOOKUP_NEEDED = frozenset(
    ("btrfs", "9p", "virtiofs", "nfs", "nfs4", "fuse", "overlay", "tmpfs", "ramfs", "rootfs")
)
"""Types of anonymous file systems whose sources (such as ``/dev/root``) need not be resolved: sysfs
lists the devices of a btrfs, and the other types have no block devices."""


def read_usage(sysfs: Sysfs, *, dev_root: Path, mountinfo: Path, swaps: Path) -> Mapping[str, str]:
    """Return how each block device in use is used, keyed by ``MAJOR:MINOR``. Each value is a short
    description, such as ``mounted at /``."""
    mounts = _parse(mountinfo, parse_mountinfo)
    swapped = _parse(swaps, parse_swaps)
    sources = _Sources(sysfs, dev_root)
    used: dict[str, str] = {}
    for mount in mounts:
        for number in _numbers_of_mount(mount, sources):
            used.setdefault(number, mount.place)
    for path in swapped:
        if path.startswith("/dev/"):  # otherwise, the swap area is a file on a mounted file system
            for number in sources.numbers(path, what="a swap area"):
                used.setdefault(number, "a swap area")
    for number in _btrfs_members(sysfs):
        used.setdefault(number, "part of a mounted btrfs")
    for name, directory in sources.directories.items():
        # A loop device opens its backing block device as a program would, so it is not listed as a
        # holder.
        backing = read_attribute(directory / "loop", "backing_file") or ""
        if backing.startswith("/dev/"):
            for number in sources.find(backing) or ():
                used.setdefault(number, f"the backing file of {name}")
    return used


def _parse(path: Path, parse: Callable[[str], list[T]]) -> list[T]:
    try:
        return parse(path.read_text(errors="surrogateescape"))
    except (OSError, ValueError) as error:
        raise UnreadableError(path, getattr(error, "strerror", None) or error) from error


def _numbers_of_mount(mount: MountEntry, sources: _Sources) -> Iterator[str]:
    anonymous = mount.number.startswith(_ANONYMOUS)
    if not anonymous:
        yield mount.number
    if mount.fs_type == "devtmpfs" and mount.root != "/":
        # The mount may be a device node that is mounted over a file, such as a raw volume of a pod.
        yield from sources.find(f"/dev{mount.root}") or ()
    elif not mount.source.startswith("/dev/"):
        return
    elif anonymous and mount.fs_type not in _NO_LOOKUP_NEEDED:
        # Only the source identifies the device, so it must be resolved.
        yield from sources.numbers(mount.source, what=mount.place)
    else:
        yield from sources.find(mount.source) or ()


def _btrfs_members(sysfs: Sysfs) -> Iterator[str]:
    # Read sysfs, because a btrfs has an anonymous device number, and its mount names only one of
    # its devices.
    for volume in entries(sysfs.root / "fs" / "btrfs"):
        for member in entries(volume / "devices"):
            number = read_attribute(member, "dev")
            if number:
                yield number


class _Sources:
    """Resolves a path to block devices. The path can be a device node, a link or a kernel name."""

    def __init__(self, sysfs: Sysfs, dev_root: Path) -> None:
        self.directories = sysfs.block_directories()
        self._dev_root = dev_root

    def numbers(self, path: str, *, what: str) -> tuple[str, ...]:
        """Return the device numbers. Raises UnreadableError if they cannot be determined."""
        found = self.find(path)
        if found is None:
            raise UnreadableError(Path(path), f"no device has this path ({what})")
        return found

    def find(self, path: str) -> tuple[str, ...] | None:
        """Return the device numbers. Empty if the path is not a block device, and None if that
        cannot be determined."""
        whole = self._find_one(path)
        if whole is not None or ":" not in path:
            return whole
        # A bcachefs mount lists all its devices in one source.
        parts = [self._find_one(part) for part in path.split(":")]
        return None if None in parts else tuple(n for part in parts if part for n in part)

    def _find_one(self, path: str) -> tuple[str, ...] | None:
        name = path.removeprefix("/dev/")
        try:
            node = (self._dev_root / name).stat()
        except OSError:
            # In sysfs, '/' in a device name is replaced with '!'.
            directory = self.directories.get(name.replace("/", "!"))
            number = directory and read_attribute(directory, "dev")
            return (number,) if number else None
        if not stat.S_ISBLK(node.st_mode):
            return ()
        return (f"{os.major(node.st_rdev)}:{os.minor(node.st_rdev)}",)


# ------------------------------------------------------------ the kernel's formats


@dataclass(frozen=True, kw_only=True, slots=True)
class MountEntry:
    """The device-related fields of a mount."""

    number: str
    """``MAJOR:MINOR`` of the file system. The major number is 0 if the file system does not belong
    to a single device."""

    root: str
    """The path within the file system that is mounted."""

    mount_point: str
    fs_type: str
    source: str

    @property
    def is_volume(self) -> bool:
        """Whether the mount is a pod volume. If so, its mount point and source contain names chosen
        by tenants."""
        return _VOLUME.search(self.mount_point) is not None

    @property
    def place(self) -> str:
        """A short description of the mount, which is safe to show to users of other namespaces."""
        return (
            "mounted as a volume of a pod" if self.is_volume else f"mounted at {self.mount_point}"
        )


def unescape(text: str) -> str:
    r"""Decode the kernel's octal escapes (``\040``), which keep the fields of a line separate."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def parse_mountinfo(text: str) -> list[MountEntry]:
    """Parse a mountinfo file. Raises ValueError for a malformed line."""
    return [_mount(line) for line in text.split("\n") if line]


def _mount(line: str) -> MountEntry:
    # Split at single spaces, because an empty source leaves two consecutive spaces.
    fields = line.split(" ")
    try:
        separator = fields.index("-", 6)
        fs_type, source = fields[separator + 1 : separator + 3]
    except ValueError:
        raise ValueError(f"a line of mountinfo has no file system: {line!r}") from None
    if not re.fullmatch(r"\d+:\d+", fields[2]):
        raise ValueError(f"a line of mountinfo has no device number: {line!r}")
    return MountEntry(
        number=fields[2],
        root=unescape(fields[3]),
        mount_point=unescape(fields[4]),
        fs_type=unescape(fs_type),
        source=unescape(source),
    )


def parse_swaps(text: str) -> list[str]:
    """Return the paths of swap areas. Raises ValueError if the content does not have the format of
    ``/proc/swaps``."""
    header, *lines = text.split("\n")
    if not header.startswith("Filename"):
        raise ValueError(f"the list of swap areas begins with {header!r}, not with its header")
    return [unescape(re.split(r"[ \t]", line, maxsplit=1)[0]) for line in lines if line]
