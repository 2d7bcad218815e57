"""
Device nodes that let a container take over or stop the node.

The list contains paths with the kernel's names. Most entries need no further capability: it is
enough that the container can open the device node. A policy publishes them only with
``allow.dangerous``.

It must not know policies or sysfs: it compares strings.
"""

from __future__ import annotations

import re

from drakit_drivers.hostdev.globs import matches

__all__ = ("is_dangerous", "matches_everything")

_DANGEROUS = (
    # The node's memory, I/O ports and firmware settings.
    *("mem", "kmem", "oldmem", "port", "nvram", "snapshot", "cpu/[^/]+/msr", "cpu/microcode"),
    # The kernel's log, and the text on the console.
    *("kmsg", "vcs[^/]*"),
    # Timers that reset the node, and the management controller.
    *("watchdog[^/]*", "ipmi[^/]*", "ipmi(dev)?/[^/]+"),
    # Input that the node treats as its own keyboard.
    *("uinput", "input/uinput", "uhid"),
    # Flash memory with firmware on it.
    *("mtd[^/]*", "mtd/[^/]+"),
    # Control of volumes, and commands that bypass the rules for disks.
    *("mapper/control", "megaraid_sas_ioctl_node", "mpt[23]ctl"),
    # Consoles. A serial port is one only where the kernel lists it: see Sysfs.active_consoles.
    *("console", "tty[0-9]{1,2}"),
)
_PATTERN = re.compile(f"/dev/(?:{'|'.join(_DANGEROUS)})")

_PROBES = ("mem", "sda1", "TTY_9", "0", "zz-zz.z")
"""Names without a common letter: a pattern that matches all of them matches any name."""


def is_dangerous(path: str) -> bool:
    """Return whether a path is on the list, or a glob that matches only such paths."""
    # A glob matches as text as well: "/dev/watchdog*" is on the list as written.
    return _PATTERN.fullmatch(path) is not None


def matches_everything(glob: str) -> bool:
    """Return whether a glob matches all device nodes of /dev, or of any directory in it."""
    depth = len(glob.split("/")) - 2
    return all(matches(glob, "/".join(("", "dev", *[probe] * depth))) for probe in _PROBES)
