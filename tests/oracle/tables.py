"""
`python -m tests.oracle.tables`: our search beside the tables of Kubernetes' own allocator tests,
with the selectors evaluated by the helper of each minor release.

The exit code is 1 if an answer differs that `differences.toml` does not list, if a listed one no
longer differs, or if `selectors.json` is outdated; `--write` writes that file. It is also 1 if the
helper of a minor release gives another verdict than the table of that release.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from drakit_explain.allocation import Outcome, SearchedClaim
from drakit_explain.budget import Budget
from drakit_explain.cel.helper import Helper
from drakit_explain.pending_claims import exact_requests
from drakit_explain.pools import pools_of_node
from drakit_explain.projection import project_claim, project_class, project_node, project_slice
from drakit_explain.release import rules_of
from drakit_explain.search import allocate
from drakit_explain.selectors import FeatureGates, bring_up_to_date
from drakit_explain.verdicts import VerdictQuestion
from drakit_explain.world import World
from e2e.images.go import cel_program
from tests.oracle.compare import theirs_of
from tests.oracle.dumps import SELECTORS, VERSIONS, allocations, selectors

DIFFERENCES = Path(__file__).with_name("differences.toml")

MAX_UNDECIDED: Mapping[str, int] = {"1.34": 3, "1.35": 3, "1.36": 19, "1.37": 43}
"""Cases that our search may leave undecided. A number may only get smaller."""


GATES_OF_FEATURES: Mapping[str, Sequence[str]] = {
    "AdminAccess": ["DRAAdminAccess"],
    "CompatibilityGroups": ["DRADeviceCompatibilityGroups"],
    "ConsumableCapacity": ["DRAConsumableCapacity"],
    "DerivedAttributes": ["DRADerivedAttributes"],
    "DeviceBinding": ["DRADeviceBindingConditions"],
    "DeviceBindingAndStatus": ["DRADeviceBindingConditions", "DRAResourceClaimDeviceStatus"],
    "DeviceStatus": ["DRAResourceClaimDeviceStatus"],
    "DeviceTaints": ["DRADeviceTaints"],
    "FractionalCapacityRange": ["DRAFractionalCapacityRange"],
    "ListTypeAttributes": ["DRAListTypeAttributes"],
    "OptionalNodeOperations": ["DRAOptionalNodeOperations"],
    "PartitionableDevices": ["DRAPartitionableDevices"],
    "PrioritizedList": ["DRAPrioritizedList"],
}
"""The feature gates that turn on a feature of the allocator, in the scheduler of any release."""


class Case(NamedTuple):
    """A case of a table, by its names."""

    minor: str
    name: str


class Answers(NamedTuple):
    """What our search and upstream's table answer."""

    ours: Outcome
    upstream: Outcome

    @property
    def differ(self) -> bool:
        return self.ours not in (self.upstream, Outcome.UNDECIDED)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.tables", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write selectors.json, and end")
    if parser.parse_args().write:
        SELECTORS.write_text(selectors())
        return 0
    answers: dict[Case, Answers] = {}
    undecided: list[str] = []
    wrong: list[str] = []
    for minor in VERSIONS:
        with Helper(cel_program(minor)) as helper:
            found = {
                Case(minor, name): Answers(
                    search_case(body, helper, minor), Outcome(body["answer"])
                )
                for name, body in allocations(minor).items()
            }
            print(f"Kubernetes {minor}: {counts(found)}", flush=True)
            answers |= found
            wrong += verdict_problems(minor, helper)
            if (problem := undecided_problem(minor, found)) is not None:
                undecided.append(problem)
    problems = (
        wrong + undecided + list(judge(answers, listed(tomllib.loads(DIFFERENCES.read_text()))))
    )
    if SELECTORS.read_text() != selectors():
        problems.append(f"{SELECTORS.name} is outdated: run python -m tests.oracle.tables --write")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def verdict_problems(minor: str, helper: Helper) -> list[str]:
    """Compare the verdicts of the helper of a minor release with the table of that release."""
    problems: list[str] = []
    count = 0
    for name, body in allocations(minor).items():
        if not is_reachable(minor, body["features"]):
            continue
        count += 1
        (verdict,) = helper.verdicts(verdict_question(body))
        if theirs_of(verdict) is not Outcome(body["answer"]):
            problems.append(
                f"{minor} {name}: the helper's verdict is {verdict}, "
                f"upstream's is {body['answer']!r}"
            )
    print(f"Kubernetes {minor}: {count} verdicts, {len(problems)} different", flush=True)
    return problems


def is_reachable(minor: str, features: Mapping[str, bool]) -> bool:
    """Return whether a scheduler can have these features of the allocator: 1.36 never turns on
    list attributes."""
    return minor != "1.36" or not features["ListTypeAttributes"]


