"""
`python -m tests.oracle.tables`: compares the tables of Kubernetes' own allocator tests with the
helper of each minor release, for the objects of a case and for the explainer's form of them.

The exit code is 1 if a verdict differs, or if `selectors.json` is outdated. `--write` writes that
file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from drakit_explain.allocation import AskedClaim
from drakit_explain.budget import Budget
from drakit_explain.cel.helper import Helper
from drakit_explain.projection import project_claim, project_class, project_node, project_slice
from drakit_explain.queries import Verdicts
from drakit_explain.selectors import FeatureGates
from drakit_explain.verdicts import Verdict, VerdictOutcome
from drakit_explain.world import World
from e2e.images.go import cel_program
from tests.oracle.dumps import SELECTORS, VERSIONS, allocations, selectors

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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.tables", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write selectors.json, and end")
    if parser.parse_args().write:
        SELECTORS.write_text(selectors())
        return 0
    problems: list[str] = []
    for minor in VERSIONS:
        with Helper(cel_program(minor)) as helper:
            problems += table_problems(minor, helper)
    if SELECTORS.read_text() != selectors():
        problems.append(f"{SELECTORS.name} is outdated: run python -m tests.oracle.tables --write")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def table_problems(minor: str, helper: Helper) -> list[str]:
    """Compare the verdicts of the helper of a minor release with the table of that release."""
    problems: list[str] = []
    cases = {
        name: body
        for name, body in allocations(minor).items()
        if is_reachable(minor, body["features"])
    }
    for name, body in cases.items():
        for what, question in (("objects", question_of(body)), ("facts", of_facts(body, helper))):
            (verdict,) = helper.verdicts(question, nodes=1)
            if answer_of(verdict) != body["answer"]:
                problems.append(
                    f"{minor} {name}, {what}: the helper's verdict is {verdict}, upstream's is "
                    f"{body['answer']!r}"
                )
    print(f"Kubernetes {minor}: {len(cases)} cases, {len(problems)} different", flush=True)
    return problems


def answer_of(verdict: Verdict) -> str:
    """Return a verdict in the words of a table. Any error of the allocator is a failure."""
    match verdict.outcome:
        case VerdictOutcome.ALLOCATED:
            return "fits"
        case VerdictOutcome.UNAVAILABLE:
            return "failed" if verdict.text else "no fit"
        case VerdictOutcome.FATAL:
            return "failed"
        case VerdictOutcome.UNDECIDED:
            return "undecided"


def is_reachable(minor: str, features: Mapping[str, bool]) -> bool:
    """Return whether a scheduler can have these features of the allocator: 1.36 never turns on
    list attributes."""
    return minor != "1.36" or not features["ListTypeAttributes"]


def gates_of(body: Mapping[str, Any]) -> dict[str, bool]:
    """Return the feature gates of a case."""
    on = [feature for feature, is_on in body["features"].items() if is_on]
    return {gate: True for feature in on for gate in GATES_OF_FEATURES[feature]}


def question_of(body: Mapping[str, Any]) -> bytes:
    """Return the question of a case to the helper."""
    named = {name: body[name] or () for name in ("claims", "classes", "slices")}
    question = {"nodes": [body["node"]], "inUse": body["allocated"], "gates": gates_of(body)}
    return orjson.dumps(question | named)


def of_facts(body: Mapping[str, Any], helper: Helper) -> bytes:
    """Return the question that the explainer asks about a case."""
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
    found = [project_claim(_with_uid(each, n)) for n, each in enumerate(body["claims"] or ())]
    claims = [AskedClaim(requests=each.requests, constraints=each.constraints) for each in found]
    (node,) = world.views()
    question = Verdicts(world).query(claims, node, Budget()).body
    return question[:-1] + b',"gates":' + orjson.dumps(gates_of(body)) + b"}"


def _with_uid(body: dict[str, Any], number: int) -> dict[str, Any]:
    """Return an object as an API server would: in upstream's tables, names can repeat."""
    metadata = body["metadata"]
    name = f"{metadata['name']}-{number}" if body.get("spec", {}).get("pool") else metadata["name"]
    return {**body, "metadata": {**metadata, "name": name, "uid": name}}


if __name__ == "__main__":
    sys.exit(main())
