"""
A node's cgroup: the root of its pods' groups, in each hierarchy of cgroup v1 or in that of v2.

The kubelet creates the groups below it (`cgroupRoot`); this module only creates and removes their
root.
"""

import os
import time
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


def hierarchies() -> list[Path]:
    """Return the roots of all cgroup hierarchies of this machine."""
    if (MOUNT / "cgroup.controllers").exists():
        return [MOUNT]
    return [path for path in sorted(MOUNT.iterdir()) if path.is_dir() and not path.is_symlink()]


def make(name: str) -> None:
    """Create a group that pods can use immediately."""
    for root in hierarchies():
        group = root / name
        group.mkdir(exist_ok=True)
        # A new v1 group of `cpuset` has neither CPUs nor memory nodes, and accepts no processes.
        for file in ("cpuset.cpus", "cpuset.mems"):
            source, target = root / file, group / file
            if source.exists() and target.exists() and not target.read_text().strip():
                target.write_text(source.read_text())


def found(prefix: str) -> list[Path]:
    """Return the groups with this prefix."""
    return [group for root in hierarchies() for group in root.glob(f"{prefix}*")]


def remove(name: str, *, timeout_seconds: float = 5) -> None:
    """Remove a group and its subgroups. Its processes have ended, but the kernel may need a
    moment."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        left = [group for group in found(name) if group.name == name]
        for group in left:
            _remove_tree(group)
        if not any(group.exists() for group in left):
            return
        if time.monotonic() > deadline:
            return  # the leftovers check reports the rest
        time.sleep(0.05)


def _remove_tree(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        try:
            os.rmdir(folder)
        except OSError:
            continue
