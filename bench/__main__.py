"""
Runs all measurements against a real API server (only the control plane): `python -m bench`.

Prints the machine and one line per row. Exits with 1 if a budget is exceeded, and names it.
docs/contributors/performance.md explains the measurements and their purpose.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Collection, Iterator

from bench.apiserver import ApiServer, connected
from bench.claims import FULL, QUICK, Bench, Plan
from bench.cost import footprint, measure_cost
from bench.fleet import measure_fleet
from bench.hops import measure_hops
from bench.kinds import measure_kinds
from bench.machine import describe
from bench.operator import measure_operator
from bench.rows import Row
from bench.slices import measure_slices
from e2e.cluster.api import Cluster, Options
from e2e.cluster.choice import cluster as find_cluster

CLAIMS = ("cost", "times", "pods")
PARTS = ("hops", "footprint", "slices", "fleet", "kinds", "operator", *CLAIMS)


def main() -> None:
    arguments = _parser().parse_args()
    began = time.monotonic()
    plan = QUICK if arguments.quick else FULL
    missed: list[str] = []
    print(describe(), flush=True)
    cluster = find_cluster(os.environ.get("CLUSTER_NAME", "bench"))
    cluster.start(Options(nodes=0))
    try:
        with connected(cluster.kubeconfig) as api:
            api.create_node()
            for row in _measure(arguments.only, plan, api=api, cluster=cluster):
                print(row.line(), flush=True)
                missed += row.missed()
    finally:
        cluster.stop()
    print(f"took {(time.monotonic() - began) / 60:.1f} min")
    for sentence in missed:
        print(f"budget missed: {sentence}", file=sys.stderr)
    sys.exit(1 if missed else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything, two minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
    return parser


def _measure(
    parts: Collection[str], plan: Plan, *, api: ApiServer, cluster: Cluster
) -> Iterator[Row]:
    """Yield each row as soon as it is known."""
    kubeconfig = cluster.kubeconfig
    if "hops" in parts:
        yield from (row for row, _ in measure_hops())
    if "footprint" in parts:
        yield footprint(kubeconfig, idle_seconds=plan.idle_seconds)
    if "slices" in parts:
        yield from measure_slices(api, kubeconfig, changes=plan.changes)
    if "fleet" in parts:
        yield from measure_fleet(api, cluster)
    if "kinds" in parts:
        yield from measure_kinds(api, kubeconfig, repetitions=plan.repetitions[1])
    if "operator" in parts:
        yield from measure_operator(api, cluster)
    if set(parts).isdisjoint(CLAIMS):
        return
    bench = Bench(plan, api=api, kubeconfig=kubeconfig)
    if "cost" in parts:
        yield from measure_cost(
            bench.measured, bench.others, kubeconfig=kubeconfig, repetitions=plan.repetitions
        )
    if "times" in parts:
        yield from bench.times()
    if "pods" in parts:
        yield from bench.pods()


if __name__ == "__main__":
    main()
