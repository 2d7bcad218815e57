"""Run the rules over every driver that ships, or over some: see the package's docstring."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from drakit.testing.conformance.rules import rules
from drakit.testing.conformance.runner import Outcome, Report, RuleResult, run
from drakit_cli.conformance import print_result
from tests.conformance.shipped import Tested, modules, targets

JOBS = 6
"""Concurrent nodes of all targets. Many of them are idle most of the time."""


def main() -> int:
    arguments = _parser().parse_args()
    # Killed clients abort their requests.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="drakit-modules-") as folder:
        # The node plugin of a kit finds the same modules as this process.
        sys.path[:0] = map(str, modules(Path(folder)))
        chosen = [
            tested
            for tested in targets()
            if not arguments.target or any(part in tested.name for part in arguments.target)
            if tested.chosen or not arguments.quick
        ]
        return asyncio.run(_run_all(chosen, jobs=arguments.jobs))


async def _run_all(chosen: Sequence[Tested], *, jobs: int) -> int:
    began = time.monotonic()
    turns = asyncio.Semaphore(jobs)

    async def run_one(tested: Tested) -> Report:
        def tell(result: RuleResult) -> None:
            if not result.good:
                print(f"{tested.name}:")
                print_result(result)

        only = [rule for rule in rules() if rule.id in tested.only] or None
        report = await run(tested.target, only=only, turns=turns, on_result=tell)
        counts = ", ".join(f"{n} {word}" for word in Outcome if (n := report.count(word)))
        print(f"{tested.name}: {counts}", flush=True)
        return report

    reports = await asyncio.gather(*map(run_one, chosen))
    good = sum(report.good for report in reports)
    checks = sum(len(report.results) for report in reports)
    seconds = time.monotonic() - began
    print(f"{good} of {len(reports)} targets follow the rules: {checks} checks in {seconds:.0f} s")
    return 0 if reports and good == len(reports) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("target", nargs="*", help="run only targets whose names contain this")
    parser.add_argument("--quick", action="store_true", help="run only one driver of each kind")
    parser.add_argument("--jobs", type=int, default=JOBS, help="concurrent nodes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
