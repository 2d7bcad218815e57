"""
The node plugin under measurement: a process of its own, set up as its container is.

The measurements decide what to call and how to interpret the figures.
"""

from __future__ import annotations

import compileall
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bench.counted import COUNTERS
from bench.kubelet import Kubelet, register
from bench.machine import Folders, memory_mib
from drakit.testing.conformance.podlist import OWN_POD

__all__ = ("HOSTDEV", "NODE", "Plugin", "environment", "running")

NODE = "bench-node"

START_SECONDS = 60.0
STOP_SECONDS = 60.0

_NOT_IN_PODS = ("PYTHONDONTWRITEBYTECODE", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that a developer may have."""


def _shared(path: str) -> dict[str, Any]:
    return {
        "match": [{"subsystem": "misc", "paths": [path]}],
        "sharing": {"mode": "Users", "users": 32},
    }


HOSTDEV: Mapping[str, Any] = {
    "driver": "hostdev",
    "config": {
        "policies": {
            "kvm": _shared("/dev/kvm"),
            "tun": _shared("/dev/net/tun"),
            "fuse": _shared("/dev/fuse"),
        }
    },
}
"""The drivers entry of the chart with all predefined policies enabled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """A running plugin whose drivers are registered."""

    pid: int
    served_seconds: float
    """Seconds from the start of the process until all its drivers have answered GetInfo."""

    sockets: Mapping[str, Path]
    """The DRA sockets, by driver."""

    @contextmanager
    def kubelet(self, driver: str) -> Generator[Kubelet]:
        client = Kubelet(self.sockets[driver])
        try:
            yield client
        finally:
            client.close()

    def resident_mib(self) -> float:
        """Return VmRSS."""
        return memory_mib(self.pid, "VmRSS")

    def most_resident_mib(self) -> float:
        """Return the highest VmRSS that there has been."""
        return memory_mib(self.pid, "VmHWM")

    def cpu_ms(self) -> float:
        """Return the processor time that all its threads have used."""
        # Unlike in `stat`, in nanoseconds.
        files = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(file.read_text().split()[0]) for file in files) / 1e6


@contextmanager
def running(
    drivers: Sequence[Mapping[str, Any]],
    *,
    kubeconfig: Path,
    folders: Folders,
    settings: Mapping[str, Any] | None = None,
    appearing: int = 0,
    counters: Path | None = None,
) -> Generator[Plugin]:
    """
    Run a plugin with these drivers.

    `settings` are more keys of its configuration; by them `appearing` more drivers are served.
    With `counters`, the plugin counts its event loops in that file (:mod:`.counted`).
    """
    config, log = folders.root / "config.yaml", folders.root / "log"
    # The chart's logging: a line a call is a part of what a call costs.
    keys = {
        "listen": {"probes": "127.0.0.1:0", "metrics": "127.0.0.1:0"},
        "logging": {"level": "INFO", "format": "json"},
    }
    keys |= settings or {}
    config.write_text(yaml.safe_dump({**keys, "drivers": [dict(entry) for entry in drivers]}))
    module = "bench.counted" if counters else "drakit_nodeplugin"
    argv = [
        *(sys.executable, "-m", module, "--config", str(config)),
        *("--kubeconfig", str(kubeconfig), "--node-name", NODE),
        *("--kubelet-root", str(folders.root), "--cdi-dir", str(folders.cdi)),
    ]
    counting = {COUNTERS: str(counters)} if counters else {}
    with log.open("ab") as output:
        began = time.monotonic()
        process = subprocess.Popen(argv, env=environment() | counting, stdout=output, stderr=output)
    try:
        sockets = _wait_served(process, folders, count=len(drivers) + appearing)
        served_seconds = time.monotonic() - began
        yield Plugin(pid=process.pid, served_seconds=served_seconds, sockets=sockets)
    finally:
        ended = process.poll()
        _stop(process)
        if ended is not None or process.returncode != 0:
            when = "by itself" if ended is not None else "when it was asked to"
            raise SystemExit(f"the plugin ended {when}, with {process.returncode}: {_tail(log)}")


def environment() -> dict[str, str]:
    """Return what a pod has: compiled modules, and the system's own certificates."""
    _compile()
    ours = {key: value for key, value in os.environ.items() if key not in _NOT_IN_PODS}
    return {**ours, **OWN_POD, "PYTHONSAFEPATH": "1"}


_PACKAGES = ("drakit", "drakit_proto", "drakit_nodeplugin", "drakit_drivers", "drakit_operator")


@cache
def _compile() -> None:
    """Compile our packages, as an image has them: a source that is compiled at the start costs
    time then, and memory until the process ends."""
    for name in _PACKAGES:
        (folder,) = importlib.import_module(name).__path__
        if not compileall.compile_dir(folder, quiet=1):
            raise SystemExit(f"{name} cannot be compiled")


def _wait_served(
    process: subprocess.Popen[bytes], folders: Folders, *, count: int
) -> Mapping[str, Path]:
    seen: set[Path] = set()
    sockets: dict[str, Path] = {}
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        for path in set((folders.root / "plugins_registry").glob("*.sock")) - seen:
            seen.add(path)
            driver, socket = register(path)
            sockets[driver] = socket
        if len(sockets) == count:
            return sockets
        time.sleep(0.002)
    raise SystemExit(f"the plugin did not serve within {START_SECONDS:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] or "its log is empty"
