"""`python -m tests.oracle`: random worlds against the scheduler's allocator; exit code 1 if one
disagrees."""

from __future__ import annotations

import argparse
import sys
import time

from e2e.images.go import CEL_MINORS, cel_program
from tests.oracle.run import compare_all


def main() -> int:
    arguments = _parser().parse_args()
    seeds = range(arguments.first, arguments.first + arguments.worlds)
    program = cel_program(arguments.kubernetes)
    started = time.monotonic()
    tally = compare_all(
        seeds,
        program=program,
        minor=arguments.kubernetes,
        processes=arguments.processes,
    )
    print(f"Kubernetes {arguments.kubernetes}:")
    for line in tally.lines():
        print(line)
    print(f"{time.monotonic() - started:.1f} s")
    return 0 if tally.good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("--worlds", type=int, default=20_000, help="number of worlds")
    parser.add_argument("--first", type=int, default=0, help="the first world's seed")
    parser.add_argument("--processes", type=int, help="processes; by default one a core")
    parser.add_argument(
        "--kubernetes",
        choices=CEL_MINORS,
        default=CEL_MINORS[-1],
        help="minor release of the allocator; by default the newest",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
