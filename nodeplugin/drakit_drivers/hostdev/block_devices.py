"""
The block devices that may be published: zram devices, and loop devices without a backing file,
while the host does not use them.

Disks, partitions and volumes belong to CSI, which has a controller, fencing and volume modes for
them. A zram device with a backing device writes to a disk, and a loop device with a backing file
exposes a file of the host, so these belong to CSI, too. The other zram and loop devices hold no
data of the host: tests of clusters use them as devices that appear and vanish.

A device is in use if it is mounted, a swap area, part of a mounted btrfs, the backing file of a
loop device, or if another device is built on it (``holders`` in sysfs). If the host's mounts cannot
be read, the caller gets :class:`.files.UnreadableError`, and publishes no new block device. Some
uses are invisible: ZFS opens a device like any program, and mounts in other mount namespaces do not
show.

It must not depend on policies, claims or names of published devices.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from drakit_drivers.hostdev.files import UnreadableError, entries, read_attribute
from drakit_drivers.hostdev.mounts import MountEntry, parse_mountinfo, parse_swaps
from drakit_drivers.hostdev.refusal import Refusal
from drakit_drivers.hostdev.sysfs import HostDevice, Sysfs

__all__ = ("read_usage", "reason_not_to_publish")

T = TypeVar("T")

_USE_CSI = "use a CSI driver: see 'Disks: use CSI' in the documentation (docs/admin/disks.md)"

_ANONYMOUS = "0:"
"""Major of file systems that belong to no single device (btrfs, overlay, tmpfs)."""

_ANSWERED_OTHERWISE = frozenset(
    ("btrfs", "9p", "virtiofs", "nfs", "nfs4", "fuse", "overlay", "tmpfs", "ramfs", "rootfs")
)
"""Anonymous file systems whose sources need not be resolved (``/dev/root``): sysfs lists the
devices of a btrfs, and the others have none."""


def reason_not_to_publish(device: HostDevice, used: Mapping[str, str]) -> Refusal | None:
    """
    Return the reason not to publish a block device; None if there is none.

    :param used: the result of :func:`read_usage`.
    """
    block = device.block
    if block is None:
        return None
    is_zram = re.fullmatch(r"zram\d+", device.kernel_name)
    is_loop = re.fullmatch(r"loop\d+", device.kernel_name)
    if not (is_zram or is_loop):
        return Refusal("NotSupported", f"it is a disk, and hostdev publishes no disk; {_USE_CSI}")
    if block.has_backing_file:
        return Refusal("NotSupported", f"it is a loop device with a backing file; {_USE_CSI}")
    if block.backing_device:
        return Refusal(
            "NotSupported",
            f"it is a zram device that writes to {block.backing_device}; {_USE_CSI}",
        )
    if is_zram and block.size_bytes == 0:
        return Refusal("Other", "it has no size: its disksize is not set")
    use = used.get(device.number)
    if use:
        return Refusal("InUse", f"it is {use}")
    # A holder that is not mounted (yet) still holds the device open.
    holder = next(iter(entries(device.directory / "holders")), None)
    return Refusal("InUse", f"{holder.name} is built on it") if holder else None


def read_usage(sysfs: Sysfs, *, dev_root: Path, mountinfo: Path, swaps: Path) -> Mapping[str, str]:
    """Read the host's mounts and swap areas: ``MAJOR:MINOR`` to a few words on the use of the
    device, such as ``mounted at /``."""
    mounts = _parse(mountinfo, parse_mountinfo)
    swapped = _parse(swaps, parse_swaps)
    sources = _Sources(sysfs, dev_root)
    used: dict[str, str] = {}
    for mount in mounts:
        for number in _numbers_of_mount(mount, sources):
            used.setdefault(number, f"mounted at {mount.mount_point}")
    for path in swapped:
        if path.startswith("/dev/"):  # else a file, on a file system that is mounted
            for number in sources.numbers(path, what="a swap area"):
                used.setdefault(number, "a swap area")
    for number in _btrfs_members(sysfs):
        used.setdefault(number, "part of a mounted btrfs")
    for name, directory in sources.directories.items():
        # A loop device on a block device opens it like a program: it is not a holder.
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
        # A device node mounted over a file: a raw volume of a pod, for example.
        yield from sources.find(f"/dev{mount.root}") or ()
    elif not mount.source.startswith("/dev/"):
        return
    elif anonymous and mount.fs_type not in _ANSWERED_OTHERWISE:
        # Only the source names the device, so it must be found.
        yield from sources.numbers(mount.source, what=f"mounted at {mount.mount_point}")
    else:
        yield from sources.find(mount.source) or ()


def _btrfs_members(sysfs: Sysfs) -> Iterator[str]:
    # A btrfs has an anonymous number, and its mount names one device of several.
    for volume in entries(sysfs.root / "fs" / "btrfs"):
        for member in entries(volume / "devices"):
            number = read_attribute(member, "dev")
            if number:
                yield number


class _Sources:
    """Resolves a path to block devices. The path can be a node, a link or a kernel's name."""

    def __init__(self, sysfs: Sysfs, dev_root: Path) -> None:
        self.directories = sysfs.block_directories()
        self._dev_root = dev_root

    def numbers(self, path: str, *, what: str) -> tuple[str, ...]:
        """Return their numbers; raise if they cannot be determined."""
        found = self.find(path)
        if found is None:
            raise UnreadableError(Path(path), f"no device has this path ({what})")
        return found

    def find(self, path: str) -> tuple[str, ...] | None:
        """Return their numbers: empty if it is not a block device, None if that is unknown."""
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
