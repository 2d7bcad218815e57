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
from bench.costrows import Cost, Hops, Throughput
from bench.drivers import DRIVER
from bench.kubelet import Kubelet
from bench.machine import folders
from bench.plugin import Plugin, running
from bench.rows import Row, percentile
from drakit.device import ClaimReference

__all__ = ("measure_cost",)

RESIDENT = (0, 1_000)
PAIRS = 200
"""Calls whose iterations and round trips are counted: enough that work once a second is a small
share."""


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
) -> Iterator[Cost]:
    prepare: list[float] = []
    unprepare: list[float] = []
    for number in range(-WARM_UP, count):
        before = _processor_ms(plugin)
        kubelet.prepare(claims)
        prepared = _processor_ms(plugin)
        kubelet.unprepare(claims)
        after = _processor_ms(plugin)
        if number >= 0:
            prepare.append(prepared - before)
            unprepare.append(after - prepared)
    api.floor(claims)
    began = time.process_time()
    for _ in range(count):
        api.floor(claims)
    client_ms = (time.process_time() - began) * 1000 / count
    for operation, used, client in (
        ("prepare", prepare, client_ms),
        ("unprepare", unprepare, None),
    ):
        yield Cost(
            operation=operation,
            batch=len(claims),
            driver=driver,
            cpu_ms=sum(used) / count,
            client_cpu_ms=client,
        )


def _hops(
    kubelet: Kubelet, claims: Sequence[ClaimReference], *, counters: Path, driver: str
) -> Hops:
    for _ in range(WARM_UP):
        kubelet.prepare(claims)
        kubelet.unprepare(claims)
    before = counted.read(counters)
    for _ in range(PAIRS):
        kubelet.prepare(claims)
        kubelet.unprepare(claims)
    counts = counted.read(counters) - before
    return Hops(
        driver=driver,
        main_iterations=counts.main_iterations / PAIRS,
        other_iterations=counts.other_iterations / PAIRS,
        round_trips=counts.round_trips / PAIRS,
    )


def _processor_ms(plugin: Plugin) -> float:
    """Return the processor time that the plugin has used, in ms."""
    return sum(plugin.cpu_seconds().values()) * 1000


def _throughput(
    kubelet: Kubelet,
    claims: Sequence[ClaimReference],
    *,
    api: ApiServer,
    driver: str,
    resident: int,
    count: int,
) -> Throughput:
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
    return Throughput(
        pods=PODS,
        resident=resident,
        driver=driver,
        cores=len(os.sched_getaffinity(0)),
        pods_per_second=PODS / percentile(took, 0.5),
        client_pods_per_second=PODS / percentile(floors, 0.5),
    )
