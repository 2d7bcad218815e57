"""
Where drakit keeps its files below the kubelet's root directory.

Everything lies in one directory, so that the node plugin mounts that alone: the kubelet's `plugins`
directory holds volumes of other pods and the global mounts of CSI drivers. Drivers have a directory
of their own in it: every DNS subdomain can name a driver, `backends` included.

It must not know what the files are, or who serves them.
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
    """Return drakit's own directory on a node, which contains all the others."""
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
