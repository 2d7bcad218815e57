"""Worlds of facts for tests of explanations, with selectors evaluated by the Python library, and
Kubernetes' allocators, built from this checkout."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from drakit_explain.cel.allocator import Allocator
from drakit_explain.cel.gates import DEFAULT_GATES
from drakit_explain.cel.library import Library
from drakit_explain.devices import AttributeFact, CapacityFacts, DeviceFacts, DeviceKind, Place
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    Constraint,
    Consumer,
    DeviceID,
    NodeFacts,
    PodClaim,
    PodFacts,
    Request,
    SliceFacts,
)
from drakit_explain.pending import Explainer, Explanation
from drakit_explain.queries import Query
from drakit_explain.selectors import Selectors, bring_up_to_date
from drakit_explain.verdicts import Verdict
from drakit_explain.world import Fact, World
from e2e.images.go import cel_program


def device(
    name: str,
    *,
    attributes: dict[str, AttributeFact] | None = None,
    capacity: Iterable[CapacityFacts] = (),
    shareable: bool = False,
    **facts: object,
) -> DeviceFacts:
    """A device as `projection` would make it."""
    given = attributes or {}
    kind = DeviceKind(attributes=tuple(given), capacity=tuple(capacity), shareable=shareable)
    return DeviceFacts(name=name, kind=kind, values=tuple(given.values()), **facts)  # pyright: ignore[reportArgumentType]


def node(name: str, **facts: object) -> NodeFacts:
    """A node without labels and taints, unless they are given."""
    return NodeFacts(**{"name": name, "uid": name, "labels": {}} | facts)  # pyright: ignore[reportArgumentType]


def on(name: str) -> Place:
    """The place of a slice of one node."""
    return Place(node=name)


ANY = ClassFacts(name="any", uid="c")
"""A class of all devices."""

POD = PodFacts(namespace="lab", name="train", uid="p", claims=(PodClaim(name="c", claim="mine"),))
"""A pod that waits for `claim()`."""


def request(name: str = "r", **changes: object) -> Request:
    """A request for a device of the class `ANY`."""
    return Request(**{"name": name, "device_class": "any"} | changes)  # pyright: ignore[reportArgumentType]


def claim(
    *requests: Request, constraints: Iterable[Constraint] = (), name: str = "mine"
) -> ClaimFacts:
    """A claim that is not allocated."""
    return ClaimFacts(
        namespace="lab", name=name, uid=name, requests=requests, constraints=tuple(constraints)
    )


def holding(name: str, *devices: str, pool: str = "n1", namespace: str = "lab") -> ClaimFacts:
    """The claim of a pod with devices of driver `d`."""
    return ClaimFacts(
        namespace=namespace,
        name=name,
        uid=name,
        allocated=True,
        devices=tuple(DeviceID("d", pool, each) for each in devices),
        consumers=(Consumer("pods", f"pod-{name}", f"pod-{name}"),),
    )


def slice_on(place: str, *devices: DeviceFacts) -> SliceFacts:
    """The pool of driver `d` on a node, in one slice."""
    return SliceFacts(
        name=f"s-{place}", uid=place, driver="d", pool=place, place=on(place), devices=devices
    )


def world_of(*facts: Fact) -> World:
    """A world with these facts."""
    world = World()
    for fact in facts:
        world.apply(fact)
    return world


def evaluate_for(explainer: Explainer, world: World, pod: PodFacts, selectors: Selectors) -> None:
    """Evaluate what the explanation of a pod needs."""
    expressions = explainer.expressions(pod)
    bring_up_to_date(world.selectors, selectors, expressions, list(world.slices()))


def explain(pod: PodFacts, world: World, *, name_all_holders: bool = False) -> Explanation:
    """Explain a pod, selectors evaluated."""
    explainer = Explainer(world, name_all_holders=name_all_holders)
    evaluate_for(explainer, world, pod, Library())
    return explainer.explain_now(pod, ask_allocator)


@cache
def allocator_of(minor: int | None) -> Allocator:
    """The allocator of a release with all gates of `DEFAULT_GATES`; its process ends with ours."""
    allocator = Allocator(cel_program)
    allocator.use(dict.fromkeys(ALL_GATES, True))
    return allocator


ALL_GATES = frozenset[str]().union(*DEFAULT_GATES.values())
"""The gates that are on by default in some release: facts have fields of them in each release."""


def ask_allocator(question: Query) -> Verdict:
    """Ask the allocator of a question's release."""
    return allocator_of(question.minor).answer(question)
