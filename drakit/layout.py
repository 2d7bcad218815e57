"""
The layout of drakit's files below the kubelet's root directory.

All files are in one directory, so that the node plugin mounts only that: the kubelet's `plugins`
directory also contains the global mounts of CSI drivers. Drivers have a subdirectory of their own,
because every DNS subdomain can be a driver's name, including `backends`.

It must not know the content of the files, or the programs that use them.
"""

from __future__ import annotations

from pathlib import Path

__all__ = (
    "backends_directory",
    "device_plugins_directory",
    "driver_directory",
    "drivers_directory",
    "home_directory",
)


def home_directory(kubelet_root: Path) -> Path:
    """Return drakit's directory on a node, which contains all others."""
    return kubelet_root / "plugins" / "drakit.dev"


def drivers_directory(kubelet_root: Path) -> Path:
    """Return the parent of all drivers' data directories."""
    return home_directory(kubelet_root) / "drivers"


def driver_directory(kubelet_root: Path, driver: str) -> Path:
    """Return the data directory of a driver: its checkpoint, locks and DRA socket."""
    return drivers_directory(kubelet_root) / driver


def backends_directory(kubelet_root: Path) -> Path:
    """Return the default registration directory of backends."""
    return home_directory(kubelet_root) / "backends"


def device_plugins_directory(kubelet_root: Path) -> Path:
    """Return the default directory in which device plugins register."""
    return home_directory(kubelet_root) / "device-plugins"
