"""
The allocator in random worlds, asked with the objects and with what the explainer writes of them.

The verdicts must agree, those of nodes with equal profiles included; and what the explainer counts
must exclude no node with devices, and no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.availability import analyze, budget_of
from drakit_explain.cel.allocator import Allocator
from drakit_explain.cel.helper import Helper
from drakit_explain.pending import Explainer
from drakit_explain.pending_claims import wanted_of
from drakit_explain.queries import answered
from drakit_explain.trial import Trial, suspects
from drakit_explain.verdicts import Verdict, VerdictOutcome
from tests.fakes.world import evaluate_for
from tests.oracle.worlds import World


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two verdicts about a node, and what is counted."""

    ours: Verdict
    theirs: Verdict
    able: bool
    """Whether the node has enough devices for each request."""

    suspected: bool
    """Whether an error is possible."""

    in_any_order: bool = False
    """Whether it is chance that the allocator meets an error first: up to 1.35."""

    @property
    def problem(self) -> str:
        """The problem. Empty if there is none."""
        both = {self.ours.outcome, self.theirs.outcome}
        if VerdictOutcome.UNDECIDED in both or self.ours.varies or self.theirs.varies:
            return ""
        if self.in_any_order and len(both) > 1 and VerdictOutcome.FATAL in both:
            return ""
        if len(both) > 1:
            return f"ours is {self.ours}, theirs {self.theirs}"
        if self.theirs.outcome is VerdictOutcome.ALLOCATED and not self.able:
            return "the counts exclude a node that has the devices"
        if self.theirs.outcome is VerdictOutcome.FATAL and not self.suspected:
            return f"the counts exclude an error: {self.theirs.text}"
        return ""


def compare(world: World, helper: Helper, allocator: Allocator) -> Iterator[Comparison | None]:
    """Ask about each node; None for what the explainer does not evaluate."""
    facts, pod = world.facts(), world.pod()
    facts.use_release(int(world.minor.removeprefix("1.")))
    explainer = Explainer(facts)
    evaluate_for(explainer, facts, pod, helper)
    trial = Trial(
        world=facts,
        verdicts=explainer.verdicts,
        wanted=wanted_of(pod, facts),
        nodes=dict.fromkeys(facts.views()),
        budget=budget_of(facts),
        analyze=lambda request, budget: analyze(request, facts, budget),
    )
    try:
        able, suspected = trial.able_for_all(), suspects(trial)
    except NotEvaluatedError:
        yield None
        return

    def find(name: str) -> Verdict:
        found = trial.verdicts.find(trial.wanted, name, budget_of(facts))
        trial.verdicts.check()
        assert found is not None
        return found

    for node, theirs in zip(world.nodes, world.verdicts(helper), strict=True):
        name = node["metadata"]["name"]
        if not trial.rules.skips_pools and any(each == name for each, _ in facts.not_ready()):
            yield None  # on 1.34, the counts do not have the devices of such a pool
            continue
        ours = answered(trial.verdicts, lambda name=name: find(name), allocator.answer)
        yield Comparison(
            ours=ours,
            theirs=theirs,
            able=name in able,
            suspected=name in suspected,
            in_any_order=int(world.minor[2:]) <= 35,
        )
