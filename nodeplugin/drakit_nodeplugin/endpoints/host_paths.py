"""
Paths of device nodes on the host: what a runtime does with them for the kubelet, and not for CDI.

Given a symbolic link, a runtime follows it; given a directory, it takes all device nodes in it. In
a CDI spec neither is allowed. So both are looked up here, in the host's ``/dev`` as this process
sees it. What it does not see stays as it is, and the runtime says what is wrong with it.

It must not know where a path comes from. It blocks: it is called in a thread.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drakit_nodeplugin.endpoints.edits_policy import HostNode

__all__ = ("MAX_NODES", "HostDevices", "TooManyNodesError")

DEVICES = "/dev"
MOUNTED = Path("/host/dev")
"""Where the chart mounts the host's ``/dev``."""

MAX_LINKS = 40
"""Links that follow each other, as for Linux."""

MAX_NODES = 256
"""Device nodes in a directory: a larger one was not meant."""

_LEFT_OUT = frozenset({"pts", "shm", "fd", "mqueue", "console", ".lxc", ".lxd-mounts", ".udev"})
"""What runtimes leave out of a directory, too."""


class TooManyNodesError(Exception):
    """A directory has more device nodes than a container can be meant to have."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} has more than {MAX_NODES} device nodes")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostDevices:
    """The host's ``/dev``, as this process sees it."""

    root: Path

    @classmethod
    def found(cls) -> HostDevices:
        """Find it: in a pod it is mounted beside the pod's own."""
        return cls(root=MOUNTED if MOUNTED.is_dir() else Path(DEVICES))

    def nodes(self, path: str) -> list[tuple[str, str]]:
        """
        Give the device nodes of a path on the host: each with where it is below the path, which is
        empty for the path itself, and with its own path, which has no symbolic link.

        Raises :class:`TooManyNodesError`.
        """
        try:
            real = self._real(path)
            if not real.startswith(f"{DEVICES}/") or not self._seen(real).is_dir():
                return [("", real)]
        except (OSError, ValueError):  # too long, or with a null byte: no path at all
            return [("", path)]
        found: list[tuple[str, str]] = []
        for node in self._within(real):
            found.append((node.removeprefix(f"{real}/"), node))
            if len(found) > MAX_NODES:
                raise TooManyNodesError(path)
        return found or [("", real)]

    def node(self, path: str) -> HostNode:
        """Return the target of a path's symbolic links, and the device there."""
        real = path
        try:
            real = self._real(path)
            mode, number = self._status(real)
        except (OSError, ValueError):  # missing, too long, or with a null byte
            return HostNode(path=real)
        if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
            return HostNode(path=real)
        type_ = "b" if stat.S_ISBLK(mode) else "c"
        return HostNode(path=real, device=(type_, os.major(number), os.minor(number)))

    def _status(self, path: str) -> tuple[int, int]:
        """Return mode and device number of a path; zeros for a path outside ``/dev``."""
        if not path.startswith(f"{DEVICES}/"):
            return 0, 0
        status = os.lstat(self._seen(path))
        return status.st_mode, status.st_rdev

    def _seen(self, path: str) -> Path:
        """Say where this process sees a path in ``/dev``."""
        return self.root / path.removeprefix(f"{DEVICES}/")

    def _real(self, path: str) -> str:
        """Follow symbolic links, in the last part as in those before."""
        if not path.startswith(f"{DEVICES}/"):
            return path
        done, todo, links = DEVICES, path.removeprefix(f"{DEVICES}/").split("/"), 0
        while todo:
            at = posixpath.normpath(posixpath.join(done, todo.pop(0)))
            target = self._link(at)
            if target is None:
                done = at
                continue
            links += 1
            if links > MAX_LINKS:
                return path
            if target.startswith("/"):
                done = "/"
            todo = [part for part in target.split("/") if part] + todo
        return done

    def _link(self, path: str) -> str | None:
        """Say where a path leads; None if it is no link, not there, or not in ``/dev``."""
        if not path.startswith(f"{DEVICES}/"):
            return None
        try:
            return os.readlink(self._seen(path))
        except OSError:
            return None

    def _within(self, path: str) -> Iterator[str]:
        try:
            entries = sorted(os.scandir(self._seen(path)), key=lambda entry: entry.name)
        except OSError:
            return
        for entry in entries:
            if entry.name in _LEFT_OUT:
                continue
            at = f"{path}/{entry.name}"
            try:
                mode = entry.stat(follow_symlinks=False).st_mode
            except OSError:
                continue
            if stat.S_ISDIR(mode):
                yield from self._within(at)
            elif stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                yield at
