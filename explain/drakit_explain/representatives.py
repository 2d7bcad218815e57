"""
The nodes that represent all others when Kubernetes' own allocator is asked about claims, and the
question.

One node of each profile (:mod:`.profiles`) is asked about, up to a bound.

It must not know how objects are read, or who runs the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from drakit_explain.allocation import Answer, Outcome
from drakit_explain.budget import Budget
from drakit_explain.confirmation import Confirmation
from drakit_explain.devices import TaintFacts
from drakit_explain.fold import Judged
from drakit_explain.model import DeviceID, PoolID, Request, SliceFacts, TaintRuleFacts
from drakit_explain.pending_claims import Wanted
from drakit_explain.profiles import Profiles
from drakit_explain.trial import Trial
from drakit_explain.verdicts import VerdictOutcome
from drakit_explain.world import World, classes_of
from drakit_formats.resource.objects import Object

MAX_NODES = 16
"""Nodes in a question, each of another profile."""

MAX_COMPARED = 512
"""Nodes whose profiles are compared."""

MAX_DEVICES = 2_048
"""Devices in a question: about 1 MiB, and 70 ms of the allocator."""

API = "/apis/resource.k8s.io/v1"


def confirmation_of(trial: Trial, judged: Judged, namespace: str) -> Confirmation | None:
    """Return what must be asked about a pod; None if the allocator decides nothing."""
    first = [*judged.distinct, *([judged.fits_on] if judged.fits_on else ())]
    # The search ends at a node that fits. Otherwise, those that it left out have too few devices.
    others = trial.usable() if not judged.fits_on else judged.answers
    unjudged = set(judged.unjudged)
    names = (
        name
        for name in (*first, *others)
        if name not in unjudged and _is_certain(judged.answers.get(name))
    )
    nodes = _distinct(names, trial.profiles(), trial.world)
    expected = {name: _outcome(judged.answers.get(name)) for name in nodes}
    return _confirmation(expected, trial.wanted, namespace, trial.world)


def confirmation_of_template(
    wanted: Wanted, namespace: str, world: World, budget: Budget
) -> Confirmation | None:
    """
    Return what must be asked about requests that no node can satisfy, whoever holds its devices.

    Raises :class:`NotEvaluatedError` and :class:`BudgetSpentError`.
    """
    profiles = Profiles(world, [wanted.searched], budget, all_free=True)
    expected = dict.fromkeys(_distinct(world.views(), profiles, world))
    return _confirmation(expected, [wanted], namespace, world, all_free=True)


def _distinct(names: Iterable[str], profiles: Profiles, world: World) -> list[str]:
    """Return nodes of different profiles."""
    views = world.views()
    by_profile: dict[object, str] = {}
    for name in islice(names, MAX_COMPARED):
        by_profile.setdefault(profiles.of(world.pools_of_node(views[name])), name)
        if len(by_profile) >= MAX_NODES:
            break
    return list(by_profile.values())


def _confirmation(
    expected: Mapping[str, VerdictOutcome | None],
    wanted: Sequence[Wanted],
    namespace: str,
    world: World,
    *,
    all_free: bool = False,
) -> Confirmation | None:
    views = world.views()
    nodes: list[str] = []
    pools: dict[PoolID, None] = {}
    devices = 0
    for name in expected:
        of_node = [
            each.identity for each in world.pools_of_node(views[name]) if each.identity not in pools
        ]
        devices += sum(len(of.devices) for pool in of_node for of in world.slices_of_pool(pool))
        if devices > MAX_DEVICES:
            break
        nodes.append(name)
        pools |= dict.fromkeys(of_node)
    if not nodes:
        return None
    rules = [each for each in world.of(TaintRuleFacts).values() if each.adds_taints]
    slices = [of for pool in pools for of in world.slices_of_pool(pool)]
    requests = (request for each in wanted for request in each.requests)
    return Confirmation(
        nodes=tuple(
            {"metadata": {"name": name, "labels": dict(views[name].labels)}} for name in nodes
        ),
        expected=tuple(expected[name] for name in nodes),
        claims=tuple(_source(each, namespace) for each in wanted),
        classes=tuple(
            f"{API}/deviceclasses/{name}" for name in dict.fromkeys(classes_of(requests))
        ),
        slices=tuple(f"{API}/resourceslices/{of.name}" for of in slices),
        in_use=() if all_free else tuple(_in_use(slices, world)),
        taints={
            device: taints
            for of in (slices if rules and not all_free else ())
            for name in of.devices.names
            if (device := DeviceID(of.driver, of.pool, name))
            and (taints := [_taint(each.taint) for each in rules if each.selects(device)])
        },
        all_free=all_free,
        minor=world.minor,
    )


def _is_certain(answer: Answer | None) -> bool:
    """Return whether the allocator can be expected to say the same each time."""
    return answer is None or not (answer.chance or answer.outcome is Outcome.UNDECIDED)


def _outcome(answer: Answer | None) -> VerdictOutcome:
    """Return what the allocator should say; without an answer, a node has too few devices."""
    if answer is not None and answer.fatal:
        return VerdictOutcome.FATAL
    if answer is not None and answer.outcome is Outcome.FITS:
        return VerdictOutcome.ALLOCATED
    return VerdictOutcome.UNAVAILABLE


def _source(wanted: Wanted, namespace: str) -> str | Object:
    if wanted.claim:
        return f"{API}/namespaces/{namespace}/resourceclaims/{wanted.claim}"
    if wanted.template:
        return f"{API}/namespaces/{namespace}/resourceclaimtemplates/{wanted.template}"
    return {"spec": {"devices": {"requests": [_of_resource(each) for each in wanted.requests]}}}


def _of_resource(request: Request) -> Object:
    """Return a request of the claim that the scheduler makes for extended resources."""
    exactly = {
        "deviceClassName": request.device_class,
        "allocationMode": "ExactCount",
        "count": request.count,
    }
    return {"name": request.name, "exactly": exactly}


def _in_use(slices: Iterable[SliceFacts], world: World) -> Iterator[Object]:
    for device in (
        DeviceID(of.driver, of.pool, name) for of in slices for name in of.devices.names
    ):
        if world.is_allocated(device):
            yield _result(device)
        for claim in world.sharers(device):
            for number, share in enumerate(claim.shares):
                if share.device == device:
                    yield {
                        **_result(device),
                        "shareID": f"{claim.uid}-{number}",
                        "consumedCapacity": {each.name: each.quantity for each in share.consumed},
                    }


def _result(device: DeviceID) -> dict[str, Any]:
    return {"request": "r", "driver": device.driver, "pool": device.pool, "device": device.device}


def _taint(taint: TaintFacts) -> Object:
    return {"key": taint.key, "value": taint.value, "effect": taint.effect}
