"""
Device nodes that give a container the whole node, or let it stop the node.

The list is by path, as the kernel names its devices. Most entries need no further capability: a
container that can open the node has what it needs. A policy publishes them only with
``allowDangerous``.

It must not know policies or sysfs: it compares text.
"""

from __future__ import annotations

from functools import lru_cache

from drakit_drivers.hostdev.globs import matches

__all__ = ("is_dangerous", "matches_everything")

_DANGEROUS = (
    # The node's memory, I/O ports and firmware settings.
    "/dev/mem",
    "/dev/kmem",
    "/dev/oldmem",
    "/dev/port",
    "/dev/nvram",
    "/dev/cpu/*/msr",
    "/dev/cpu/microcode",
    "/dev/snapshot",
    # The kernel's log, and the text on the console.
    "/dev/kmsg",
    "/dev/vcs*",
    # Timers that reset the node, and its management controller.
    "/dev/watchdog*",
    "/dev/ipmi*",
    "/dev/ipmi/*",
    "/dev/ipmidev/*",
    # Input that the node takes for a keyboard of its own.
    "/dev/uinput",
    "/dev/input/uinput",
    "/dev/uhid",
    # Flash memory with firmware on it.
    "/dev/mtd*",
    "/dev/mtd/*",
    # Control of volumes, and commands that reach disks past the rules for disks.
    "/dev/mapper/control",
    "/dev/megaraid_sas_ioctl_node",
    "/dev/mpt[23]ctl",
    # Consoles. A serial port is one only where the kernel lists it: see Sysfs.active_consoles.
    "/dev/console",
    "/dev/tty[0-9]",
    "/dev/tty[0-9][0-9]",
)

_PROBES = ("mem", "sda1", "TTY_9", "0", "zz-zz.z")
"""Names without a common letter: a pattern that matches all of them means any name."""


@lru_cache(maxsize=1024)
def is_dangerous(path: str) -> bool:
    """Report whether a path is on the list, or a glob that matches only such paths."""
    # A sign of a glob matches itself: "/dev/watchdog*" is on the list as written.
    return any(matches(dangerous, path) for dangerous in _DANGEROUS)


def matches_everything(glob: str) -> bool:
    """Report whether a glob matches all device nodes of /dev, or of any directory in it."""
    depth = len(glob.split("/")) - 2
    return all(matches(glob, "/".join(("", "dev", *[probe] * depth))) for probe in _PROBES)
