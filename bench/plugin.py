"""
The node plugin under measurement: a separate process, configured like its container.

The measurements decide which calls to make and how to interpret the figures.
"""

from __future__ import annotations

import compileall
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bench import FOLDERS, REPOSITORY, SOURCES
from bench.kubelet import Kubelet, register
from bench.machine import Folders, folders, memory_mib
from drakit.testing.conformance.node import OWN_POD

NODE = "bench-node"

START_SECONDS = 60.0
STOP_SECONDS = 60.0

_NOT_IN_PODS = ("PYTHONDONTWRITEBYTECODE", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that a developer's environment may contain, but a pod's does not."""


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
    """Seconds from the start of the process until all its drivers have responded to GetInfo."""

    sockets: Mapping[str, Path]
    """The DRA sockets, by driver."""

    def kubelet(self, driver: str) -> closing[Kubelet]:
        """Connect to a driver's socket."""
        return closing(Kubelet(self.sockets[driver]))

    def resident_mib(self) -> float:
        """Return VmRSS."""
        return memory_mib(self.pid, "VmRSS")

    def most_resident_mib(self) -> float:
        """Return the highest VmRSS so far."""
        return memory_mib(self.pid, "VmHWM")

    def cpu_ms(self) -> float:
        """Return the CPU time that all threads of the plugin have used."""
        # In nanoseconds, unlike in `stat`.
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
) -> Generator[Plugin]:
    """
    Run a plugin with these drivers.

    `settings` are additional keys of its configuration, with which `appearing` more drivers are
    served.
    """
    config = folders.root / "config.yaml"
    # The chart's logging: one line per call is part of the cost of a call.
    keys = {
        "listen": {"probes": "127.0.0.1:0", "metrics": "127.0.0.1:0"},
        "logging": {"level": "INFO", "format": "json"},
    }
    keys |= settings or {}
    config.write_text(yaml.safe_dump({**keys, "drivers": [dict(entry) for entry in drivers]}))
    arguments = [
        *("drakit_nodeplugin", "--config", str(config)),
        *("--kubeconfig", str(kubeconfig), "--node-name", NODE),
        *("--kubelet-root", str(folders.root), "--cdi-dir", str(folders.cdi)),
    ]
    with _process(arguments, folders, count=len(drivers) + appearing) as plugin:
        yield plugin


@contextmanager
def running_skeleton(kubeconfig: Path) -> Generator[Plugin]:
    """Run :mod:`.skeleton` in its own folders."""
    with folders() as places:
        arguments = ["bench.skeleton", str(kubeconfig), str(places.root), str(places.cdi)]
        with _process(arguments, places, count=1) as plugin:
            yield plugin


@contextmanager
def _process(arguments: Sequence[str], places: Folders, *, count: int) -> Generator[Plugin]:
    """Run a module until it is no longer needed. It serves `count` drivers."""
    log = places.root / "log"
    with log.open("ab") as output:
        argv = [sys.executable, "-m", *arguments]
        began = time.monotonic()
        process = subprocess.Popen(argv, env=environment(), stdout=output, stderr=output)
    try:
        sockets = _wait_served(process, places, count=count)
        served_seconds = time.monotonic() - began
        yield Plugin(pid=process.pid, served_seconds=served_seconds, sockets=sockets)
    finally:
        ended = process.poll()
        stop(process)
        if ended is not None or process.returncode != 0:
            when = "by itself" if ended is not None else "when it was asked to"
            raise SystemExit(f"{argv[2]} ended {when}, with {process.returncode}: {_tail(log)}")


def environment() -> dict[str, str]:
    """Return the environment of a pod (compiled modules, and the system's own certificates), with
    the path of this checkout before an installed one."""
    _compile()
    ours = {key: value for key, value in os.environ.items() if key not in _NOT_IN_PODS}
    path = {"PYTHONPATH": os.pathsep.join(SOURCES), "PYTHONSAFEPATH": "1"}
    return {**ours, **OWN_POD, **path, "GRPC_ENABLE_FORK_SUPPORT": "false"}


@cache
def _compile() -> None:
    """Compile drakit's packages, as in an image. Otherwise, compiling sources would take time at
    startup, and memory until the process ends."""
    for name in ("bench", "drakit", *FOLDERS):
        if not compileall.compile_dir(REPOSITORY / name, quiet=1):
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


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process. Kill it if it does not exit."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] or "its log is empty"
