"""
Answers of the explainer in random worlds, confirmed by Kubernetes' own allocator: the question that
is made of facts and of the API server's objects must be the one that the scheduler asks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import closing

import pytest

from drakit_explain.cel.allocator import Allocator, Confirmed, Result
from drakit_explain.cel.gates import DEFAULT_GATES
from drakit_explain.cel.helper import Helper
from drakit_explain.model import ClassFacts
from drakit_explain.pending import Explainer, Verdict
from drakit_explain.projection import project_template
from drakit_explain.selectors import bring_up_to_date
from drakit_explain.templates import class_problems, expressions_of, template_problems
from drakit_explain.world import World as Facts
from e2e.images.go import cel_program
from tests.fakes.world import evaluate_for
from tests.oracle.worlds import Body, World, make_cluster
from tests.programs import needs_go

MINOR = "1.37"
WORLDS = 500
API = "/apis/resource.k8s.io/v1"


def facts_of(world: World) -> Facts:
    facts = world.facts()
    facts.use_release(int(MINOR.removeprefix("1.")))
    return facts


def objects_of(world: World) -> dict[str, Body]:
    """The objects by their paths, as the API server has them."""
    objects = {f"{API}/resourceslices/{each['metadata']['name']}": each for each in world.slices}
    objects |= {f"{API}/deviceclasses/{each['metadata']['name']}": each for each in world.classes}
    for each in world.claims:
        metadata = each["metadata"]
        path = f"{API}/namespaces/{metadata['namespace']}/resourceclaims/{metadata['name']}"
        objects[path] = each
    return objects


def confirmed(
    world: World, selectors: Helper, allocator: Allocator
) -> tuple[Verdict, Confirmed | None]:
    """Explain a pod with the claims of a world, and ask the allocator."""
    facts, objects, pod = facts_of(world), objects_of(world), world.pod()
    explainer = Explainer(facts)
    evaluate_for(explainer, facts, pod, selectors)
    explanation = explainer.explain(pod)
    asked = explanation.find_confirmation()
    if asked is None:
        return explanation.verdict, None

    async def read(path: str) -> Body | None:
        return objects.get(path)

    return explanation.verdict, asyncio.run(allocator.confirm(asked, read))


@needs_go
@pytest.mark.timeout(1200)  # the first run builds the allocator
def test_the_allocator_confirms_each_answer_in_random_worlds():
    program = cel_program(MINOR)
    answers: Counter[tuple[Verdict, Result | None]] = Counter()
    refuted: list[str] = []
    with Helper(program) as selectors, closing(Allocator(lambda _: program)) as allocator:
        allocator.use(dict.fromkeys(DEFAULT_GATES[MINOR], True))
        for seed in range(WORLDS):
            verdict, found = confirmed(make_cluster(seed, MINOR), selectors, allocator)
            answers[verdict, found.result if found is not None else None] += 1
            if found is not None and found.result not in (Result.AGREES, Result.UNDECIDED):
                refuted.append(f"seed {seed}: {verdict}: {found}")
    assert refuted == []
    assert answers[Verdict.BLOCKED, Result.AGREES] > WORLDS / 4, answers
    assert answers[Verdict.FITS, Result.AGREES] > WORLDS / 20, answers


def templates_of(world: World) -> list[Body]:
    return [
        {"metadata": {**each["metadata"], "uid": f"t-{number}"}, "spec": {"spec": each["spec"]}}
        for number, each in enumerate(world.claims)
    ]


@needs_go
@pytest.mark.timeout(1200)
def test_the_allocator_confirms_that_templates_and_classes_find_no_devices():
    program = cel_program(MINOR)
    asked: Counter[tuple[str, Result]] = Counter()
    refuted: list[str] = []
    with Helper(program) as selectors, closing(Allocator(lambda _: program)) as allocator:
        allocator.use(dict.fromkeys(DEFAULT_GATES[MINOR], True))
        for seed in range(WORLDS):
            world = make_cluster(seed, MINOR)
            facts, objects = facts_of(world), objects_of(world)
            templates = templates_of(world)
            for each in templates:
                name = f"{each['metadata']['namespace']}/resourceclaimtemplates"
                objects[f"{API}/namespaces/{name}/{each['metadata']['name']}"] = each

            async def read(path: str, objects: dict[str, Body] = objects) -> Body | None:
                return objects.get(path)

            projected = [project_template(each, "v1") for each in templates]
            classes = facts.of(ClassFacts).values()
            texts = [text for each in projected for text in expressions_of(each.requests, facts)]
            texts += [text for each in classes for text in each.selectors]
            slices = [each.slice for each in facts.reachable()]
            bring_up_to_date(facts.selectors, selectors, texts, slices)
            reasons = [r for each in projected for r in template_problems(each, facts)]
            reasons += [r for each in classes for r in class_problems(each, facts)]
            for reason in reasons:
                if (question := reason.find_confirmation()) is None:
                    continue
                found = asyncio.run(allocator.confirm(question, read))
                asked[reason.regarding.kind, found.result] += 1
                if found.result not in (Result.AGREES, Result.UNDECIDED):
                    refuted.append(f"seed {seed}: {reason.text}: {found}")
    assert refuted == []
    assert asked["ResourceClaimTemplate", Result.AGREES] > WORLDS / 10, asked
    assert asked["DeviceClass", Result.AGREES] > 0, asked
