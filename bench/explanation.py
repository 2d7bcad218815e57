"""
One explanation over 10,000 devices, in this process: the engine without API server and queue.

The world is a part of the operator's scene. Each of its selectors is measured: the first time its
helper compiles and evaluates it, then a slice and the holder of a device change before each
explanation, so that nothing that depends on them is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.rows import Row, median_ms
from bench.scene import Scene
from drakit.cel.helper import Helper
from drakit.explain.core_projection import project_node, project_pod
from drakit.explain.model import PodFacts
from drakit.explain.pending import Explainer, Verdict
from drakit.explain.projection import project_claim, project_class, project_slice
from drakit.explain.selectors import Selectors, bring_up_to_date
from drakit.explain.world import Fact, World
from e2e.images.go import cel_program

__all__ = ("measure_explanation",)

SLICES = 90
ROUNDS = 5
BUDGET_MS = 100.0
"""Budget of an explanation after a slice has changed."""


def measure_explanation() -> Row:
    """Return the row."""
    scene = Scene(slices=SLICES, claims=SLICES * 5 + 30, pods=30)
    world = World()
    for fact in _facts(scene):
        world.apply(fact)
    explainer = Explainer(world)
    again: list[float] = []
    with Helper(cel_program()) as helper:
        helper.reads(["true"])  # its start, once for all pods
        pods = list(world.of(PodFacts).values())
        first = [_explain(pod, explainer, world, helper) for pod in pods]
        for number in range(ROUNDS):
            for pod in pods:
                body = scene.slice_body(number, generation=number + 2)
                world.apply(project_slice(_complete(body)))
                again.append(_explain(pod, explainer, world, helper))
    return Row(
        f"operator-explanation devices={SLICES * scene.devices}",
        {
            "first_ms": max(first) * 1000,
            "p50_ms": median_ms(again),
            "max_ms": max(again) * 1000,
        },
        at_most={"max_ms": BUDGET_MS},
    )


def _facts(scene: Scene) -> Iterator[Fact]:
    """Yield the facts of a scene, as they are after all lists."""
    yield project_class(_complete(scene.class_body()))
    yield from (project_node(_complete(body)) for body in scene.node_bodies())
    yield from (project_slice(_complete(body)) for body in scene.slice_bodies())
    for body, status in scene.allocated_claims():
        yield project_claim(_complete({**body, "status": status}))
    yield from (project_claim(_complete(body)) for body in scene.pending_claim_bodies())
    for body in scene.pod_bodies():
        yield project_pod(_complete({**body, "status": {"phase": "Pending"}}))


def _complete(body: dict[str, object]) -> dict[str, object]:
    """Add what the API server adds."""
    metadata = body["metadata"]
    assert isinstance(metadata, dict)
    return {**body, "metadata": {**metadata, "uid": f"uid-{metadata['name']}"}}


def _explain(pod: PodFacts, explainer: Explainer, world: World, selectors: Selectors) -> float:
    began = time.perf_counter()
    slices = [each.slice for each in world.reachable()]
    bring_up_to_date(world.selectors, selectors, explainer.expressions(pod), slices)
    explanation = explainer.explain(pod)
    explanation.find_remedy()
    seconds = time.perf_counter() - began
    if explanation.verdict is not Verdict.BLOCKED:
        raise SystemExit(f"{pod.name} is {explanation.verdict}: {explanation.unknown}")
    return seconds
