"""
The additional time of a prepare if the driver is a backend, in a process of its own.

The backend (:mod:`.backend`) and a driver in the plugin's process take turns call by call, in one
plugin, so that machine, API server and disk are the same for both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from bench import backend
from bench.apiserver import ApiServer
from bench.claims import WARM_UP, no_collection, report
from bench.drivers import DRIVER, EFFECTS
from bench.machine import folders
from bench.plugin import NODE, environment, running
from bench.rows import Row, median_ms, percentile

BUDGET = 1.5
"""Budget of the p50, as a multiple of that in the plugin's process."""

ENTRY = "bench"
PUBLISHED_SECONDS = 90.0
"""Timeout for the devices of the backend."""

POLL_SECONDS = 0.2


def measure_overhead(api: ApiServer, kubeconfig: Path, *, repetitions: int) -> Row:
    """Return the row of calls that prepare one claim."""
    report("overhead of a backend")
    rights = {"owner": {"uid": os.getuid()}, "devices": ["/dev/null"], "env": ["BENCH_DEVICE"]}
    allowed = {ENTRY: {"driver": backend.DRIVER, **rights}}
    with (
        folders() as places,
        _backend(places.root / "plugins" / "drakit.dev" / "backends" / ENTRY / "backend.sock"),
        running(
            [EFFECTS],
            kubeconfig=kubeconfig,
            folders=places,
            settings={"backends": {"enabled": True, "allowed": allowed}},
            appearing=1,
        ) as plugin,
        plugin.kubelet(DRIVER) as in_process,
        plugin.kubelet(backend.DRIVER) as behind_backend,
        no_collection(),
    ):
        claims = {
            in_process: api.create_claims(
                [(NODE, f"device-{n}") for n in range(backend.DEVICES)], prefix="in-process"
            ),
            behind_backend: api.create_claims(
                _wait_published(api), driver=backend.DRIVER, prefix="backend"
            ),
        }
        seconds: dict[object, list[float]] = {kubelet: [] for kubelet in claims}
        for number in range(-WARM_UP, repetitions):
            for kubelet, own in claims.items():
                claim = own[number % backend.DEVICES]
                took = kubelet.prepare([claim])
                kubelet.unprepare([claim])
                if number >= 0:
                    seconds[kubelet].append(took)
    for driver in (DRIVER, backend.DRIVER):
        api.delete_slices(driver)
    p50_ms, in_process_ms = median_ms(seconds[behind_backend]), median_ms(seconds[in_process])
    return Row(
        "overhead endpoint=backend batch=1",
        {
            "p50_ms": p50_ms,
            "p99_ms": percentile(seconds[behind_backend], 0.99) * 1000,
            "in_process_ms": in_process_ms,
            "overhead_ms": p50_ms - in_process_ms,
            "multiple": p50_ms / in_process_ms,
        },
        at_most={"multiple": BUDGET},
    )


def _wait_published(api: ApiServer) -> list[tuple[str, str]]:
    """Return pool and name of each device of the backend as soon as they are published."""
    until = time.monotonic() + PUBLISHED_SECONDS
    while time.monotonic() < until:
        devices = [
            (body["spec"]["pool"]["name"], device["name"])
            for body in api.slices(backend.DRIVER)
            for device in body["spec"].get("devices", ())
        ]
        if len(devices) == backend.DEVICES:
            return devices
        time.sleep(POLL_SECONDS)
    raise SystemExit(
        f"the devices of the backend are not published after {PUBLISHED_SECONDS:.0f} s"
    )


@contextmanager
def _backend(socket: Path) -> Generator[None]:
    argv = [sys.executable, "-m", "bench.backend", str(socket)]
    process = subprocess.Popen(argv, env=environment())
    try:
        yield
        if process.poll() is not None:
            raise SystemExit(f"the backend ended, with {process.returncode}")
    finally:
        process.kill()
        process.wait()