def verdict_question(body: Mapping[str, Any]) -> VerdictQuestion:
    """Return the question of a case to the helper."""
    return VerdictQuestion(
        nodes=[body["node"]],
        claims=body["claims"] or (),
        classes=body["classes"] or (),
        slices=body["slices"] or (),
        in_use=body["allocated"],
        gates={
            gate: True
            for feature, on in body["features"].items()
            if on
            for gate in GATES_OF_FEATURES[feature]
        },
    )


def search_case(body: Mapping[str, Any], helper: Helper, minor: str) -> Outcome:
    """Ask our search about a case."""
    features = body["features"]
    helper.use(
        FeatureGates(
            consumable_capacity=features["ConsumableCapacity"],
            list_attributes=features.get("ListTypeAttributes", False),
        )
    )
    results = {"allocation": {"devices": {"results": body["allocated"]}}}
    world = World()
    for project, bodies in (
        (project_node, [body["node"]]),
        (project_class, body["classes"]),
        (project_slice, body["slices"]),
        (project_claim, [{"metadata": {"name": "held"}, "status": results}]),
    ):
        for number, each in enumerate(bodies or ()):
            world.apply(project(_with_uid(each, number)))
    claims = [project_claim(_with_uid(each, n)) for n, each in enumerate(body["claims"] or ())]
    exact = [
        each
        for claim in claims
        for request in claim.requests
        for _, each in exact_requests(request)
    ]
    expressions = {text for each in exact for _, text in world.expressions(each) if text}
    bring_up_to_date(world.selectors, helper, expressions, world.slices())
    (view,) = world.views().values()
    rules = rules_of(int(minor.removeprefix("1.")))
    return allocate(
        [
            SearchedClaim(name=c.name, requests=c.requests, constraints=c.constraints)
            for c in claims
        ],
        pools_of_node(world.slices(), view, rules=rules),
        allocated=world,
        selections=world,
        budget=Budget(),
        rules=rules,
    ).outcome


def _with_uid(body: dict[str, Any], number: int) -> dict[str, Any]:
    """Return an object as an API server would: in upstream's tables, names can repeat."""
    metadata = body["metadata"]
    name = f"{metadata['name']}-{number}" if body.get("spec", {}).get("pool") else metadata["name"]
    return {**body, "metadata": {**metadata, "name": name, "uid": name}}


def counts(answers: Mapping[Case, Answers]) -> str:
    """Return the numbers of cases as a clause."""
    kinds = Counter(
        "different" if each.differ else "undecided" if each.ours is Outcome.UNDECIDED else "agree"
        for each in answers.values()
    )
    parts = [f"{kinds[kind]} {kind}" for kind in ("agree", "undecided", "different")]
    return f"{len(answers)} cases, {', '.join(parts)}"


def listed(document: Mapping[str, Any]) -> dict[Case, Answers]:
    """Read the list of differences; raise KeyError for an entry without a reason."""
    found: dict[Case, Answers] = {}
    for entry in document["difference"]:
        if not entry["reason"]:
            raise KeyError("reason")
        answers = Answers(Outcome(entry["ours"]), Outcome(entry["upstream"]))
        found |= {Case(minor, entry["case"]): answers for minor in entry["minors"]}
    return found


def undecided_problem(minor: str, answers: Mapping[Case, Answers]) -> str | None:
    """Return a problem if the number of undecided cases of a release has grown, or shrunk."""
    number = sum(each.ours is Outcome.UNDECIDED for each in answers.values())
    if number == MAX_UNDECIDED[minor]:
        return None
    return f"{minor}: {number} cases are undecided, and MAX_UNDECIDED is {MAX_UNDECIDED[minor]}"


def judge(answers: Mapping[Case, Answers], known: Mapping[Case, Answers]) -> Iterator[str]:
    """Compare the answers with the list of differences; return a sentence for each problem."""
    for case, found in answers.items():
        name, expected = f"{case.minor} {case.name}", known.get(case)
        both = f"ours is {found.ours.value!r}, upstream's is {found.upstream.value!r}"
        if not found.differ:
            if expected is not None:
                yield f"{name}: it no longer differs, so remove it from {DIFFERENCES.name}"
        elif expected is None:
            yield f"{name}: {both}, and {DIFFERENCES.name} does not list it"
        elif found != expected:
            yield f"{name}: {both}, but {DIFFERENCES.name} lists other answers"
    for case in known.keys() - answers.keys():
        yield f"{case.minor} {case.name}: there is no such case, so remove it"


if __name__ == "__main__":
    sys.exit(main())
