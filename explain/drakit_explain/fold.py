"""
One answer for a pod from the answers of its nodes, as the scheduler finds it.

An error of the search on a node that the scheduler looks at is the end of the attempt, even if
other nodes fit (:mod:`.release`), and even if an allocated claim of the pod excludes the node:
``Filter`` of the DynamicResources plugin searches there as well, in 1.34 to 1.37. Nodes with equal
profiles are searched once (:mod:`.profiles`).
First come the nodes on which an error is possible, then those with enough devices, up to the first
that fits.

It must not know how an answer is worded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from drakit_explain.allocation import MAX_RESULTS, Answer, Outcome
from drakit_explain.availability import needed
from drakit_explain.model import PoolID, Request
from drakit_explain.nodes import NodeProblem
from drakit_explain.pending_claims import exact_requests
from drakit_explain.pools import PoolState
from drakit_explain.profiles import Profiles
from drakit_explain.release import FEASIBLE_NODES
from drakit_explain.reports import not_registered
from drakit_explain.trial import Trial
from drakit_explain.world import World

MAX_WORK = 1_000_000
"""Devices that are looked at and tried for one pod, on all nodes: about 3 s."""


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
    """Nodes that are not searched, because too much work has been done."""


def judge(trial: Trial, *, reached: Callable[[str], bool]) -> Judged:
    """
    Search the nodes of a pod.

    :param reached: whether the pod passes the rules of a node that the scheduler checks before the
        devices, without preemption.

    Raises :class:`NotEvaluatedError` where a selector has no outcome.
    """
    search = _Search(trial, trial.profiles())
    usable = list(trial.usable())
    suspects = _suspects(trial)
    fatal = [
        name
        for name, problem in trial.nodes.items()
        if (problem is None or problem.problem is NodeProblem.CLAIM)
        and name in suspects
        and (answer := search.answer(name)) is not None
        and answer.fatal
        and reached(name)
    ]
    able = trial.able_for_all()
    fitting = (
        name
        for name in usable
        if name in able and (answer := search.answer(name)) is not None and _fits(answer)
    )
    # Only beside an error does it matter how many nodes fit.
    some = list(islice(fitting, FEASIBLE_NODES + 1 if fatal else 1))
    # The scheduler does not know which drivers are registered.
    best = (name for name in chain(some, fitting) if search.is_registered(name))
    by_profile = {search.profile(name): name for name in reversed(fatal)}
    return Judged(
        answers=search.answers,
        fits_on=next(best, some[0]) if some else "",
        fatal=tuple(fatal),
        chance=bool(fatal)
        and (len(some) > FEASIBLE_NODES or all(search.answers[name].chance for name in fatal)),
        distinct=tuple(reversed(by_profile.values())),
        unjudged=tuple(search.unjudged),
    )


def _fits(answer: Answer) -> bool:
    return answer.outcome is Outcome.FITS


def _suspects(trial: Trial) -> set[str]:
    """Return the nodes on which the search can end with an error."""
    found: set[str] = set()
    ready = trial.rules.skips_pools
    for _, _, exact in trial.exact():
        analysis = trial.analysis(exact)
        for error in analysis.errors:
            found.update(error.nodes)
        if exact.every:  # a constraint, too many devices, or a pool that is not ready
            found.update(analysis.matching_by_node)
            found.update(name for name, _ in trial.world.not_ready())
        if exact.every and not ready:
            return set(trial.nodes)
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
    unjudged: dict[str, None] = field(default_factory=dict[str, None])
    _known: dict[Hashable, Answer] = field(default_factory=dict[Hashable, Answer])
    _profiles: dict[str, Hashable] = field(default_factory=dict[str, Hashable])
    _work: int = 0

    def profile(self, node: str) -> Hashable:
        if node not in self._profiles:
            self._profiles[node] = self.profiles.of(self.trial.pools(node))
        return self._profiles[node]

    def answer(self, node: str) -> Answer | None:
        """Return the answer of a node; None if it is not searched any more."""
        if node not in self.answers and node not in self.unjudged:
            profile = self.profile(node)
            if profile not in self._known:
                if self._work > MAX_WORK:
                    self.unjudged[node] = None
                    return None
                answer = self._known[profile] = self.trial.allocate(node)
                devices = (len(each.devices) for p in self.trial.pools(node) for each in p.slices)
                self._work += answer.steps + sum(devices)
            self.answers[node] = self._known[profile]
        return self.answers.get(node)

    def is_registered(self, node: str) -> bool:
        """Return whether no report denies that the drivers of a result are registered."""
        drivers = {device.driver for _, _, device in self.answers[node].devices}
        return not any(not_registered(each, node, self.trial.world) for each in drivers)


# ---- pools that do not count


def not_counted(world: World, requests: Iterable[Request], nodes: Collection[str]) -> str:
    """
    Name the incomplete pools of nodes that could have devices for exact requests, as a clause.

    Empty if there are none.
    """
    wanted = tuple(requests)
    on: dict[PoolID, list[str]] = {}
    missing: dict[PoolID, str] = {}
    for node, pool in world.not_ready():
        driver = pool.identity.driver
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
