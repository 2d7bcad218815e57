"""Run the crash matrix, or a part of it. See the package's docstring."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from tests.crash.forkserver import ForkServer, fork_server
from tests.crash.matrix import Failure, Matrix, Result, run_scenario
from tests.crash.scenarios import ALL, Scenario, all_scenarios

JOBS = 2
"""Concurrent runs, and concurrent scenarios, so that the end of one scenario leaves no job idle."""


def main() -> None:
    arguments = _parser().parse_args()
    names = {scenario.name for scenario in all_scenarios()}
    if unknown := set(arguments.scenario or ()) - names:
        sys.exit(
            f"unknown scenario: {', '.join(sorted(unknown))}; the scenarios are {sorted(names)}"
        )
    scenarios = [
        scenario
        for scenario in all_scenarios()
        if not arguments.scenario or scenario.name in arguments.scenario
    ]
    if count := arguments.variants:
        scenarios = [replace(scenario, variants_per_point=count) for scenario in scenarios]
    # Killed clients abort their requests.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    sys.exit(asyncio.run(_run_all(scenarios, arguments)))


async def _run_all(scenarios: Sequence[Scenario], arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    async with fork_server() as server:
        if arguments.list:
            return await _list(server, scenarios)
        matrix = Matrix(server, jobs=arguments.jobs)
        slots = asyncio.Semaphore(arguments.jobs)

        async def run_one(scenario: Scenario) -> Result:
            async with slots:
                result = await run_scenario(
                    matrix, scenario, wanted=arguments.point, variant=arguments.variant
                )
            _print_result(result)
            return result

        results = await asyncio.gather(*(run_one(scenario) for scenario in scenarios))
    points = [point for result in results for point in result.points]
    failures = [failure for result in results for failure in result.failures]
    failed = {failure.point for failure in failures}
    survived = sum(point not in failed for point in points)
    leaks = sum(failure.kind == "leak" for failure in failures)
    seconds = time.monotonic() - began
    # At the end, because who reads a long log reads its last lines first.
    for failure in failures:
        _print_failure(failure, log=arguments.point is not None)
    _print(f"scenarios={len(results)} runs={matrix.runs} seconds={seconds:.0f}")
    _print(f"points={len(points)} survived={survived} leaks={leaks}")
    return 0 if points and not failures else 1


async def _list(server: ForkServer, scenarios: Sequence[Scenario]) -> int:
    matrix = Matrix(server, jobs=1)
    for scenario in scenarios:
        async with matrix.prepared_node(scenario) as node:
            for point in await matrix.find_points(scenario, node):
                _print(f"{point.scenario}: {point.label}")
    return 0


def _print_result(result: Result) -> None:
    failed = len({failure.point for failure in result.failures})
    _print(
        f"{result.scenario:<26} points={len(result.points)} failed={failed} "
        f"seconds={result.seconds:.1f}"
    )


def _print_failure(failure: Failure, *, log: bool) -> None:
    point = failure.point
    _print(
        f"{failure.kind}: {point.scenario}, {point.label}, then {failure.variant}: {failure.text}"
    )
    if log:
        _print("".join(f"    {line}\n" for line in failure.log.splitlines()))
    else:
        _print(
            f"    python -m tests.crash --scenario {point.scenario} --point '{point.label}' "
            f"--variant {failure.variant}"
        )


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--scenario", action="append", help="run only this scenario (repeatable)")
    parser.add_argument(
        "--point", help="run only points whose label contains this; failures show logs"
    )
    parser.add_argument("--variant", choices=ALL, help="run only this variant, at each point")
    parser.add_argument(
        "--variants",
        type=int,
        choices=range(1, len(ALL) + 1),
        help="the number of variants at each point, in turn; default: as the scenario says",
    )
    parser.add_argument("--jobs", type=int, default=JOBS, help="concurrent runs")
    parser.add_argument("--list", action="store_true", help="list the points and exit")
    return parser


if __name__ == "__main__":
    main()
