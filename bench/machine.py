"""
Describes the machine of the measurement, and finds folders for a node's files.

On a node, the checkpoint is on a disk and CDI specs are on a tmpfs. This module finds both and
reports them, because they determine the time of a prepare.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import REPOSITORY

DISKS = ("/var/tmp", "/tmp")
"""Candidates for a disk. The paths are short, because socket paths have at most 107 bytes."""

MEMORY = ("/run", "/dev/shm")
"""Candidates for a tmpfs."""

SYNCS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Folders:
    """The folders of one plugin, which are empty at first."""

    root: Path
    """The directory that replaces the kubelet's root, for sockets and checkpoints."""

    cdi: Path


@contextmanager
def folders() -> Generator[Folders]:
    """Create the folders of a plugin, and remove them at the end."""
    root = Path(tempfile.mkdtemp(prefix="drakit-bench-", dir=_choose(DISKS, memory=False)))
    cdi = Path(tempfile.mkdtemp(prefix="drakit-bench-", dir=_choose(MEMORY, memory=True)))
    try:
        (root / "plugins_registry").mkdir()
        yield Folders(root=root, cdi=cdi)
    finally:
        shutil.rmtree(root)
        shutil.rmtree(cdi)


def _choose(candidates: tuple[str, ...], *, memory: bool) -> str:
    places = [tempfile.gettempdir(), *candidates] if memory else [*candidates]
    for place in places:
        if os.access(place, os.W_OK) and (file_system(Path(place)) == "tmpfs") is memory:
            return place
    return tempfile.gettempdir()


def memory_mib(pid: int, name: str) -> float:
    """Return a memory figure of a process: VmRSS, or VmHWM for its peak."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"process {pid} has no {name}")


def file_system(path: Path) -> str:
    """Return the type of the file system that contains a path."""
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mounted, kind, *_ = line.split()
        mounted = mounted.encode().decode("unicode_escape")
        if path.resolve().is_relative_to(mounted) and len(mounted) >= len(best[0]):
            best = (mounted, kind)
    return best[1]


def describe() -> str:
    """Describe the machine in one line."""
    memory_kib = int(_after_colon("/proc/meminfo", "MemTotal").split()[0])
    with folders() as chosen:
        facts = {
            "cpu": f'"{_after_colon("/proc/cpuinfo", "model name")}"',
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": f"{memory_kib / 2**20:.0f}",
            "kernel": platform.release(),
            "python": platform.python_version(),
            "commit": _commit(),
            "checkpoint_fs": file_system(chosen.root),
            "cdi_fs": file_system(chosen.cdi),
            "fdatasync_ms": f"{_sync_seconds(chosen.root) * 1000:.2f}",
        }
    return "machine: " + " ".join(f"{name}={value}" for name, value in facts.items())


def _after_colon(file: str, key: str) -> str:
    for line in Path(file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "0"


def _commit() -> str:
    asked = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _sync_seconds(folder: Path) -> float:
    """Return the median time that the disk takes to sync a page that was appended to a file."""
    times: list[float] = []
    with (folder / "sync").open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            file.write(bytes(4096))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]
