"""
One answer for a pod from the allocator's answers about its nodes, as the scheduler finds it.

An error on a node that the scheduler looks at is the end of the attempt, even if other nodes fit
(:mod:`.release`), and even if an allocated claim of the pod excludes the node: ``Filter`` of the
DynamicResources plugin searches there as well, in 1.34 to 1.37. Nodes with equal profiles are asked
about once (:mod:`.asking`).
First come the nodes on which an error is possible, then those with enough devices, up to the first
that fits. If none fits, some of the others are asked about as well, because the counts may lack a
rule of the allocator. When the budget is spent, an error that was found is certain. That a node
fits is certain only if no error is possible on a node that was not judged.

Does not depend on how an answer is worded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from drakit_explain.allocation import MAX_RESULTS, Answer, Failure
from drakit_explain.availability import needed
from drakit_explain.budget import Budget, BudgetSpentError
from drakit_explain.model import PoolID, Request, exact_of
from drakit_explain.nodes import NodeProblem
from drakit_explain.pools import PoolState
from drakit_explain.release import FEASIBLE_NODES
from drakit_explain.reports import not_registered
from drakit_explain.trial import Trial
from drakit_explain.world import World

_NAMED = 3
"""Pools that are named."""

FIRST_NODES = 4
"""Nodes with enough devices that are asked about first: most pods fit on one of them."""

OTHER_NODES = 32
MAX_OTHERS = 4
"""Nodes without enough devices whose profiles are compared, and how many are asked about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The answers of a pod's nodes."""

    answers: Mapping[str, Answer]
    """Of the nodes that were asked about, or are like one that was."""

    fits_on: str = ""
    """Where all drivers of the devices are registered, if the pod fits there."""

    fatal: tuple[str, ...] = ()
    """Nodes with an error that gives up the pod, in the order of the nodes."""

    chance: bool = False
    """Whether the scheduler may find a node before it meets such an error."""

    distinct: tuple[str, ...] = ()
    """Of `fatal`, one node of each profile."""

    unjudged: tuple[str, ...] = ()
    """Nodes without an answer of the allocator."""

    @property
    def fails(self) -> bool:
        """Whether an error that no count explains gives up the pod."""
        return any(self.answers[name].kind is Failure.OTHER for name in self.fatal)


def judge(trial: Trial, *, reached: Callable[[str], bool]) -> Judged:
    """
    Ask about the nodes of a pod.

    :param reached: whether the pod passes the rules of a node that the scheduler checks before the
        devices, without preemption.

    Raises :class:`NotAnsweredError`, and :class:`NotEvaluatedError` where a selector has no
    outcome.
    """
    nodes = _Nodes(trial)
    some: list[str] = []
    best = ""
    certain, failing = True, False
    candidates: Collection[str] = trial.nodes
    spent = False
    try:
        suspected = suspects(trial)
        reachable = [
            name
            for name, problem in trial.nodes.items()
            if name in suspected and (problem is None or problem.problem is NodeProblem.CLAIM)
        ]
        for name, answer in nodes.ask(reachable):
            certain = certain and not answer.undecided
            failing = failing or (answer.fatal and reached(name))
        fitting = {name for name, answer in nodes.answers.items() if answer.fits}
        candidates = trial.able_for_all() | fitting
        # Only beside an error does it matter how many nodes fit.
        most = FEASIBLE_NODES + 1 if failing else 1
        able = (name for name in trial.usable() if name in candidates)
        others = (name for name in trial.usable() if name not in candidates)
        for name, answer in nodes.ask(able, first=FIRST_NODES) if candidates else ():
            if answer.fits:
                some.append(name)
                # The scheduler does not know which drivers are registered.
                best = best or (name if nodes.is_registered(name) else "")
                if best and len(some) >= most:
                    break
        for name, answer in nodes.ask(nodes.distinct(others)) if not some else ():
            if answer.fits:
                some.append(name)
    except BudgetSpentError:
        trial.verdicts.check()  # what is planned takes no steps the next time
        spent = True
    fatal = [name for name in trial.nodes if nodes.is_fatal(name) and reached(name)]
    by_profile = {nodes.profile(name): name for name in reversed(fatal)}
    return Judged(
        answers=nodes.answers,
        fits_on=(best or some[0]) if some and (fatal or (certain and not spent)) else "",
        fatal=tuple(fatal),
        chance=bool(fatal)
        and (len(some) > FEASIBLE_NODES or all(nodes.answers[name].varies for name in fatal)),
        distinct=tuple(reversed(by_profile.values())),
        unjudged=tuple(
            name
            for name in trial.usable()
            if (
                nodes.answers[name].undecided
                if name in nodes.answers
                else spent and name in candidates
            )
        ),
    )


def suspects(trial: Trial) -> set[str]:
    """Return the nodes on which the allocator can fail."""
    found: set[str] = set()
    ready = trial.rules.skips_pools
    every = False
    for _, _, exact in trial.exact():
        analysis = trial.analysis(exact)
        for error in analysis.errors:
            found.update(error.nodes)
        trial.budget.spend(1 + len(analysis.errors))
        if exact.every:  # a constraint, too many devices, or a pool that is not ready
            trial.budget.spend(len(analysis.on_nodes) // 10)
            found.update(analysis.on_nodes)
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
        least = sum(min(needed(exact) for exact in exact_of([each])) for each in claim.requests)
        if least > MAX_RESULTS:
            return set(trial.nodes)
    return found


@dataclass(slots=True)
class _Nodes:
    """The nodes of a trial, each profile of which is asked about once."""

    trial: Trial
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])

    def profile(self, node: str) -> int:
        return self.trial.verdicts.profile(self.trial.claims, node, self.trial.budget)

    def ask(self, nodes: Iterable[str], *, first: int = 0) -> Iterator[tuple[str, Answer]]:
        """
        Give the answers about nodes; raise :class:`NotAnsweredError` after those that are known.

        :param first: how many questions are planned at first; then as many as were answered.
        """
        verdicts = self.trial.verdicts
        for name in nodes:
            answer = self.trial.ask(name)
            if answer is not None:
                self.answers[name] = answer
                yield name, answer
            elif first and verdicts.planned >= max(first, len(self.answers)):
                break
        verdicts.check()

    def distinct(self, nodes: Iterable[str]) -> list[str]:
        """Return some nodes with different profiles."""
        found: dict[int, str] = {}
        for name in islice(nodes, OTHER_NODES):
            found.setdefault(self.profile(name), name)
        return list(found.values())[:MAX_OTHERS]

    def is_fatal(self, node: str) -> bool:
        return node in self.answers and self.answers[node].fatal

    def is_registered(self, node: str) -> bool:
        """Return whether no report denies that the drivers of a result are registered."""
        drivers = self.answers[node].drivers
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
