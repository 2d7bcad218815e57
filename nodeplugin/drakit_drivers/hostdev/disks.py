"""
The block devices that may be published: none that the host uses, and none that contains data.

A disk and all its partitions are in use if one of them, or anything built on one of them, is
mounted, used as swap or part of a mounted btrfs. The ``holders`` in sysfs show what is built on a
device. A disk is also in use if a mount's source names it. A device that another one is built on
counts as in use, mounted or not: device mapper and md hold it open. If the host's mounts cannot be
read, the caller gets :class:`UsageUnknownError`, and publishes no block device.

sysfs does not show every use: ZFS and Ceph open a disk like any program, and mounts in other mount
namespaces are invisible. So a disk must also be blank: udev's database must have an entry for it
without any signature or partition table, unless the policy sets ``allow.formatted``. udev has not
probed a disk without an entry. A disk also needs a unique identity, which becomes its name.

zram devices and loop devices without a backing file need no entry: their content lasts only as long
as their setup, and udev's rules do not probe zram. zram and loop devices need no identity either:
their number is chosen at setup.

It must not know policies, claims or names of published devices.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from drakit_drivers.hostdev.files import entries, read_attribute
from drakit_drivers.hostdev.mounts import MountEntry, parse_mountinfo, parse_swaps
from drakit_drivers.hostdev.refusal import Refusal
from drakit_drivers.hostdev.sysfs import BlockFacts, HostDevice, Sysfs

__all__ = ("DiskUsage", "UsageUnknownError", "read_usage", "reason_not_to_publish")

T = TypeVar("T")
_ANONYMOUS = "0:"
"""Major of file systems that belong to no single device (btrfs, overlay, tmpfs)."""

_ANSWERED_OTHERWISE = frozenset(
    ("btrfs", "9p", "virtiofs", "nfs", "nfs4", "fuse", "overlay", "tmpfs", "ramfs", "rootfs")
)
"""Anonymous file systems whose sources need not be resolved (``/dev/root``): sysfs lists the
devices of a btrfs, and the others have none."""


class UsageUnknownError(Exception):
    """The block devices in use are unknown; the text is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskUsage:
    """The host's block devices, and their known uses at one moment."""

    directories: Mapping[str, Path]
    """Kernel name to directory in sysfs, partitions included."""

    used: Mapping[str, str]
    """``MAJOR:MINOR`` to a few words on its use: ``mounted at /``."""

    identities: Mapping[str, str | None]
    """Kernel name to identity, of whole disks."""


def reason_not_to_publish(
    device: HostDevice,
    usage: DiskUsage,
    *,
    allow_disks: bool,
    allow_formatted: bool,
    allow_unstable_identity: bool,
) -> Refusal | None:
    """Return the reason not to publish a block device, as a clause; None if there is none."""
    block = device.block
    if block is None:
        return None
    if not allow_disks and _is_disk(block):
        return Refusal("NotSupported", "it is a disk, but hostdev.allowDisks is not set")
    if not allow_disks and block.has_backing_file:
        return Refusal(
            "NotSupported",
            "it is a loop device with a backing file, but hostdev.allowDisks is not set",
        )
    if block.size_bytes == 0 and not block.is_loop:
        return Refusal(
            "Unreadable",
            "it has no size (a zram device without disksize, or a drive without medium)",
        )
    if use := _use_in_tree(device, usage):
        return Refusal("InUse", use)
    if _is_disk(block):
        doubt = _ambiguity(block, usage, allow_unstable_identity=allow_unstable_identity)
        if doubt:
            return Refusal("NoIdentity", doubt)
    content = None if allow_formatted else _content(device, block, usage)
    return Refusal("MayHoldData", content) if content else None


def _is_disk(block: BlockFacts) -> bool:
    return not (block.is_zram or block.is_loop)


def _ambiguity(block: BlockFacts, usage: DiskUsage, *, allow_unstable_identity: bool) -> str | None:
    """Return the reason why the disk's identity is uncertain."""
    if block.identity is None:
        if allow_unstable_identity:
            return None
        return (
            "it has no WWN, EUI or serial number, so another disk might have its path after a "
            "reboot, but the policy does not set allow.unstableIdentity"
        )
    twin = next(
        (n for n, its in usage.identities.items() if its == block.identity and n != block.disk),
        None,
    )
    return f"{twin} has the same identity, {block.identity}" if twin else None


