"""
Records of local clusters, and the locks that prevent concurrent starts.

A record is the first thing in the cluster's folder and the last to be removed, so it describes all
possible leftovers. A process is identified by its ID and its start time, because IDs are reused.
Locks are abstract sockets: the kernel releases them however their holder ends, and they leave no
file.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..api import ClusterError
from .names import ROOT, Names, cluster_id

RECORD = "cluster.json"


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that existed at some time. `alive` returns whether it still exists."""

    pid: int
    started: int
    """Clock ticks from boot to its start, field 22 of /proc/PID/stat."""

    @classmethod
    def of(cls, pid: int) -> "Process":
        return cls(pid=pid, started=_stat(pid)[1])

    @property
    def alive(self) -> bool:
        """Return whether the process exists. A zombie is dead, and only waits for its parent."""
        try:
            state, started = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return started == self.started and state not in "ZX"

    def signal(self, number: int) -> bool:
        """Send a signal if it is still the same process. Return whether it was sent."""
        try:
            # The descriptor refers to the process, so the ID cannot be reused between the check and
            # the signal.
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the end of the process. Return False on a timeout."""
        deadline = time.monotonic() + timeout_seconds
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def _stat(pid: int) -> tuple[str, int]:
    # The second field is the program's name, which may contain spaces and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


@dataclass(frozen=True, kw_only=True)
class Record:
    """One cluster, as recorded in its folder."""

    names: Names
    phase: Literal["starting", "up", "stopping"]
    kept: bool
    owner: Process
    nodes: int
    gates: Mapping[str, bool] = field(default_factory=dict[str, bool])
    runtime_config: Mapping[str, bool] = field(default_factory=dict[str, bool])
    version: str = ""
    kubelets: Mapping[str, str] = field(default_factory=dict[str, str])
    """The minor release of kubelet and kube-proxy by node, if it differs from the control
    plane's."""

    runtime: str = ""
    """The value of RUNTIME at its start."""

    def write(self) -> None:
        self.names.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.names.folder / RECORD, asdict(self))


def read(folder: Path) -> Record | None:
    """Read the record in a folder. None if there is none."""
    try:
        raw = json.loads((folder / RECORD).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Record(names=Names(**raw.pop("names")), owner=Process(**raw.pop("owner")), **raw)


def find(cluster: str) -> Record | None:
    """Read the record of a cluster by its name."""
    record = read(ROOT / cluster_id(cluster))
    if record is not None and record.names.cluster != cluster:
        raise ClusterError(
            f"the names {cluster} and {record.names.cluster} give the same id: choose another name"
        )
    return record


def all_records() -> list[Record]:
    """Return every cluster of this machine that has a record."""
    if not ROOT.is_dir():
        return []
    return [record for folder in ROOT.iterdir() if (record := read(folder)) is not None]


def write_json(path: Path, content: Any) -> None:
    """Write a file atomically."""
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(json.dumps(content))
    partial.replace(path)


@contextmanager
def lock(what: str, *, timeout_seconds: float) -> Generator[None]:
    """Hold the lock with this name on this machine. Waits for another holder, and logs the wait."""
    deadline = time.monotonic() + timeout_seconds
    announced = False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as holder:
        while True:
            try:
                holder.bind(f"\0drakit-rig/{what}")
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"another process still works on {what} after {timeout_seconds:g} s"
                    ) from error
            if not announced and timeout_seconds:
                print(f"another process works on {what}: waiting for it", flush=True)
                announced = True
            time.sleep(0.2)
        yield
