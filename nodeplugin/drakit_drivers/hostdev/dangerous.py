"""
Device nodes that give a container control of the node or its data: a table with a reason each.

The table contains globs of the kernel's paths. Most entries need no further capability: it is
enough that the container can open the device node. :mod:`.dangerous_hardware` decides about
devices whose path does not show that they are dangerous, such as a keyboard.

It must not depend on policies or sysfs: it compares strings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from drakit_drivers.hostdev.globs import matches

__all__ = ("DANGEROUS_NODES", "danger_of_path", "matches_everything")

DANGEROUS_NODES: Mapping[tuple[str, ...], str] = {
    ("mem", "kmem", "oldmem", "port", "crash", "vc-mem", "vcio"): (
        "accesses the node's memory or I/O ports"
    ),
    ("snapshot",): "stores and replaces the node's memory for hibernation",
    ("cpu/*/msr", "cpu/microcode"): "changes registers or microcode of the node's processors",
    ("cxl/*", "dax*", "ndctl*", "nmem*"): "maps or erases the node's memory modules",
    ("iommu", "uio*", "vfio/noiommu-*", "vfio/vfio"): (
        "lets hardware read and write memory directly (DMA)"
    ),
    ("efi_capsule_loader", "efi_test", "nvram", "wmi/*", "cros_ec", "mei*"): (
        "changes the node's firmware or its settings"
    ),
    ("mtd*", "mtd/*", "ubi*"): "writes flash memory that can contain the node's firmware",
    ("watchdog*",): "resets the node",
    ("ipmi*", "ipmi/*", "ipmidev/*", "ipmb-*", "hpilo/*"): (
        "sends commands to the node's management controller"
    ),
    ("xen/*", "vmcp"): "sends commands to the hypervisor on behalf of the node",
    ("kmsg", "ttyprintk"): "reads or writes the kernel's log",
    ("console", "tty[0-9]", "tty[0-9][0-9]", "vcs*"): "is a console of the node",
    ("uinput", "input/uinput", "uhid", "userio"): "creates keyboards whose input the node accepts",
    ("cuse", "ublk-control", "ublkc*", "vduse/*", "vhci", "vtpmx"): (
        "creates devices that the node uses"
    ),
    ("usbmon*",): "records the traffic of all USB devices, including keystrokes",
    ("tpm[0-9]*",): "accesses the keys and sessions of other programs in the TPM",
    ("rfkill",): "disables the node's Wi-Fi and Bluetooth",
    ("autofs",): "controls the node's automatic mounts",
    ("mapper/control", "loop-control", "btrfs-control", "nvme-fabrics", "zfs", "raw/*"): (
        "controls the node's disks, volumes or file systems"
    ),
    ("megaraid_sas_ioctl_node", "megadev*", "mpt*ctl", "aac[0-9]*", "tw[ael][0-9]*"): (
        "sends commands to the node's RAID controllers"
    ),
}
"""Globs of paths below ``/dev``, and a clause for each row: what such a device does. A glob has
letters, digits, ``-``, ``_``, ``/``, ``*`` and brackets only."""

_PATTERNS = {
    # One expression a row: each scan compares each device with the table.
    re.compile(f"/dev/(?:{'|'.join(globs)})".replace("*", "[^/]*")): danger
    for globs, danger in DANGEROUS_NODES.items()
}

_PROBES = ("mem", "sda1", "TTY_9", "0", "zz-zz.z")
"""Names without a common letter: a pattern that matches all of them matches any name."""


def danger_of_path(path: str) -> str | None:
    """Return what a device at a path does to the node; None if the path is not in the table.

    The path can be a glob that matches only such paths."""
    # A glob matches as text as well: "/dev/watchdog*" is in the table as written.
    found = (danger for pattern, danger in _PATTERNS.items() if pattern.fullmatch(path))
    return next(found, None)


def matches_everything(glob: str) -> bool:
    """Return whether a glob matches all device nodes of /dev, or of any directory in it."""
    depth = len(glob.split("/")) - 2
    return all(matches(glob, "/".join(("", "dev", *[probe] * depth))) for probe in _PROBES)