def _content(device: HostDevice, block: BlockFacts, usage: DiskUsage) -> str | None:
    """Return the reason why a device may not be blank."""
    if block.disk != device.kernel_name:
        return f"it is a partition of {block.disk}, but the policy does not set allow.formatted"
    partitions = _partitions(usage.directories.get(device.kernel_name))
    if partitions:
        return f"it has partitions ({', '.join(partitions)})"
    if block.is_loop and not block.has_backing_file:
        return None
    if block.udev is None:
        if block.is_zram:
            return None
        return "udev's database has no entry for it, so it might not be blank"
    properties = block.udev.properties
    for prefix, what, key in (
        ("ID_FS_", "a signature", "ID_FS_TYPE"),
        ("ID_PART_TABLE_", "a partition table", "ID_PART_TABLE_TYPE"),
    ):
        if any(name.startswith(prefix) for name in properties):
            kind = properties.get(key, "of unknown type")
            return f"it has {what} ({kind}): wipe it, or set allow.formatted on the policy"
    return None


def _use_in_tree(device: HostDevice, usage: DiskUsage) -> str | None:
    tree = list(dict.fromkeys(_tree(device, usage)))
    for name in tree:
        directory = usage.directories.get(name)
        use = usage.used.get(_number(directory) or "") if directory else None
        if use:
            return f"{'it' if name == device.kernel_name else name} is {use}"
    # A holder that is not mounted (yet) still holds its devices open.
    held = next((name for name in tree if _holders(usage.directories.get(name))), None)
    if held:
        holder = _holders(usage.directories.get(held))[0]
        return f"{holder} is built on {'it' if held == device.kernel_name else held}"
    return None


def _tree(device: HostDevice, usage: DiskUsage) -> Iterator[str]:
    """Return the names of the disk, its partitions, and everything built on one of them."""
    # An unused partition of the host's root disk may become the root at the next update.
    due = [device.block.disk if device.block else device.kernel_name]
    seen: set[str] = set()
    while due:
        name = due.pop(0)
        if name in seen:
            continue
        seen.add(name)
        yield name
        directory = usage.directories.get(name)
        due += _partitions(directory) + _holders(directory)


def _holders(directory: Path | None) -> list[str]:
    return [entry.name for entry in entries(directory / "holders")] if directory else []


def _partitions(directory: Path | None) -> list[str]:
    if directory is None:
        return []
    return [entry.name for entry in entries(directory) if (entry / "partition").exists()]


def _number(directory: Path) -> str | None:
    return read_attribute(directory, "dev")


def read_usage(sysfs: Sysfs, *, dev_root: Path, mountinfo: Path, swaps: Path) -> DiskUsage:
    """Read the host's mounts and swap areas."""
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
    for name in (name for name in sources.directories if name.startswith("loop")):
        # A loop device on a whole disk opens it like a program: it is not a holder.
        backing = read_attribute(sources.directories[name] / "loop", "backing_file") or ""
        if backing.startswith("/dev/"):
            for number in sources.find(backing) or ():
                used.setdefault(number, f"the backing file of {name}")
    identities = {
        name: sysfs.disk_identity(directory)
        for name, directory in sources.directories.items()
        # The paths of a multipath NVMe namespace are disks without a number.
        if _number(directory) and not (directory / "partition").exists()
    }
    return DiskUsage(directories=sources.directories, used=used, identities=identities)


def _parse(path: Path, parse: Callable[[str], list[T]]) -> list[T]:
    try:
        return parse(path.read_text(errors="surrogateescape"))
    except (OSError, ValueError) as error:
        raise UsageUnknownError(f"{path} cannot be read: {error}") from error


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
            number = _number(member)
            if number:
                yield number


class _Sources:
    """Resolves a path to block devices. The path can be a node, a link or a kernel's name."""

    def __init__(self, sysfs: Sysfs, dev_root: Path) -> None:
        self.directories = sysfs.block_directories()
        self._sysfs = sysfs
        self._dev_root = dev_root

    def numbers(self, path: str, *, what: str) -> tuple[str, ...]:
        """Return their numbers; raise if they cannot be determined."""
        found = self.find(path)
        if found is None:
            raise UsageUnknownError(f"{path} ({what}) cannot be resolved to a device")
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
        try:
            node = (self._dev_root / path.removeprefix("/dev/")).stat()
        except OSError:
            return self._find_by_name(path)
        if not stat.S_ISBLK(node.st_mode):
            return ()
        return (f"{os.major(node.st_rdev)}:{os.minor(node.st_rdev)}",)

    def _find_by_name(self, path: str) -> tuple[str, ...] | None:
        name = path.removeprefix("/dev/")
        # sysfs writes '/' in a device's name as '!'.
        directory = self.directories.get(name.replace("/", "!"))
        if directory:
            number = _number(directory)
            return (number,) if number else None
        for directory in self.directories.values():
            number = _number(directory)
            mapped = read_attribute(directory / "dm", "name")
            if number and (
                (mapped and name == f"mapper/{mapped}") or path in self._sysfs.links("b", number)
            ):
                return (number,)
        return None
