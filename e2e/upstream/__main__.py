"""
`python -m e2e.upstream`: runs Kubernetes' own tests of DRA with drakit installed, and with drakit
as the driver.

The exit code is 1 if a spec failed without a note in :mod:`.table`, if drakit wrote an unexpected
Event, if its operator logged a warning, or if one of its pods restarted.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter

from e2e.cluster.api import ClusterError
from e2e.cluster.choice import REPOSITORY
from e2e.cluster.choice import cluster as choose_cluster
from e2e.cluster.local.names import default_cluster
from e2e.images.cache import ImageError
from e2e.images.go import DEFAULT_MINOR

from .events import unexpected
from .program import minors, programs
from .run import FAULTS, KUBELET, PARTS, QUICK, Fault, PartResult, parts_of, prepared, run_part
from .table import keep, note_of

RESULTS = REPOSITORY / "build" / "upstream"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.upstream", description=__doc__)
    parser.add_argument("--kubernetes", default=DEFAULT_MINOR, help=", ".join(minors()))
    parser.add_argument("--focus", default="", help="a regular expression for names of specs")
    parser.add_argument("--quick", action="store_true", help="only the specs of `make test`")
    parser.add_argument("--part", choices=[part.name for part in PARTS], help="only this part")
    parser.add_argument(
        "--faults", action="store_true", help="also check that specs find faults of the node plugin"
    )
    parser.add_argument("--record", action="store_true", help="store the results for the docs")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    arguments = parser.parse_args()
    focus: str = "|".join(QUICK) if arguments.quick else arguments.focus
    if arguments.record and (arguments.part or focus):
        parser.error("--record needs all specs: omit --part, --focus and --quick")
    name = os.environ.get("CLUSTER_NAME") or f"{default_cluster(REPOSITORY)}-upstream"
    folder = RESULTS / arguments.kubernetes
    try:
        built = programs(arguments.kubernetes)
        cluster = choose_cluster(name, minor=arguments.kubernetes)
        try:
            prepared(cluster, built, kept=arguments.keep)
            outcomes = {
                part.name: run_part(cluster, built, part, folder / part.name, focus=focus)
                for part in parts_of(cluster)
                if arguments.part in (None, part.name) and not (part.on_node and arguments.quick)
            }
            found = {
                fault: run_part(
                    *(cluster, built, KUBELET, folder / fault.name),
                    focus=fault.spec,
                    fault=fault.name,
                )
                for fault in (FAULTS if arguments.faults else ())
            }
        finally:
            if not arguments.keep:
                cluster.stop()
    except (ClusterError, ImageError) as error:
        sys.exit(f"make upstream-e2e: {error}")
    if arguments.record:
        keep(arguments.kubernetes, {name: each.specs for name, each in outcomes.items()})
    good = [report(arguments.kubernetes, name, outcome) for name, outcome in outcomes.items()]
    passed = [spec for each in outcomes.values() for spec in each.specs if spec.state == "passed"]
    for pattern in QUICK if arguments.quick else [focus]:
        if not any(re.search(pattern, spec.name) for spec in passed):
            print(f"no spec of this name passed: {pattern!r}")
            good.append(False)
    good += [report_fault(fault, outcome) for fault, outcome in found.items()]
    print(f"the results are in {folder}")
    return 0 if all(good) else 1


def report(minor: str, part: str, outcome: PartResult) -> bool:
    """Print the results of a part, and return whether all of them are good."""
    for spec in outcome.specs:
        if spec.ran:
            print(f"{spec.state:8} {spec.seconds:6.1f} s  {spec.name}")
            for line in spec.failure.splitlines()[:20]:
                print(f"{'':19}{line}")
    wrong = unexpected(outcome.events, outcome.specs)
    for event in wrong:
        about = f"{event.kind} {event.namespace}/{event.name}"
        print(f"unexpected Event {event.reason} about {about} in {event.spec!r}: {event.note}")
    for line in outcome.complaints:
        print(f"drakit complains: {line}")
    ran = [spec for spec in outcome.specs if spec.ran]
    states = Counter(spec.state for spec in ran)
    numbers = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    print(f"{part}: {numbers}; Events of drakit: {len(outcome.events)}, unexpected: {len(wrong)}")
    bad = [s for s in ran if s.state != "passed" and note_of(minor, s.name) is None]
    return not (bad or wrong or outcome.complaints)


def report_fault(fault: Fault, outcome: PartResult) -> bool:
    """Print whether each of the specs detected the fault as expected, and return that."""
    ran = [spec for spec in outcome.specs if spec.ran]
    found = [spec for spec in ran if spec.state == "failed" and fault.failure in spec.failure]
    print(f"fault {fault.name}: found by {len(found)} of {len(ran)} specs")
    return bool(ran) and len(found) == len(ran)


if __name__ == "__main__":
    sys.exit(main())
