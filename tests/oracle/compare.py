"""Our answer and the allocator's for each node of a world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from drakit_explain.allocation import (
    Answer,
    Consumed,
    Outcome,
    SearchedClaim,
    Selected,
    consumed_of,
)
from drakit_explain.budget import Budget
from drakit_explain.cel.helper import Helper
from drakit_explain.devices import DeviceFacts, TaintFacts
from drakit_explain.model import ClaimFacts, ClassFacts, DeviceID, Request, SliceFacts
from drakit_explain.pools import NodeView, PoolState, pools_of_node
from drakit_explain.projection import project_claim, project_class, project_slice
from drakit_explain.release import rules_of
from drakit_explain.search import allocate
from drakit_explain.selectors import SelectorIndex, bring_up_to_date
from drakit_explain.verdicts import Verdict, VerdictOutcome
from tests.oracle.worlds import World

RULES = rules_of(36)
"""Those of the allocator in `operator/cel/go.mod`."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two answers; ``theirs`` has the allocator's words."""

    ours: Answer
    theirs: Outcome
    """UNDECIDED where the allocator itself finds no end in time."""

    text: str = ""
    in_any_order: bool = False
    """Whether it is chance that the allocator meets an error before a device that it lacks."""

    @property
    def agrees(self) -> bool:
        both = {self.ours.outcome, self.theirs}
        if self.ours.chance and self.theirs is Outcome.FITS:
            return True
        if self.in_any_order and both == {Outcome.FAILED, Outcome.NO_FIT}:
            return True
        return len(both) == 1 or Outcome.UNDECIDED in both


class Facts:
    """The question of the search in one world."""

    def __init__(self, world: World, index: SelectorIndex) -> None:
        self._index = index
        self.slices = [project_slice(body) for body in world.slices]
        self.claims = [project_claim(body) for body in world.claims]
        self.held = [project_claim(body) for body in world.allocated]
        self.classes = {body["metadata"]["name"]: project_class(body) for body in world.classes}

    def expressions(self) -> list[str]:
        found = [each for cls in self.classes.values() for each in cls.selectors]
        for claim in self.claims:
            for request in claim.requests:
                for exact in request.alternatives or (request,):
                    found += exact.selectors
        return found

    def is_allocated(self, device: DeviceID) -> bool:
        return any(device in claim.devices for claim in self.held)

    def consumed(self, device: DeviceID) -> Consumed | None:
        return consumed_of(device, (share for claim in self.held for share in claim.shares))

    def is_shared(self, device: DeviceID) -> bool:
        return any(share.device == device for claim in self.held for share in claim.shares)

    def taints(self, device: DeviceID, facts: DeviceFacts) -> Sequence[TaintFacts]:
        return facts.taints

    def broken(self, request: Request) -> str | None:
        return None if request.device_class in self.classes else "class is missing"

    def selected(self, request: Request, of: SliceFacts) -> Selected:
        alive = (1 << len(of.devices)) - 1
        errors: dict[int, str] = {}
        device_class: ClassFacts = self.classes[request.device_class]
        for expression in (*device_class.selectors, *request.selectors):
            found = self._index.evaluated(expression, of)
            errors |= {i: text for i, text in found.errors.items() if alive >> i & 1}
            alive &= found.matches
        return Selected(matches=alive, errors=errors)


def compare(world: World, helper: Helper, index: SelectorIndex) -> Iterator[Comparison | None]:
    """Ask both about each node; None where the answer of the search does not count."""
    facts = Facts(world, index)
    bring_up_to_date(index, helper, facts.expressions(), facts.slices)
    rules = rules_of(int(world.minor.removeprefix("1.")))
    if not rules.sorts_pools and _has_later_alternative_for_all(facts.claims):
        yield None  # the allocator mistakes it for the first: kubernetes/kubernetes#137347
        return
    verdicts = helper.verdicts(world.question())
    for node, verdict in zip(world.nodes, verdicts, strict=True):
        metadata = node["metadata"]
        view = NodeView(metadata["name"], metadata["labels"])
        pools = pools_of_node(facts.slices, view, rules=rules)
        if not rules.skips_pools and any(pool.state is PoolState.INCOMPLETE for pool in pools):
            yield None  # the explainer is undecided
            continue
        ours = allocate(
            [_searched(claim) for claim in facts.claims],
            pools,
            allocated=facts,
            selections=facts,
            budget=Budget(),
            rules=rules,
        )
        yield Comparison(
            ours=ours,
            theirs=theirs_of(verdict),
            text=verdict.text,
            in_any_order=not rules.sorts_pools,
        )


def _has_later_alternative_for_all(claims: Iterable[ClaimFacts]) -> bool:
    return any(
        each.every
        for claim in claims
        for request in claim.requests
        for each in request.alternatives[1:]
    )


def theirs_of(verdict: Verdict) -> Outcome:
    """Return a verdict as an outcome; any error of the allocator counts as failed."""
    match verdict.outcome:
        case VerdictOutcome.ALLOCATED:
            return Outcome.FITS
        case VerdictOutcome.UNAVAILABLE:
            return Outcome.FAILED if verdict.text else Outcome.NO_FIT
        case VerdictOutcome.FATAL:
            return Outcome.FAILED
        case VerdictOutcome.UNDECIDED:
            return Outcome.UNDECIDED


def _searched(claim: ClaimFacts) -> SearchedClaim:
    return SearchedClaim(name=claim.name, requests=claim.requests, constraints=claim.constraints)
