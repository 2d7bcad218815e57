"""
Finds the block devices that the host uses.

A device is in use if it is mounted, a swap area, part of a mounted btrfs, the backing file of a
loop device, or if another device is built on it (``holders`` in sysfs, which :mod:`.host` reads).
Some uses are invisible: ZFS opens a device like any other program, and mounts in other mount
namespaces are not listed.

A file that cannot be read or parsed raises :class:`.sysfs.UnreadableError`, because a skipped line
could be the one that shows the use.

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
"""The kubelet's mount points for volumes, their subPaths and raw devices, and those of CSI."""

_ANONYMOUS = "0:"
"""Major of file systems that belong to no single device (btrfs, overlay, tmpfs)."""

_NO_LOOKUP_NEEDED = frozenset(
    ("btrfs", "9p", "virtiofs", "nfs", "nfs4", "fuse", "overlay", "tmpfs", "ramfs", "rootfs")
)
"""Anonymous file systems whose sources need not be resolved (such as ``/dev/root``). sysfs lists
the devices of a btrfs, and the others have no devices."""


def read_usage(sysfs: Sysfs, *, dev_root: Path, mountinfo: Path, swaps: Path) -> Mapping[str, str]:
    """Return the use of each block device that is mounted or a swap area, keyed by ``MAJOR:MINOR``.
    A use is a short description, such as ``mounted at /``."""
    mounts = _parse(mountinfo, parse_mountinfo)
    swapped = _parse(swaps, parse_swaps)
    sources = _Sources(sysfs, dev_root)
    used: dict[str, str] = {}
    for mount in mounts:
        for number in _numbers_of_mount(mount, sources):
            used.setdefault(number, mount.place)
    for path in swapped:
        if path.startswith("/dev/"):  # otherwise, it is a file on a mounted file system
            for number in sources.numbers(path, what="a swap area"):
                used.setdefault(number, "a swap area")
    for number in _btrfs_members(sysfs):
        used.setdefault(number, "part of a mounted btrfs")
    for name, directory in sources.directories.items():
        # Like a program, a loop device opens its block device without being listed as a holder.
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
        # A device node that is mounted over a file, for example a raw volume of a pod.
        yield from sources.find(f"/dev{mount.root}") or ()
    elif not mount.source.startswith("/dev/"):
        return
    elif anonymous and mount.fs_type not in _NO_LOOKUP_NEEDED:
        # Only the source identifies the device, so it must be resolved.
        yield from sources.numbers(mount.source, what=mount.place)
    else:
        yield from sources.find(mount.source) or ()


def _btrfs_members(sysfs: Sysfs) -> Iterator[str]:
    # A btrfs has an anonymous number, and its mount names only one of its devices.
    for volume in entries(sysfs.root / "fs" / "btrfs"):
        for member in entries(volume / "devices"):
            number = read_attribute(member, "dev")
            if number:
                yield number


class _Sources:
    """Resolves a path to block devices. The path can be a node, a link or a kernel name."""

    def __init__(self, sysfs: Sysfs, dev_root: Path) -> None:
        self.directories = sysfs.block_directories()
        self._dev_root = dev_root

    def numbers(self, path: str, *, what: str) -> tuple[str, ...]:
        """Return the numbers of the devices. Raises an error if they cannot be determined."""
        found = self.find(path)
        if found is None:
            raise UnreadableError(Path(path), f"no device has this path ({what})")
        return found

    def find(self, path: str) -> tuple[str, ...] | None:
        """Return the numbers of the devices. Empty if the path is not a block device, and None if
        that is unknown."""
        whole = self._find_one(path)
        if whole is not None or ":" not in path:
            return whole
        # bcachefs names all its devices in one source.
        parts = [self._find_one(part) for part in path.split(":")]
        return None if None in parts else tuple(n for part in parts if part for n in part)

    def _find_one(self, path: str) -> tuple[str, ...] | None:
        name = path.removeprefix("/dev/")
        try:
            node = (self._dev_root / name).stat()
        except OSError:
            # sysfs writes '/' in a device's name as '!'.
            directory = self.directories.get(name.replace("/", "!"))
            number = directory and read_attribute(directory, "dev")
            return (number,) if number else None
        if not stat.S_ISBLK(node.st_mode):
            return ()
        return (f"{os.major(node.st_rdev)}:{os.minor(node.st_rdev)}",)


# ------------------------------------------------------------ the kernel's formats


@dataclass(frozen=True, kw_only=True, slots=True)
class MountEntry:
    """The fields of a mount that concern devices."""

    number: str
    """``MAJOR:MINOR`` of the file system. The major number is 0 if it belongs to no single
    device."""

    root: str
    """The part of the file system that is mounted."""

    mount_point: str
    fs_type: str
    source: str

    @property
    def is_volume(self) -> bool:
        """Whether it is a volume of a pod. If so, its mount point and source contain names that
        tenants chose."""
        return _VOLUME.search(self.mount_point) is not None

    @property
    def place(self) -> str:
        """A short description of the mount point, which is safe to show to users of other
        namespaces."""
        return (
            "mounted as a volume of a pod" if self.is_volume else f"mounted at {self.mount_point}"
        )


def unescape(text: str) -> str:
    r"""Decode the kernel's octal escapes (``\\040``), which keep the fields of a line separate."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def parse_mountinfo(text: str) -> list[MountEntry]:
    """Parse a mountinfo file. Raises ValueError for a malformed line."""
    return [_mount(line) for line in text.split("\n") if line]


def _mount(line: str) -> MountEntry:
    # Split at single spaces: a source may be empty, which leaves two spaces in a row.
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
    """Return the paths of swap areas. Raises ValueError if the content is not that of
    ``/proc/swaps``."""
    header, *lines = text.split("\n")
    if not header.startswith("Filename"):
        raise ValueError(f"the list of swap areas begins with {header!r}, not with its header")
    return [unescape(re.split(r"[ \t]", line, maxsplit=1)[0]) for line in lines if line]
