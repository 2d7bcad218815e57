"""
Compares each kind of driver in one run: the same class in the node plugin and in a separate
process, a backend in Go, and a driver on Kubernetes' Go package kubeletplugin.

Their own work takes no time. They take turns call by call, so that machine, API server and disk are
the same for all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.apiserver import ApiServer
from bench.claims import WARM_UP, no_collection, report
from bench.drivers import DRIVER, EFFECTS, SEPARATE, SEPARATE_DEVICES
from bench.machine import Folders, folders, memory_mib
from bench.plugin import NODE, Plugin, environment, running, stop
from bench.rows import Row, median_ms
from e2e.images.go import go_program

DEVICES = SEPARATE_DEVICES
BATCHES = (1, DEVICES)

ONE_BUDGET = 1.5
"""The budget of the p50 with one claim, as a multiple of the p50 of the driver in the node
plugin."""

MORE_BUDGET_MS = 3.0
"""The budget of the additional p50 with eight claims."""

MEMORY_BUDGET_MIB = 50.0
"""The memory budget of a Python driver's process."""

PUBLISHED_SECONDS = 90.0
"""Timeout for the devices of all drivers."""

POLL_SECONDS = 0.2

CONTAINER = SEPARATE
GO = "go.bench.drakit.dev"
HELPER = "kubeletplugin.bench.drakit.dev"
"""The drivers other than the one in the node plugin."""

KINDS: Mapping[str, str] = {
    DRIVER: "python",
    CONTAINER: "python-container",
    GO: "go",
    HELPER: "kubeletplugin",
}

SOURCES = Path(__file__).parent / "go"
MODULE = SOURCES.parent.parent / "proto" / "go"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    plugin: Plugin
    pids: Mapping[str, int]
    """The process of each driver."""


def measure_kinds(api: ApiServer, kubeconfig: Path, *, repetitions: int) -> Generator[Row]:
    """Return a row for each kind of driver."""
    report("kinds of drivers")
    with _drivers(kubeconfig) as run, ExitStack() as stack, no_collection():
        kubelets = {name: stack.enter_context(run.plugin.kubelet(name)) for name in KINDS}
        for driver in KINDS:
            _wait_published(api, driver)
        devices = [(NODE, f"device-{number}") for number in range(DEVICES)]
        claims = {
            driver: api.create_claims(devices, driver=driver, prefix=kind)
            for driver, kind in KINDS.items()
        }
        idle_mib = {driver: memory_mib(pid, "VmRSS") for driver, pid in run.pids.items()}
        times: dict[tuple[str, int], list[float]] = {
            (driver, batch): [] for driver in KINDS for batch in BATCHES
        }
        for number in range(-WARM_UP, repetitions):
            for driver, kubelet in kubelets.items():
                for batch in BATCHES:
                    first = number % DEVICES if batch == 1 else 0
                    wanted = claims[driver][first : first + batch]
                    took = kubelet.prepare(wanted)
                    kubelet.unprepare(wanted)
                    if number >= 0:
                        times[driver, batch].append(took)
    for driver in KINDS:
        api.delete_slices(driver)
    yield from _rows(times, idle_mib)


def _rows(
    times: Mapping[tuple[str, int], Sequence[float]], idle_mib: Mapping[str, float]
) -> Generator[Row]:
    one_ms, eight_ms = (
        {driver: median_ms(times[driver, batch]) for driver in KINDS} for batch in BATCHES
    )
    for driver, kind in KINDS.items():
        more_ms = eight_ms[driver] - eight_ms[DRIVER]
        at_most: dict[str, float] = {}
        if driver in (CONTAINER, GO):
            at_most = {"multiple": ONE_BUDGET, "eight_more_ms": MORE_BUDGET_MS}
        if driver == CONTAINER:
            at_most["idle_mib"] = MEMORY_BUDGET_MIB
        yield Row(
            f"kinds driver={kind}",
            {
                "one_ms": one_ms[driver],
                "multiple": one_ms[driver] / one_ms[DRIVER],
                "one_more_ms": one_ms[driver] - one_ms[DRIVER],
                "eight_ms": eight_ms[driver],
                "eight_more_ms": more_ms,
                "idle_mib": idle_mib[driver],
            },
            at_most=at_most,
        )


def _wait_published(api: ApiServer, driver: str) -> None:
    until = time.monotonic() + PUBLISHED_SECONDS
    while time.monotonic() < until:
        if sum(len(each["spec"].get("devices", ())) for each in api.slices(driver)) >= DEVICES:
            return
        time.sleep(POLL_SECONDS)
    raise SystemExit(f"{driver} has not published its devices after {PUBLISHED_SECONDS:.0f} s")


@contextmanager
def _drivers(kubeconfig: Path) -> Generator[_Running]:
    """Run the node plugin with one driver inside and two outside, and the driver that does not need
    it."""
    rights = {"owner": {"uid": os.getuid()}, "devices": ["/dev/null"], "env": ["BENCH_DEVICE"]}
    allowed = {name.partition(".")[0]: {"driver": name, **rights} for name in (CONTAINER, GO)}
    with folders() as places, folders() as others, ExitStack() as stack:
        argv = {
            CONTAINER: [
                *(sys.executable, "-m", "drakit_driver", "--driver", "bench.drivers:Separate"),
                *("--socket", str(_socket(places, CONTAINER)), "--node-name", NODE),
            ],
            GO: [
                str(go_program(SOURCES / "backend", name="bench-backend", imported=[MODULE])),
                *("-name", GO, "-socket", str(_socket(places, GO))),
            ],
            HELPER: [
                str(go_program(SOURCES / "kubeletplugin", name="bench-kubeletplugin")),
                *("-name", HELPER, "-node", NODE, "-kubeconfig", str(kubeconfig)),
                *("-root", str(places.root), "-cdi", str(others.cdi)),
            ],
        }
        pids = {driver: stack.enter_context(_process(each)) for driver, each in argv.items()}
        settings = {"backends": {"enabled": True, "allowed": allowed}}
        plugin = stack.enter_context(
            running(
                [EFFECTS],
                kubeconfig=kubeconfig,
                folders=places,
                settings=settings,
                appearing=len(argv),
            )
        )
        yield _Running(plugin=plugin, pids={DRIVER: plugin.pid, **pids})


def _socket(places: Folders, driver: str) -> Path:
    directory = places.root / "plugins" / "drakit.dev" / "backends" / driver.partition(".")[0]
    directory.mkdir(parents=True)
    return directory / "driver.sock"


@contextmanager
def _process(argv: Sequence[str]) -> Generator[int]:
    process = subprocess.Popen(argv, env=environment(), stderr=subprocess.DEVNULL)
    try:
        yield process.pid
        if process.poll() is not None:
            raise SystemExit(f"{argv[0]} ended, with {process.returncode}")
    finally:
        stop(process)
