"""
The time and memory that claims need.

This module only orders the measurements. :mod:`.kubelet` makes the calls, :mod:`.apiserver` has the
claims and the floor, :mod:`.rows` the rows and budgets. States that are compared (none, many and
very many claims prepared) alternate, so that a machine that becomes slower or faster affects all of
them equally. The floor is measured just before each batch.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.apiserver import ApiServer
from bench.drivers import DRIVER, SHARED
from bench.kubelet import Kubelet
from bench.machine import Folders, folders
from bench.plugin import HOSTDEV, NODE, Plugin, running
from bench.rows import Endurance, Memory, Pods, Row, Samples, Times, percentile
from drakit.device import ClaimReference

__all__ = ("BATCHES", "FULL", "PODS", "QUICK", "WARM_UP", "Bench", "Plan", "fill", "no_collection")

BATCHES = (1, 8, 64)
BATCH = max(BATCHES)
"""The claims that are measured, and the size of the batches in which the others are prepared."""

RESIDENT_BUDGET_MIB = 104.0
PODS = 8
CLAIMS_OF_PODS = (1, 4)
DEVICE_TIME = "20ms"
WARM_UP = 3
"""Warm-up repetitions, not counted: connections are opened, code is loaded."""

SAMPLES_OF_ENDURANCE = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The size of a run."""

    cycles: int
    """Repetitions of each number of resident claims, in turns."""

    resident: tuple[int, ...]
    repetitions: Mapping[int, int]
    """Samples in each turn, by size of batch."""

    pods_repetitions: int
    """Samples in each turn."""

    pairs: int
    """Pairs of prepare and unprepare of one claim, in the endurance run."""

    idle_seconds: float
    endpoints_idle_seconds: float
    changes: int
    """Changes of devices, a thousand per second."""


FULL = Plan(
    cycles=3,
    resident=(0, 1_000, 10_000),
    repetitions={1: 150, 8: 60, 64: 25},
    pods_repetitions=8,
    pairs=100_000,
    idle_seconds=60,
    endpoints_idle_seconds=30,
    changes=10_000,
)

QUICK = Plan(
    cycles=2,
    resident=(0, 1_000),
    repetitions={1: 40, 8: 20, 64: 10},
    pods_repetitions=4,
    pairs=6_400,
    idle_seconds=5,
    endpoints_idle_seconds=30,
    changes=3_000,
)
"""Shows gross regressions within two minutes; decides nothing."""


