"""
Profiles the plugin for one operation: `python -m bench --profile prepare-64`.

First the processor's time of each thread, which other work on the machine hardly changes, beside
that of the floor in our own process. Then, from another run, what cProfile saw of the main thread,
its start and the calls between included.
This module judges nothing: budgets are in :mod:`.rows`.
"""

from __future__ import annotations

import pstats
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.apiserver import ApiServer
from bench.drivers import DRIVER
from bench.kubelet import Kubelet
from bench.machine import folders
from bench.plugin import Plugin, running
from drakit.device import ClaimReference

__all__ = ("OPERATIONS", "profile")

OPERATIONS = ("prepare", "repeat", "unprepare")
REPETITIONS: Mapping[int, int] = {1: 500, 8: 300, 64: 100}
THREADS = 5
"""Threads that are printed, the busiest first."""

LINES = 40


def profile(operation: str, batch: int, *, driver: str, api: ApiServer, kubeconfig: Path) -> None:
    """Print the profile of an operation, with a class of :mod:`.drivers`."""
    claims = api.create_claims(batch)
    with tempfile.NamedTemporaryFile() as file:
        for output in (None, Path(file.name)):
            with (
                folders() as places,
                running(
                    [{"driver": f"bench.drivers:{driver}"}],
                    kubeconfig=kubeconfig,
                    folders=places,
                    profile=output,
                ) as plugin,
                plugin.kubelet(DRIVER) as kubelet,
            ):
                threads = _threads(plugin, kubelet, operation, claims)
            if output is None:
                total = sum(threads)
                floor_ms = _floor_ms(api, claims)
                busiest = " ".join(f"{ms:.2f}" for ms in sorted(threads, reverse=True)[:THREADS])
                print(
                    f"profile {operation} batch={batch} driver={driver.lower()} "
                    f"cpu_ms={total:.2f} floor_cpu_ms={floor_ms:.2f} by_thread_ms: {busiest}",
                    flush=True,
                )
            else:
                _print_functions(output)


def _threads(
    plugin: Plugin, kubelet: Kubelet, operation: str, claims: Sequence[ClaimReference]
) -> list[float]:
    """Repeat the operation; return the time in ms that each thread needs for one call."""
    used: Counter[int] = Counter()
    call = kubelet.unprepare if operation == "unprepare" else kubelet.prepare
    count = REPETITIONS[len(claims)]
    for number in range(-1, count):
        if operation == "unprepare" or number < 0:
            kubelet.prepare(claims)
        before = Counter(plugin.cpu_seconds())
        call(claims)
        after = Counter(plugin.cpu_seconds())
        if number >= 0:
            used.update(after - before)
        if operation == "prepare":
            kubelet.unprepare(claims)
    return [seconds * 1000 / count for seconds in used.values()]


def _floor_ms(api: ApiServer, claims: Sequence[ClaimReference]) -> float:
    """Return the processor's time in ms that getting the claims takes our process."""
    api.floor(claims)
    count = REPETITIONS[len(claims)]
    before = time.process_time()
    for _ in range(count):
        api.floor(claims)
    return (time.process_time() - before) * 1000 / count


def _print_functions(file: Path) -> None:
    statistics = pstats.Stats(str(file)).strip_dirs()
    for order in ("tottime", "cumulative"):
        statistics.sort_stats(order).print_stats(LINES)
