"""
How many equal pods fit: one after the other takes the devices and the room on a node that the
search finds for it, until one does not fit.

Each pod must have claims of its own: the allocation of a shared one is not imitated. Afterwards,
the world is as it was before.

It must not know sessions, or how an answer is printed.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from drakit_explain.allocation import Outcome, consumed_by
from drakit_explain.availability import budget_of
from drakit_explain.budget import BudgetSpentError
from drakit_explain.devices import Amount, DeviceFacts
from drakit_explain.loads import Load
from drakit_explain.model import ClaimFacts, Consumer, DeviceID, PodFacts, Share
from drakit_explain.pending import Explainer, Verdict
from drakit_explain.pending_claims import exact_requests, wanted_of
from drakit_explain.release import rules_of
from drakit_explain.search import allocate
from drakit_explain.world import Name, World

MAX_SECONDS = 2.0
"""The time after which no further pod is placed: a user waits, and a Job can have thousands."""


@dataclass(kw_only=True, slots=True)
class Placed:
    """The pods that have been placed in a world."""

    number: int = 0
    stopped: bool = False
    """It is unknown whether one more pod fits."""

    claims: list[ClaimFacts] = field(default_factory=list[ClaimFacts])


@contextmanager
def placed(pod: PodFacts, limit: int, world: World) -> Generator[Placed]:
    """
    Place equal pods while the context lasts.

    :param limit: the most pods that are placed.
    """
    done = Placed()
    try:
        _place(pod, limit, world, done)
        yield done
    finally:
        for claim in done.claims:
            world.remove(ClaimFacts, Name(claim.namespace, claim.name))
            if world.loads is not None:
                world.loads.remove(claim.uid)


def _place(pod: PodFacts, limit: int, world: World, done: Placed) -> None:
    explainer = Explainer(world, name_all_holders=True)
    end = time.monotonic() + MAX_SECONDS
    while done.number < limit:
        explanation = explainer.explain(pod)
        if explanation.verdict is Verdict.BLOCKED:
            return
        node = explanation.fits_on
        claim = _claim_of(pod, node, done.number + 1, world) if node else None
        if explanation.verdict is not Verdict.FITS or claim is None or time.monotonic() > end:
            done.stopped = True
            return
        world.apply(claim)
        if world.loads is not None:
            load = Load(claim.uid, node, pod.priority, pod.requests)
            world.loads.apply(load)
        done.claims.append(claim)
        done.number += 1


def _claim_of(pod: PodFacts, node: str, number: int, world: World) -> ClaimFacts | None:
    """Return one claim with all devices that the allocator gives a pod; None if it is unknown."""
    wanted = wanted_of(pod, world)
    pools = world.pools_of_node(world.views()[node])
    try:
        answer = allocate(
            [each.searched for each in wanted],
            pools,
            allocated=world,
            selections=world,
            budget=budget_of(world),
            rules=rules_of(world.minor),
        )
    except BudgetSpentError:
        return None
    if answer.outcome is not Outcome.FITS:
        return None
    facts = {
        DeviceID(*pool.identity, name): (each, index)
        for pool in pools
        for each in pool.slices
        for index, name in enumerate(each.devices.names)
    }
    exact = {
        (each.origin, name): request
        for each in wanted
        for one in each.requests
        for name, request in exact_requests(one)
    }
    devices: list[DeviceID] = []
    shares: list[Share] = []
    for origin, name, device in answer.devices:
        request, (of, index) = exact[origin, name], facts[device]
        if request.admin_access:
            continue
        if (found := of.devices[index]).kind.shareable:
            shares.append(_share(found, device, request.capacity))
        else:
            devices.append(device)
    name = f"{pod.name}-{number}"
    return ClaimFacts(
        namespace=pod.namespace,
        name=name,
        uid=f"{pod.uid}/{number}",
        allocated=True,
        devices=tuple(devices),
        shares=tuple(shares),
        consumers=(Consumer("pods", name, name),),
    )


def _share(facts: DeviceFacts, device: DeviceID, asked: tuple[Amount, ...]) -> Share:
    taken = consumed_by(facts.kind.capacity, asked)
    consumed = tuple(Amount(name, f"{amount}n") for name, amount in taken.items())
    return Share(device=device, consumed=consumed)