class Bench:
    """The measurements with claims, in one cluster."""

    def __init__(self, plan: Plan, *, api: ApiServer, kubeconfig: Path) -> None:
        self._plan = plan
        self._api = api
        self._kubeconfig = kubeconfig
        report("creating claims")
        self._measured = api.create_claims(BATCH)
        # Shares: a node has fewer devices than claims, if it has thousands of these.
        devices = [(NODE, f"shared-{number % SHARED}") for number in range(max(plan.resident))]
        self.others: Sequence[ClaimReference] = api.create_claims(
            len(devices), prefix="other", devices=devices, shared=True
        )

    def claims_of(self, batch: int) -> Sequence[ClaimReference]:
        """Return the claims of a batch that are measured."""
        return self._measured[:batch]

    # ------------------------------------------------------------ times and memory of a driver

    def driver(self, name: str) -> Iterator[Row]:
        """Measure a class of :mod:`.drivers`."""
        drivers = [HOSTDEV, {"driver": f"bench.drivers:{name}"}]
        driver = name.lower()
        samples: dict[tuple[str, int, int], Samples] = defaultdict(Samples)
        rss_mib: dict[int, list[float]] = defaultdict(list)
        with folders() as places:
            with self._plugin(drivers, places) as (plugin, kubelet):
                for resident in self._turns(kubelet):
                    report(f"{driver}: times with {resident} claims prepared")
                    for batch in BATCHES:
                        self._repeat(kubelet, batch, resident, samples)
                    rss_mib[resident].append(plugin.resident_mib())
            yield from _compared(samples, rss_mib, driver=driver)
            yield self._resident_memory(rss_mib, driver=driver)
            report(f"{driver}: a start with {max(self._plan.resident)} claims prepared")
            with self._plugin(drivers, places) as (plugin, kubelet):
                yield self._restarted(plugin, kubelet, driver=driver)
        # In a process of its own: a heap that was larger before would hide what grows.
        report(f"{driver}: {self._plan.pairs} pairs")
        with folders() as places, self._plugin(drivers, places) as (plugin, kubelet):
            yield self._endurance(plugin, kubelet, driver=driver)

    @contextmanager
    def _plugin(
        self, drivers: Sequence[Mapping[str, Any]], places: Folders
    ) -> Generator[tuple[Plugin, Kubelet]]:
        with (
            running(drivers, kubeconfig=self._kubeconfig, folders=places) as plugin,
            plugin.kubelet(DRIVER) as kubelet,
            no_collection(),
        ):
            yield plugin, kubelet

    def _turns(self, kubelet: Kubelet) -> Iterator[int]:
        """Yield the numbers of resident claims in turns, each after they are prepared. The last
        ones stay."""
        prepared = 0
        for _ in range(self._plan.cycles):
            for resident in self._plan.resident:
                fill(kubelet, self.others, prepared=prepared, wanted=resident)
                prepared = resident
                yield resident

    def _repeat(
        self,
        kubelet: Kubelet,
        batch: int,
        resident: int,
        samples: Mapping[tuple[str, int, int], Samples],
    ) -> None:
        prepare = samples["prepare", batch, resident]
        for number in range(-WARM_UP, self._plan.repetitions[batch]):
            first = number * batch % BATCH
            claims = self._measured[first : first + batch]
            floor = self._api.floor(claims)
            seconds = kubelet.prepare(claims)
            repeated = kubelet.prepare(claims) if batch == BATCH else None
            undone = kubelet.unprepare(claims)
            if number < 0:
                continue
            prepare.floors.append(floor)
            prepare.seconds.append(seconds)
            if repeated is not None:
                samples["repeat", batch, resident].floors.append(floor)
                samples["repeat", batch, resident].seconds.append(repeated)
                samples["unprepare", batch, resident].seconds.append(undone)

    def _resident_memory(self, rss_mib: Mapping[int, Sequence[float]], *, driver: str) -> Memory:
        resident = max(self._plan.resident)
        return Memory(
            name=f"memory resident={resident} driver={driver}",
            rss_mib=max(rss_mib[resident]),
            rss_budget_mib=RESIDENT_BUDGET_MIB,
        )

    def _restarted(self, plugin: Plugin, kubelet: Kubelet, *, driver: str) -> Memory:
        # As after a rolling update: CDI files are restored, the kubelet asks for some claims.
        for first in range(0, len(self.others), BATCH * 8):
            kubelet.prepare(self.others[first : first + BATCH])
        time.sleep(self._plan.idle_seconds)
        return Memory(
            name=f"start resident={max(self._plan.resident)} driver={driver}",
            rss_mib=plugin.resident_mib(),
            rss_budget_mib=RESIDENT_BUDGET_MIB,
            served_ms=plugin.served_seconds * 1000,
        )

    def _endurance(self, plugin: Plugin, kubelet: Kubelet, *, driver: str) -> Endurance:
        batches = -(-self._plan.pairs // BATCH)
        step = max(1, batches // SAMPLES_OF_ENDURANCE)
        rss_mib: list[float] = []
        for number in range(batches):
            kubelet.prepare(self._measured)
            kubelet.unprepare(self._measured)
            if number % step == step - 1:
                rss_mib.append(plugin.resident_mib())
        return Endurance(driver=driver, pairs=batches * BATCH, rss_mib=rss_mib)

    # ------------------------------------------------------------ pods at once

    def pods(self) -> Iterator[Pods]:
        """Measure pods that start at once, with a slow driver."""
        entry = {"driver": "bench.drivers:Effects", "config": {"deviceTime": DEVICE_TIME}}
        sequential: dict[tuple[int, int], list[float]] = defaultdict(list)
        parallel: dict[tuple[int, int], list[float]] = defaultdict(list)
        rss_mib: dict[int, list[float]] = defaultdict(list)
        with folders() as places, self._plugin([HOSTDEV, entry], places) as (plugin, kubelet):
            for resident in self._turns(kubelet):
                report(f"pods at once with {resident} claims prepared")
                for claims in CLAIMS_OF_PODS:
                    pods = [self._measured[n * claims : (n + 1) * claims] for n in range(PODS)]
                    for number in range(-1, self._plan.pods_repetitions):
                        one_by_one = sum(kubelet.prepare(pod) for pod in pods)
                        kubelet.unprepare(self._measured[: PODS * claims])
                        at_once = kubelet.prepare_pods(pods)
                        kubelet.unprepare(self._measured[: PODS * claims])
                        if number >= 0:
                            sequential[claims, resident].append(one_by_one)
                            parallel[claims, resident].append(at_once)
                rss_mib[resident].append(plugin.resident_mib())
        none_resident: dict[int, Pods] = {}
        for claims, resident in sequential:
            row = Pods(
                pods=PODS,
                claims=claims,
                resident=resident,
                sequential_ms=percentile(sequential[claims, resident], 0.5) * 1000,
                parallel_ms=percentile(parallel[claims, resident], 0.5) * 1000,
                rss_mib=rss_mib[resident][0],
                none_resident=none_resident.get(claims),
            )
            none_resident.setdefault(claims, row)
            yield row


def _compared(
    samples: Mapping[tuple[str, int, int], Samples],
    rss_mib: Mapping[int, Sequence[float]],
    *,
    driver: str,
) -> Iterator[Times]:
    """
    Build rows from samples, those without resident claims first.

    Their VmRSS is that of the first turn: later on the heap has been larger.
    """
    none_resident: dict[tuple[str, int], Times] = {}
    for (operation, batch, resident), sample in samples.items():
        row = Times.of(
            sample,
            operation=operation,
            batch=batch,
            resident=resident,
            driver=driver,
            rss_mib=rss_mib[resident][0],
            none_resident=none_resident.get((operation, batch)),
        )
        none_resident.setdefault((operation, batch), row)
        yield row


def fill(kubelet: Kubelet, claims: Sequence[ClaimReference], *, prepared: int, wanted: int) -> None:
    """Prepare the next claims, or unprepare the last ones, until as many are prepared as wanted."""
    call: Callable[[Sequence[ClaimReference]], float]
    call = kubelet.prepare if wanted > prepared else kubelet.unprepare
    low, high = sorted((prepared, wanted))
    for first in range(low, high, BATCH):
        call(claims[first : min(first + BATCH, high)])


@contextmanager
def no_collection() -> Generator[None]:
    """Exclude our own garbage collector from the times."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def report(what: str) -> None:
    print(f"... {what}", file=sys.stderr, flush=True)
