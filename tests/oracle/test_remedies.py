"""Remedies that an explanation names, applied: the scheduler's allocator must then allocate."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from drakit_explain.cel.helper import Helper
from drakit_explain.pending import Explainer
from drakit_explain.verdicts import VerdictOutcome
from e2e.images.go import cel_program
from tests.fakes.world import ask_allocator, evaluate_for
from tests.oracle.worlds import NEWEST, Body, World, make_world
from tests.programs import needs_go

WORLDS = 1_000

_REQUEST = r'request "(?P<request>[^"]+)"(?: of claim "(?P<claim>[^"]+)")? '
_RELEASED = re.compile(r"if claim (?P<namespace>[^/ ]+)/(?P<name>\S+) \([^)]*\) released")
_TOLERATED = re.compile(rf"if {_REQUEST}tolerated the taints? (?P<taints>.+?)(?:, or if|$)")
_COUNT = re.compile(rf"if {_REQUEST}asked for (?P<count>\d+) instead")
_UNCONSTRAINED = re.compile(r"if there were no constraints")


def _exact(world: World, found: re.Match[str]) -> Body:
    """The exact request, or alternative, that a remedy names."""
    (claim,) = (
        each
        for each in world.claims
        if found["claim"] in (None, each["metadata"]["name"]) or len(world.claims) == 1
    )
    name, _, alternative = found["request"].partition("/")
    (request,) = (each for each in claim["spec"]["devices"]["requests"] if each["name"] == name)
    if not alternative:
        return request["exactly"]
    return next(each for each in request["firstAvailable"] if each["name"] == alternative)


def _released(world: World, found: re.Match[str]) -> None:
    kept = [each for each in world.allocated if each["metadata"]["name"] != found["name"]]
    assert len(kept) == len(world.allocated) - 1
    world.allocated[:] = kept


def _tolerated(world: World, found: re.Match[str]) -> None:
    exact = _exact(world, found)
    for taint in found["taints"].split(", "):
        key, _, effect = taint.rpartition(":")
        added = {"key": key, "operator": "Exists", "effect": effect}
        exact["tolerations"] = [*exact.get("tolerations", ()), added]


def _counted(world: World, found: re.Match[str]) -> None:
    _exact(world, found).update(allocationMode="ExactCount", count=int(found["count"]))


def _unconstrained(world: World, _: re.Match[str]) -> None:
    for claim in world.claims:
        claim["spec"]["devices"].pop("constraints", None)


REMEDIES: dict[re.Pattern[str], Callable[[World, re.Match[str]], None]] = {
    _RELEASED: _released,
    _TOLERATED: _tolerated,
    _COUNT: _counted,
    _UNCONSTRAINED: _unconstrained,
}


def _remedy(world: World, helper: Helper) -> str:
    facts, pod = world.facts(), world.pod()
    explainer = Explainer(facts, name_all_holders=True)
    evaluate_for(explainer, facts, pod, helper)
    return explainer.explain_now(pod, ask_allocator).remedy


def _applied(world: World, remedy: str) -> Iterator[tuple[str, World]]:
    """The world after each remedy that can be applied to its objects, and the remedy."""
    for pattern, apply in REMEDIES.items():
        found = pattern.search(remedy)
        if found is not None:
            changed = copy.deepcopy(world)
            apply(changed, found)
            yield apply.__name__, changed


@needs_go
@pytest.mark.timeout(1200)  # the first run builds the allocators
def test_the_allocator_allocates_after_each_remedy():
    tried: Counter[str] = Counter()
    refused: list[str] = []
    with Helper(cel_program(NEWEST)) as helper:
        for seed in range(WORLDS):
            world = make_world(seed)
            remedy = _remedy(world, helper)
            for kind, changed in _applied(world, remedy):
                tried[kind] += 1
                (verdict,) = changed.verdicts(helper)
                if verdict.outcome is not VerdictOutcome.ALLOCATED:
                    refused.append(f"seed {seed}, {kind}: {remedy}: {verdict}")
    assert refused == []
    # Too few remedies would show nothing.
    assert all(tried[each.__name__] >= 5 for each in REMEDIES.values()), tried
