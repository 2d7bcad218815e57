"""
`make chaos MINUTES=2 SEED=1`: random faults on a cluster of two nodes with 40 pods.

All faults of a seed come in the same order; their times depend on the machine. The run prints one
line per fault, and at its end one line with the seed, the number of faults of each kind, the pods
that run, and the number of leaks. The exit code is 1 if a pod does not run, or if anything leaks.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from e2e.chaos import workload
from e2e.chaos.faults import KINDS, Fault, Injector, sequence
from e2e.chaos.leaks import Pools, collect, leaks, pools
from e2e.cluster.api import Capability, Cluster, ClusterError, Options, wait_until
from e2e.cluster.choice import REPOSITORY
from e2e.cluster.choice import cluster as choose_cluster
from e2e.cluster.local.names import default_cluster
from e2e.images import build_images

NODES = 2
AT_ONCE = 3
"""Maximum number of concurrent faults."""

START_SECONDS = 480.0
CONVERGENCE_SECONDS = 420.0
"""Maximum time from the end of the last fault until every pod runs, and then again until nothing
leaks."""

FAULT_SECONDS = 300.0
"""Maximum time of one fault. An upgrade waits for the release's pods."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    name = os.environ.get("CLUSTER_NAME") or default_cluster(REPOSITORY)
    cluster = choose_cluster(f"{name}-chaos")
    needed = {Capability.DISK, Capability.COMPACTION, Capability.REBOOT, Capability.CUT}
    if missing := sorted(needed - cluster.capabilities):
        print(f"error: {cluster.provider} cannot do this: {', '.join(missing)}", file=sys.stderr)
        return 1
    archives = build_images()
    build = "_".join(archive.parent.name for archive in archives)
    try:
        with _started(cluster):
            for archive in archives:
                cluster.load_image(archive)
            return Run(cluster, build=build, minutes=arguments.minutes, seed=arguments.seed).run()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


@contextmanager
def _started(cluster: Cluster) -> Iterator[None]:
    """Start the cluster. With KEEP_CLUSTER=1 it keeps running, for `make kubectl`."""
    kept = os.environ.get("KEEP_CLUSTER") == "1"
    cluster.start(Options(nodes=NODES, kept=kept))
    try:
        yield
    finally:
        if not kept:
            cluster.stop()


class Run:
    """One run on a cluster that contains only the images."""

    def __init__(self, cluster: Cluster, *, build: str, minutes: float, seed: int) -> None:
        self._cluster, self._build = cluster, build
        self._minutes, self._seed = minutes, seed
        self._injector = Injector(cluster, build=build, seed=seed)
        self._began = time.monotonic()
        self._faults: Counter[str] = Counter()

    def run(self) -> int:
        """Run everything, print the summary, and return the exit code."""
        cluster = self._cluster
        workload.deploy(cluster, build=self._build)
        workload.start(cluster)
        if waiting := self._converge(START_SECONDS):
            raise ClusterError(f"before any fault: {'; '.join(waiting)}")
        expected = pools(collect(cluster, workload.DRIVERS, workload.SPACE).slices)
        self._report(f"{workload.running(cluster)} pods run")
        self._inflict()
        self._report("no more faults")
        ended = time.monotonic()
        self._injector.recover()
        waiting = self._converge(CONVERGENCE_SECONDS)
        running, seconds = workload.running(cluster), time.monotonic() - ended
        leaked = self._settle(expected)
        # Without pods, no traces of claims may remain.
        workload.scale_down(cluster)
        waiting += self._converge(CONVERGENCE_SECONDS)
        without = self._settle(expected)
        for sentence in [*waiting, *_sentences(leaked), *_sentences(without)]:
            self._report(f"error: {sentence}")
        counts = {kind: len({*leaked[kind], *without[kind]}) for kind in leaked}
        print(self._line(counts, running=running, seconds=seconds), flush=True)
        return 1 if waiting or any(counts.values()) else 0

    # ------------------------------------------------------------ faults

    def _inflict(self) -> None:
        """Inject faults until the time is up, and wait until all faults have ended."""
        until = time.monotonic() + self._minutes * 60
        active: dict[Future[None], Fault] = {}
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for fault in sequence(self._seed, self._cluster.nodes):
                while any(fault.targets & each.targets for each in active.values()) or (
                    len(active) == AT_ONCE
                ):
                    self._end_some(active)
                if time.monotonic() > until:
                    break
                self._report(str(fault))
                self._faults[fault.kind] += 1
                active[threads.submit(self._injector.inflict, fault)] = fault
                time.sleep(fault.pause)
            while active:
                self._end_some(active)

    def _end_some(self, active: dict[Future[None], Fault]) -> None:
        done, _ = wait(active, timeout=FAULT_SECONDS, return_when=FIRST_COMPLETED)
        if not done:
            raise ClusterError(f"{', '.join(map(str, active.values()))}: it does not end")
        for future in done:
            fault = active.pop(future)
            if (error := future.exception()) is None:
                self._report(f"ended: {fault}")
            elif isinstance(error, ClusterError):
                # A fault of another target interfered. The end of the run undoes both.
                self._report(f"ended: {fault}, with {_first_line(error)}")
            else:
                raise error

    # ------------------------------------------------------------ convergence

    def _converge(self, seconds: float) -> list[str]:
        """Wait until everything runs that should run. Return a sentence for each part that does not
        run after the timeout."""
        try:
            wait_until(
                "every pod runs",
                lambda: not workload.problems(self._cluster),
                timeout_seconds=seconds,
                interval_seconds=1,
            )
        except ClusterError:
            return workload.problems(self._cluster)
        return []

    def _settle(self, expected: Pools) -> Mapping[str, Sequence[str]]:
        """Wait until nothing leaks. Return the remaining leaks after the timeout."""
        until = time.monotonic() + CONVERGENCE_SECONDS
        while True:
            found = leaks(collect(self._cluster, workload.DRIVERS, workload.SPACE), expected)
            if not any(found.values()) or time.monotonic() > until:
                return found
            time.sleep(1)

    def _line(self, counts: Mapping[str, int], *, running: int, seconds: float) -> str:
        wanted = len([each for each in workload.deployments() if each["kind"] == "Deployment"])
        facts = {
            "seed": self._seed,
            "minutes": f"{self._minutes:g}",
            "faults": self._faults.total(),
            **{kind: self._faults[kind] for kind in KINDS},
            "pods": f"{running}/{wanted * workload.REPLICAS}",
            "convergence_seconds": f"{seconds:.0f}",
            "leaks": sum(counts.values()),
            **counts,
        }
        return "chaos " + " ".join(f"{key}={value}" for key, value in facts.items())

    def _report(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)


def _sentences(found: Mapping[str, Sequence[str]]) -> list[str]:
    return [sentence for sentences in found.values() for sentence in sentences]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


if __name__ == "__main__":
    sys.exit(main())
