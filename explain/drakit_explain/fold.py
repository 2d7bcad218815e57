"""
One answer for a pod from the answers of its nodes, as the scheduler finds it.

An error of the search on a node that the scheduler looks at is the end of the attempt, even if
other nodes fit (:mod:`.release`), and even if an allocated claim of the pod excludes the node:
``Filter`` of the DynamicResources plugin searches there as well, in 1.34 to 1.37. Nodes with equal
profiles are searched once (:mod:`.profiles`).
First come the nodes on which an error is possible, then those with enough devices, up to the first
that fits. When the budget is spent, an error that was found is certain. That a node fits is certain
only if no error is possible on a node that was not judged.

It must not know how an answer is worded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from drakit_explain.allocation import MAX_RESULTS, Answer, Outcome
from drakit_explain.availability import needed
from drakit_explain.budget import Budget, BudgetSpentError
from drakit_explain.model import PoolID, Request
from drakit_explain.nodes import NodeProblem
from drakit_explain.pending_claims import exact_requests
from drakit_explain.pools import PoolState
from drakit_explain.profiles import Profiles
from drakit_explain.release import FEASIBLE_NODES
from drakit_explain.reports import not_registered
from drakit_explain.trial import Trial
from drakit_explain.world import World

_NAMED = 3
"""Pools that are named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The answers of a pod's nodes."""

    answers: Mapping[str, Answer]
    """Of the nodes that were searched, or are like one that was."""

    fits_on: str = ""
    """Where all drivers of the devices are registered, if the pod fits there."""

    fatal: tuple[str, ...] = ()
    """Nodes with an error that gives up the pod, in the order of the nodes."""

    chance: bool = False
    """Whether the scheduler may find a node before it meets such an error."""

    distinct: tuple[str, ...] = ()
    """Of `fatal`, one node of each profile."""

    unjudged: tuple[str, ...] = ()
    """Nodes whose search ended with the budget, or did not begin."""


def judge(trial: Trial, *, reached: Callable[[str], bool]) -> Judged:
    """
    Search the nodes of a pod.

    :param reached: whether the pod passes the rules of a node that the scheduler checks before the
        devices, without preemption.

    Raises :class:`NotEvaluatedError` where a selector has no outcome.
    """
    search = _Search(trial, trial.profiles())
    fatal: list[str] = []
    some: list[str] = []
    best = ""
    certain = True
    candidates: Collection[str] = trial.nodes
    spent = False
    try:
        suspects = _suspects(trial)
        for name, problem in trial.nodes.items() if suspects else ():
            if name in suspects and (problem is None or problem.problem is NodeProblem.CLAIM):
                answer = search.answer(name)
                certain = certain and answer.outcome is not Outcome.UNDECIDED
                if answer.fatal and reached(name):
                    fatal.append(name)
        candidates = trial.able_for_all()
        # Only beside an error does it matter how many nodes fit.
        most = FEASIBLE_NODES + 1 if fatal else 1
        for name in trial.usable() if candidates else ():
            if name in candidates and search.answer(name).outcome is Outcome.FITS:
                some.append(name)
                # The scheduler does not know which drivers are registered.
                best = best or (name if search.is_registered(name) else "")
                if best and len(some) >= most:
                    break
    except BudgetSpentError:
        spent = True
    answers = search.answers
    early = spent or any(answer.ended_early for answer in answers.values())
    by_profile = {search.profile(name): name for name in reversed(fatal)}
    return Judged(
        answers=answers,
        fits_on=(best or some[0]) if some and (fatal or certain) else "",
        fatal=tuple(fatal),
        chance=bool(fatal)
        and (len(some) > FEASIBLE_NODES or all(answers[name].chance for name in fatal)),
        distinct=tuple(reversed(by_profile.values())),
        unjudged=tuple(
            name
            for name in (trial.usable() if early else ())
            if (answers[name].ended_early if name in answers else spent and name in candidates)
        ),
    )


def _suspects(trial: Trial) -> set[str]:
    """Return the nodes on which the search can end with an error."""
    found: set[str] = set()
    ready = trial.rules.skips_pools
    every = False
    for _, _, exact in trial.exact():
        analysis = trial.analysis(exact)
        for error in analysis.errors:
            found.update(error.nodes)
        trial.budget.spend(1 + len(analysis.errors))
        if exact.every:  # a constraint, too many devices, or a pool that is not ready
            trial.budget.spend(len(analysis.matching_by_node) // 10)
            found.update(analysis.matching_by_node)
            every = True
    if every and not ready:
        return set(trial.nodes)
    if every:
        found.update(name for name, _ in trial.world.not_ready())
    if not ready:
        found.update(
            name for name, pool in trial.world.not_ready() if pool.state is PoolState.INVALID
        )
    for claim in trial.wanted:
        least = sum(
            min((needed(exact) for _, exact in exact_requests(each)), default=0)
            for each in claim.requests
        )
        if least > MAX_RESULTS:
            return set(trial.nodes)
    return found


@dataclass(slots=True)
class _Search:
    """Searches nodes, each profile once."""

    trial: Trial
    profiles: Profiles
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])
    _known: dict[Hashable, Answer] = field(default_factory=dict[Hashable, Answer])
    _profiles: dict[str, Hashable] = field(default_factory=dict[str, Hashable])

    def profile(self, node: str) -> Hashable:
        if node not in self._profiles:
            self._profiles[node] = self.profiles.of(self.trial.pools(node))
        return self._profiles[node]

    def answer(self, node: str) -> Answer:
        """Return the answer of a node; raise :class:`BudgetSpentError` if it cannot be searched."""
        self.trial.budget.spend()
        profile = self.profile(node)
        if profile not in self._known:
            self._known[profile] = self.trial.allocate(node)
        answer = self.answers[node] = self._known[profile]
        return answer

    def is_registered(self, node: str) -> bool:
        """Return whether no report denies that the drivers of a result are registered."""
        drivers = {device.driver for _, _, device in self.answers[node].devices}
        return not any(not_registered(each, node, self.trial.world) for each in drivers)


# ---- pools that do not count


def not_counted(
    world: World, requests: Iterable[Request], nodes: Collection[str], budget: Budget
) -> str:
    """
    Name the incomplete pools of nodes that could have devices for exact requests, as a clause.

    Empty if there are none.
    """
    wanted = tuple(requests)
    on: dict[PoolID, list[str]] = {}
    missing: dict[PoolID, str] = {}
    for node, pool in world.not_ready():
        driver = pool.identity.driver
        budget.spend(len(wanted))
        if (
            node in nodes
            and pool.state is PoolState.INCOMPLETE
            and any(world.concerns(each, driver) for each in wanted)
        ):
            on.setdefault(pool.identity, []).append(node)
            missing.setdefault(pool.identity, pool.missing)
    found = [
        f"pool {identity.pool} on {_where(on[identity])}, {missing[identity]}"
        for identity in sorted(on)
    ]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"not counted: {', '.join(found[:_NAMED])}{more}" if found else ""


def _where(nodes: Sequence[str]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"{len(nodes)} nodes"
