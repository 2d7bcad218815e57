"""
Measures the node plugin's start time and idle memory, the CPU time per claim, and how many pods
with one claim each it prepares per second.

All figures except the memory are multiples of :mod:`.skeleton`'s. Unlike durations, CPU time hardly
depends on the machine's disk or other load. The measured driver does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench import skeleton
from bench.claims import BATCHES, PODS, WARM_UP, fill, no_collection
from bench.drivers import DRIVER, EFFECTS
from bench.kubelet import Kubelet
from bench.machine import folders
from bench.plugin import HOSTDEV, Plugin, running, running_skeleton
from bench.rows import Row, compared, median_ms
from drakit.device import ClaimReference

START_BUDGET = 3.0
"""The budget of the start time, as a multiple of the skeleton's."""

IDLE_BUDGET_MIB = 72.0
STARTS = 5

RESIDENT = (0, 1_000)

CPU_BUDGETS: Mapping[tuple[str, int], float] = {
    ("prepare", 1): 1.5,
    ("unprepare", 1): 1.5,
    ("prepare", 64): 2.2,
}
"""The budget of the CPU time, as a multiple of the skeleton's."""

RATE_BUDGET = 0.6
"""The budget of the pods per second, as a multiple of the skeleton's."""


def footprint(kubeconfig: Path, *, idle_seconds: float) -> Row:
    """Return the median time until a registration socket is served, and VmRSS after an idle
    time."""
    times: list[float] = []
    skeletons: list[float] = []
    rss_mib = 0.0
    with folders() as places:
        for number in range(STARTS):
            with running_skeleton(kubeconfig) as skeleton:
                skeletons.append(skeleton.served_seconds)
            with running([HOSTDEV], kubeconfig=kubeconfig, folders=places) as plugin:
                times.append(plugin.served_seconds)
                if number == STARTS - 1:
                    time.sleep(idle_seconds)
                    rss_mib = plugin.resident_mib()
    figures = {"served_ms": median_ms(times), **compared(times, skeletons), "rss_mib": rss_mib}
    return Row(
        "idle resident=0", figures, at_most={"multiple": START_BUDGET, "rss_mib": IDLE_BUDGET_MIB}
    )


def measure_cost(
    claims: Sequence[ClaimReference],
    others: Sequence[ClaimReference],
    *,
    kubeconfig: Path,
    repetitions: Mapping[int, int],
) -> Iterator[Row]:
    """Return all rows. `others` are claims that stay prepared."""
    with (
        folders() as places,
        running([EFFECTS], kubeconfig=kubeconfig, folders=places) as plugin,
        plugin.kubelet(DRIVER) as kubelet,
        running_skeleton(kubeconfig) as least,
        least.kubelet(skeleton.NAME) as reference,
        no_collection(),
    ):
        both = ((plugin, kubelet), (least, reference))
        for batch in BATCHES:
            yield from _costs(both, claims[:batch], count=repetitions[batch])
        prepared = 0
        for resident in RESIDENT:
            fill(kubelet, others, prepared=prepared, wanted=resident)
            prepared = resident
            yield _throughput(kubelet, reference, claims[:PODS], resident, repetitions[8])


def _costs(
    both: Sequence[tuple[Plugin, Kubelet]], claims: Sequence[ClaimReference], *, count: int
) -> Iterator[Row]:
    """Measure the plugin and the skeleton in turn."""
    # The milliseconds that both have spent, keyed by operation.
    spent = {"prepare": [0.0, 0.0], "unprepare": [0.0, 0.0]}
    for number in range(-WARM_UP, count):
        for which, (process, kubelet) in enumerate(both):
            before = process.cpu_ms()
            kubelet.prepare(claims)
            prepared = process.cpu_ms()
            kubelet.unprepare(claims)
            after = process.cpu_ms()
            if number >= 0:
                spent["prepare"][which] += prepared - before
                spent["unprepare"][which] += after - prepared
    batch = len(claims)
    for operation, (plugin_ms, skeleton_ms) in spent.items():
        limit = CPU_BUDGETS.get((operation, batch))
        yield Row(
            f"cost {operation} batch={batch}",
            {
                "cpu_ms": plugin_ms / count,
                "skeleton_cpu_ms": skeleton_ms / count,
                "multiple": plugin_ms / skeleton_ms,
            },
            at_most={} if limit is None else {"multiple": limit},
        )


def _throughput(
    kubelet: Kubelet,
    reference: Kubelet,
    claims: Sequence[ClaimReference],
    resident: int,
    count: int,
) -> Row:
    seconds: dict[Kubelet, list[float]] = {kubelet: [], reference: []}
    for number in range(-WARM_UP, count):
        for each, took in seconds.items():
            at_once = each.prepare_pods([[claim] for claim in claims])
            each.unprepare(claims)
            if number >= 0:
                took.append(at_once)
    rate, least_rate = (len(claims) * 1000 / median_ms(took) for took in seconds.values())
    return Row(
        f"throughput pods={len(claims)} claims=1 resident={resident}",
        {"pods_per_second": rate, "skeleton": least_rate, "multiple": rate / least_rate},
        at_least={"multiple": RATE_BUDGET},
    )
