"""
Measures the time and memory that claims need.

:mod:`.kubelet` makes the calls, :mod:`.apiserver` has the claims. States that are compared (none,
many and very many claims prepared) alternate, so that a machine that becomes slower or faster
affects all of them equally. :mod:`.skeleton` does each batch just before the plugin.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import skeleton
from bench.apiserver import ApiServer
from bench.drivers import DRIVER, EFFECTS, SHARED
from bench.kubelet import Kubelet
from bench.machine import Folders, folders
from bench.plugin import HOSTDEV, NODE, Plugin, running, running_skeleton
from bench.rows import Row, compared, median_ms, percentile
from drakit.device import ClaimReference

BATCHES = (1, 8, 64)
BATCH = max(BATCHES)
"""The number of measured claims, and the batch size for preparing the other claims."""

TIME_BUDGETS: Mapping[tuple[str, int], float] = {
    ("prepare", 1): 1.75,
    ("prepare", 8): 1.75,
    ("prepare", 64): 1.75,
    ("repeat", 64): 1.1,
    ("unprepare", 64): 3,
}
"""The budget of the p50 as a multiple of the skeleton's, keyed by operation and batch size. A
repeated prepare is compared with the skeleton's prepare."""

RESIDENT_RATIO = 1.2
"""The budget of the p50 with resident claims, as a multiple of the p50 without."""

RESIDENT_BUDGET_MIB = 104.0

SPEED_UP = 4.0
"""Minimum speedup of concurrent pods over sequential pods."""

GROWTH_MIB = 1.0
"""The budget of the VmRSS growth in an endurance run. Heap fragmentation changes it by a few
tenths; a leak of 32 bytes per pair would be 2.4 MiB."""

PODS = 8
CLAIMS_OF_PODS = (1, 4)
DEVICE_TIME = "20ms"
WARM_UP = 3
"""The number of warm-up repetitions, in which connections are opened and code is loaded. They are
not measured."""

