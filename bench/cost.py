"""
The cost of claims in processor time, loop iterations and thread round trips, and the number of pods
with one claim each that are prepared per second.

Unlike times, the first three hardly depend on the machine's disk or other load. The
driver of the measurement does nothing; the calls are :mod:`.kubelet`'s, the claims
:mod:`.apiserver`'s, the counting :mod:`.counted`'s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench import counted
from bench.apiserver import ApiServer
from bench.claims import BATCHES, PODS, WARM_UP, fill, no_collection
from bench.drivers import DRIVER
from bench.kubelet import Kubelet
from bench.machine import folders
from bench.plugin import Plugin, running
from bench.rows import Row, median_ms
from drakit.device import ClaimReference

__all__ = ("measure_cost",)

RESIDENT = (0, 1_000)
PAIRS = 200
"""Calls whose iterations and round trips are counted: enough that work once a second is a small
share."""

CPU_BUDGETS_MS: Mapping[tuple[str, int], float] = {("prepare", 1): 2.5, ("unprepare", 1): 1.2}
BEYOND_CLIENT_BUDGET_MS = 25.0
"""Budget of a prepare of the largest batch, above the processor time of the API client alone."""

ITERATIONS = 25.0
"""Budget of main loop iterations, for a pair of prepare and unprepare."""

ROUND_TRIPS: Mapping[str, float] = {"effects": 6.0, "plain": 2.0}
"""Budget of round trips to threads, for a pair, by driver."""

PODS_PER_SECOND = 300.0
"""Minimum rate with four cores. With fewer cores, the rate is only reported."""

CORES = 4


def measure_cost(
    driver: str,
    claims: Sequence[ClaimReference],
    others: Sequence[ClaimReference],
    *,
    api: ApiServer,
    kubeconfig: Path,
    repetitions: Mapping[int, int],
) -> Iterator[Row]:
    """Measure a class of :mod:`.drivers`; `others` are claims that stay prepared."""
    name = driver.lower()
    entry = {"driver": f"bench.drivers:{driver}"}
    with (
        folders() as places,
        running([entry], kubeconfig=kubeconfig, folders=places) as plugin,
        plugin.kubelet(DRIVER) as kubelet,
        no_collection(),
    ):
        for batch in BATCHES:
            yield from _costs(
                plugin, kubelet, claims[:batch], api=api, driver=name, count=repetitions[batch]
            )
        prepared = 0
        for resident in RESIDENT:
            fill(kubelet, others, prepared=prepared, wanted=resident)
            prepared = resident
            yield _throughput(
                kubelet, claims, api=api, driver=name, resident=resident, count=repetitions[8]
            )
    with folders() as places:
        file = places.root / "counters"
        counted.empty_file(file)
        with (
            running([entry], kubeconfig=kubeconfig, folders=places, counters=file) as plugin,
            plugin.kubelet(DRIVER) as kubelet,
            no_collection(),
        ):
            yield _hops(kubelet, claims[:1], counters=file, driver=name)


def _costs(
    plugin: Plugin,
    kubelet: Kubelet,
    claims: Sequence[ClaimReference],
    *,
    api: ApiServer,
    driver: str,
    count: int,
) -> Iterator[Row]:
    prepare: list[float] = []
    unprepare: list[float] = []
    for number in range(-WARM_UP, count):
        before = plugin.cpu_ms()
        kubelet.prepare(claims)
        prepared = plugin.cpu_ms()
        kubelet.unprepare(claims)
        after = plugin.cpu_ms()
        if number >= 0:
            prepare.append(prepared - before)
            unprepare.append(after - prepared)
    api.floor(claims)
    began = time.process_time()
    for _ in range(count):
        api.floor(claims)
    client_ms = (time.process_time() - began) * 1000 / count
    batch = len(claims)
    limits = {("prepare", max(BATCHES)): client_ms + BEYOND_CLIENT_BUDGET_MS, **CPU_BUDGETS_MS}
    for operation, figures in (
        ("prepare", {"cpu_ms": sum(prepare) / count, "client_cpu_ms": client_ms}),
        ("unprepare", {"cpu_ms": sum(unprepare) / count}),
    ):
        limit = limits.get((operation, batch))
        yield Row(
            f"cost {operation} batch={batch} driver={driver}",
            figures,
            at_most={} if limit is None else {"cpu_ms": limit},
        )


def _hops(
    kubelet: Kubelet, claims: Sequence[ClaimReference], *, counters: Path, driver: str
) -> Row:
    for _ in range(WARM_UP):
        kubelet.prepare(claims)
        kubelet.unprepare(claims)
    before = counted.read(counters)
    for _ in range(PAIRS):
        kubelet.prepare(claims)
        kubelet.unprepare(claims)
    counts = counted.read(counters) - before
    return Row(
        f"hops pair batch={len(claims)} driver={driver}",
        {
            "loop_iterations": counts.main_iterations / PAIRS,
            "driver_loop_iterations": counts.other_iterations / PAIRS,
            "thread_round_trips": counts.round_trips / PAIRS,
        },
        at_most={"loop_iterations": ITERATIONS, "thread_round_trips": ROUND_TRIPS[driver]},
    )


def _throughput(
    kubelet: Kubelet,
    claims: Sequence[ClaimReference],
    *,
    api: ApiServer,
    driver: str,
    resident: int,
    count: int,
) -> Row:
    took: list[float] = []
    floors: list[float] = []
    for number in range(-WARM_UP, count):
        batch = claims[:PODS]
        floor = api.floor(batch)
        seconds = kubelet.prepare_pods([[claim] for claim in batch])
        kubelet.unprepare(batch)
        if number >= 0:
            took.append(seconds)
            floors.append(floor)
    return Row(
        f"throughput pods={PODS} claims=1 resident={resident} driver={driver}",
        {
            "pods_per_second": PODS * 1000 / median_ms(took),
            "client_alone_per_second": PODS * 1000 / median_ms(floors),
        },
        at_least={"pods_per_second": PODS_PER_SECOND}
        if len(os.sched_getaffinity(0)) >= CORES
        else {},
    )
