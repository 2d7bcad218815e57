"""
`python -m e2e.upstream`: run Kubernetes' own tests of DRA beside drakit.

The exit code is 1 if a spec failed, if drakit wrote an Event that is not expected, if its operator
logged a warning, or if one of its pods was restarted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

from e2e.cluster.api import ClusterError
from e2e.cluster.choice import REPOSITORY
from e2e.cluster.choice import cluster as choose_cluster
from e2e.cluster.local.names import default_cluster
from e2e.images.cache import ImageError

from .events import unexpected
from .program import DEFAULT_MINOR, minors, programs
from .run import NO_DRIVER, Outcome, prepared, run_suite

RESULTS = REPOSITORY / "build" / "upstream"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.upstream", description=__doc__)
    parser.add_argument("--kubernetes", default=DEFAULT_MINOR, help=", ".join(minors()))
    parser.add_argument("--focus", default="", help="a regular expression for names of specs")
    parser.add_argument("--labels", default=NO_DRIVER, help="Ginkgo's label filter")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    arguments = parser.parse_args()
    name = os.environ.get("CLUSTER_NAME") or f"{default_cluster(REPOSITORY)}-upstream"
    folder = RESULTS / arguments.kubernetes
    try:
        built = programs(arguments.kubernetes)
        cluster = choose_cluster(name)
        try:
            prepared(cluster, built, kept=arguments.keep)
            outcome = run_suite(
                cluster, built, folder, labels=arguments.labels, focus=arguments.focus
            )
        finally:
            if not arguments.keep:
                cluster.stop()
    except (ClusterError, ImageError) as error:
        sys.exit(f"make upstream-e2e: {error}")
    good = report(outcome)
    print(f"the results are in {folder}")
    return 0 if good else 1


def report(outcome: Outcome) -> bool:
    """Print what was found; return whether all of it is good."""
    for spec in outcome.specs:
        if spec.state != "skipped":
            print(f"{spec.state:8} {spec.seconds:6.1f} s  {spec.name}")
            for line in spec.failure.splitlines()[:20]:
                print(f"{'':19}{line}")
    wrong = unexpected(outcome.events)
    for event in wrong:
        about = f"{event.kind} {event.namespace}/{event.name}"
        print(f"unexpected Event {event.reason} about {about} in {event.spec!r}: {event.note}")
    for line in outcome.complaints:
        print(f"drakit complains: {line}")
    states = Counter(spec.state for spec in outcome.specs)
    numbers = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    print(f"specs: {numbers}; Events of drakit: {len(outcome.events)}, unexpected: {len(wrong)}")
    bad = set(states) - {"passed", "skipped"}
    return bool(states["passed"]) and not (bad or wrong or outcome.complaints)


if __name__ == "__main__":
    sys.exit(main())