SAMPLES_OF_ENDURANCE = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The size of a run."""

    cycles: int
    """How many times each number of resident claims has its turn."""

    resident: tuple[int, ...]
    repetitions: Mapping[int, int]
    """The number of samples in each turn, keyed by batch size."""

    pairs: int
    """The number of times that one claim is prepared and unprepared in the endurance run."""

    idle_seconds: float
    changes: int
    """The number of device changes, at a rate of a thousand per second."""


FULL = Plan(
    cycles=3,
    resident=(0, 1_000, 10_000),
    repetitions={1: 150, 8: 60, 64: 25},
    pairs=100_000,
    idle_seconds=60,
    changes=10_000,
)

QUICK = Plan(
    cycles=2,
    resident=(0, 1_000),
    repetitions={1: 40, 8: 20, 64: 10},
    pairs=6_400,
    idle_seconds=5,
    changes=3_000,
)
"""Shows gross regressions within two minutes, but is not conclusive."""


@dataclass(kw_only=True, slots=True)
class Samples:
    """The durations of one operation in one state of the plugin, in seconds and in order."""

    seconds: list[float] = field(default_factory=list[float])
    skeleton: list[float] = field(default_factory=list[float])
    """The corresponding times of the skeleton."""


class Bench:
    """The measurements with claims, in one cluster."""

    def __init__(self, plan: Plan, *, api: ApiServer, kubeconfig: Path) -> None:
        self._plan = plan
        self._api = api
        self._kubeconfig = kubeconfig
        report("creating claims")
        self.measured = api.create_claims([(NODE, f"device-{n}") for n in range(BATCH)])
        # These claims share devices, because a node with thousands of claims has fewer devices than
        # claims.
        devices = [(NODE, f"shared-{n % SHARED}") for n in range(max(plan.resident))]
        self.others = api.create_claims(devices, prefix="other", shared=True)

    # ------------------------------------------------------------ times and memory

    def times(self) -> Iterator[Row]:
        """Measure times and memory of a driver that takes no time."""
        drivers = [HOSTDEV, EFFECTS]
        samples: dict[tuple[str, int, int], Samples] = defaultdict(Samples)
        rss_mib: list[float] = []
        with folders() as places:
            with (
                self._plugin(drivers, places) as (plugin, kubelet),
                running_skeleton(self._kubeconfig) as least,
                least.kubelet(skeleton.NAME) as reference,
            ):
                for resident in self._turns(kubelet):
                    report(f"times with {resident} claims prepared")
                    for batch in BATCHES:
                        self._repeat(kubelet, reference, batch, resident, samples)
                    rss_mib.append(plugin.resident_mib())
            yield from _compared(samples)
            most = max(self._plan.resident)
            yield Row(
                f"memory resident={most}",
                {"rss_mib": max(rss_mib)},
                at_most={"rss_mib": RESIDENT_BUDGET_MIB},
            )
            report(f"a start with {most} claims prepared")
            with self._plugin(drivers, places) as (plugin, kubelet):
                yield self._restarted(plugin, kubelet)
        # Use a separate process, because an already larger heap would hide the growth.
        report(f"{self._plan.pairs} pairs")
        with folders() as places, self._plugin(drivers, places) as (plugin, kubelet):
            yield self._endurance(plugin, kubelet)

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
        """Yield the numbers of resident claims in turn, after they are prepared. The last ones
        stay."""
        prepared = 0
        for _ in range(self._plan.cycles):
            for resident in self._plan.resident:
                fill(kubelet, self.others, prepared=prepared, wanted=resident)
                prepared = resident
                yield resident

    def _repeat(
        self,
        kubelet: Kubelet,
        reference: Kubelet,
        batch: int,
        resident: int,
        samples: Mapping[tuple[str, int, int], Samples],
    ) -> None:
        for number in range(-WARM_UP, self._plan.repetitions[batch]):
            first = number * batch % BATCH
            claims = self.measured[first : first + batch]
            least = {"prepare": reference.prepare(claims), "unprepare": reference.unprepare(claims)}
            least["repeat"] = least["prepare"]
            took = {"prepare": kubelet.prepare(claims)}
            if batch == BATCH:
                took["repeat"] = kubelet.prepare(claims)
            took["unprepare"] = kubelet.unprepare(claims)
            for operation, seconds in took.items() if number >= 0 else ():
                samples[operation, batch, resident].seconds.append(seconds)
                samples[operation, batch, resident].skeleton.append(least[operation])

    def _restarted(self, plugin: Plugin, kubelet: Kubelet) -> Row:
        # Do the same as happens after a rolling update: CDI files are restored, and the kubelet
        # prepares some claims again.
        for first in range(0, len(self.others), BATCH * 8):
            kubelet.prepare(self.others[first : first + BATCH])
        time.sleep(self._plan.idle_seconds)
        return Row(
            f"start resident={max(self._plan.resident)}",
            {"served_ms": plugin.served_seconds * 1000, "rss_mib": plugin.resident_mib()},
            at_most={"rss_mib": RESIDENT_BUDGET_MIB},
        )

    def _endurance(self, plugin: Plugin, kubelet: Kubelet) -> Row:
        batches = -(-self._plan.pairs // BATCH)
        step = max(1, batches // SAMPLES_OF_ENDURANCE)
        rss_mib: list[float] = []
        for number in range(batches):
            kubelet.prepare(self.measured)
            kubelet.unprepare(self.measured)
            if number % step == step - 1:
                rss_mib.append(plugin.resident_mib())
        return Row(
            "endurance",
            {"pairs": batches * BATCH, "rss_mib": rss_mib[-1], "growth_mib": growth_mib(rss_mib)},
            at_most={"growth_mib": GROWTH_MIB},
        )

    # ------------------------------------------------------------ concurrent pods

    def pods(self) -> Iterator[Row]:
        """Measure pods that start at the same time, with a slow driver."""
        entry = {**EFFECTS, "config": {"deviceTime": DEVICE_TIME}}
        with folders() as places, self._plugin([HOSTDEV, entry], places) as (_, kubelet):
            for claims in CLAIMS_OF_PODS:
                report(f"pods at once with {claims} claims each")
                pods = [self.measured[n * claims : (n + 1) * claims] for n in range(PODS)]
                sequential: list[float] = []
                parallel: list[float] = []
                for _ in range(self._plan.repetitions[8]):
                    sequential.append(sum(kubelet.prepare(pod) for pod in pods))
                    kubelet.unprepare(self.measured[: PODS * claims])
                    parallel.append(kubelet.prepare_pods(pods))
                    kubelet.unprepare(self.measured[: PODS * claims])
                sequential_ms, parallel_ms = median_ms(sequential), median_ms(parallel)
                yield Row(
                    f"pods pods={PODS} claims={claims}",
                    {
                        "sequential_ms": sequential_ms,
                        "parallel_ms": parallel_ms,
                        "speed_up": sequential_ms / parallel_ms,
                    },
                    at_least={"speed_up": SPEED_UP},
                )


def _compared(samples: Mapping[tuple[str, int, int], Samples]) -> Iterator[Row]:
    """Build rows from samples, those without resident claims first."""
    none_resident: dict[tuple[str, int], Samples] = {}
    for (operation, batch, resident), sample in samples.items():
        yield times_row(
            sample,
            operation=operation,
            batch=batch,
            resident=resident,
            none_resident=none_resident.get((operation, batch)),
        )
        none_resident.setdefault((operation, batch), sample)


def times_row(
    samples: Samples, *, operation: str, batch: int, resident: int, none_resident: Samples | None
) -> Row:
    """Return the row of one operation, one batch size and one number of prepared claims."""
    p50_ms = median_ms(samples.seconds)
    figures = {
        "p50_ms": p50_ms,
        "p99_ms": percentile(samples.seconds, 0.99) * 1000,
        **compared(samples.seconds, samples.skeleton),
    }
    limits: dict[str, float] = {}
    if none_resident is not None:
        figures["ratio"] = p50_ms / median_ms(none_resident.seconds)
        limits["ratio"] = RESIDENT_RATIO
    elif (operation, batch) in TIME_BUDGETS:
        limits["multiple"] = TIME_BUDGETS[operation, batch]
    name = f"{operation} batch={batch} resident={resident}"
    return Row(name, figures, at_most=limits)


def growth_mib(rss_mib: Sequence[float]) -> float:
    """Return the growth from the highest VmRSS in the first fifth of a run to that in the last."""
    fifth = max(1, len(rss_mib) // 5)
    return max(rss_mib[-fifth:]) - max(rss_mib[:fifth])


def fill(kubelet: Kubelet, claims: Sequence[ClaimReference], *, prepared: int, wanted: int) -> None:
    """Prepare the next claims, or unprepare the last ones, until the wanted number of claims is
    prepared."""
    call: Callable[[Sequence[ClaimReference]], float]
    call = kubelet.prepare if wanted > prepared else kubelet.unprepare
    low, high = sorted((prepared, wanted))
    for first in range(low, high, BATCH):
        call(claims[first : min(first + BATCH, high)])


@contextmanager
def no_collection() -> Generator[None]:
    """Keep this process's garbage collector from affecting the measured times."""
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
