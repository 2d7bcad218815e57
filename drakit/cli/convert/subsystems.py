"""
The kernel's subsystem of a device, guessed from its path, and the directory of its device nodes.

Other tools describe devices by paths alone; a matcher of a policy needs the subsystem.

It must not know the tools, or this machine.
"""

from __future__ import annotations

import re

__all__ = ("directory_of", "has_units", "nodes_below", "subsystem_of")

_BY_PATH = (
    ("tty", r"tty[^/]*|rfcomm[^/]*|serial/by-(id|path)/.+"),
    ("video4linux", r"(video|v4l-subdev|radio|vbi)[^/]*|v4l/by-(id|path)/.+"),
    ("media", r"media[^/]*"),
    ("sound", r"snd/.+"),
    ("drm", r"dri/.+"),
    ("input", r"input/.+"),
    ("hidraw", r"hidraw[^/]*"),
    ("usb", r"bus/usb/.+"),
    ("i2c-dev", r"i2c-[^/]*"),
    ("spidev", r"spidev[^/]*"),
    ("gpio", r"gpiochip[^/]*"),
    ("bcm2835-gpiomem", r"gpiomem"),
    ("rtc", r"rtc[0-9[*?][^/]*"),
    ("tpmrm", r"tpmrm[^/]*"),
    ("tpm", r"tpm[0-9[*?][^/]*"),
    ("apex", r"apex_[^/]*"),
    ("accel", r"accel/.+"),
    ("kfd", r"kfd"),
    ("vfio", r"vfio/[0-9[*?].*"),
    ("infiniband_verbs", r"infiniband/uverbs[^/]*"),
    ("infiniband_cm", r"infiniband/ucm[^/]*"),
    ("usbmisc", r"(usb/)?(hiddev|lp|cdc-wdm)[^/]*|usb/.+"),
    ("dvb", r"dvb/.+"),
    ("block", r"(sd|nvme|mmcblk|vd|xvd|loop|zram|dm-|md)[^/]*|disk/.+|mapper/.+"),
    ("misc", r"kvm|fuse|net/tun|vhost-net|vhost-vsock|vsock|nitro_enclaves|uinput|rfkill|hpet"),
    ("misc", r"loop-control|udmabuf|sev|sgx_enclave|sgx_provision|tdx_guest|cuse|hwrng|watchdog"),
    ("misc", r"infiniband/rdma_cm|vfio/vfio"),
    ("mem", r"mem|null|zero|full|random|urandom|kmsg"),
    ("vchiq", r"vchiq"),
    ("vcsm-cma", r"vcsm-cma"),
)
_BY_NAME = (
    ("drm", r"(card|renderD)[0-9[*?].*", "dri/"),
    ("input", r"(event|mouse|js)[0-9[*?].*", "input/"),
    ("sound", r"(controlC|pcmC|midiC|hwC).*", "snd/"),
    ("infiniband_verbs", r"uverbs.*", "infiniband/"),
    ("misc", r"tun", "net/"),
)
"""Kernel names of devices whose nodes are in a directory of their own."""

_DIRECTORIES = {
    # Without the nodes of no card (timer, seq) and of no input device (mice), which would otherwise
    # be units that a pod can get instead of hardware.
    "snd": ("sound", "/dev/snd/*C[0-9]*"),
    "dri": ("drm", "/dev/dri/*"),
    "input": ("input", "/dev/input/*[0-9]"),
}
_WITHOUT_UNITS = ("block", "mem", "misc", "vfio")
"""Subsystems in which each node stands by itself, or which policies do not group."""


def subsystem_of(path: str) -> str | None:
    """Guess the subsystem of a path or glob under ``/dev``; None if it is not known."""
    below = path.removeprefix("/dev/")
    for subsystem, pattern in _BY_PATH:
        if re.fullmatch(pattern, below):
            return subsystem
    return None


def directory_of(kernel_name: str, subsystem: str | None) -> tuple[str, str | None]:
    """Return the path under ``/dev`` of a kernel name or a glob of it, and its subsystem."""
    for known, pattern, directory in _BY_NAME:
        if subsystem in (None, known) and re.fullmatch(pattern, kernel_name):
            return f"/dev/{directory}{kernel_name}", known
    path = f"/dev/{kernel_name}"
    return path, subsystem or subsystem_of(path)


def nodes_below(path: str) -> tuple[str, str] | None:
    """Return the subsystem and the glob for a path that is a directory of device nodes."""
    name = path.removeprefix("/dev/").rstrip("/")
    return _DIRECTORIES.get(name)


def has_units(subsystem: str) -> bool:
    """Return whether a policy can publish several nodes of a subsystem as one device."""
    return subsystem not in _WITHOUT_UNITS
