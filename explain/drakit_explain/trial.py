"""
Checks whether a pod's claims fit on the nodes of a world: finds the devices for each request, the
allocator's result for each node, and one result for all nodes, according to the scheduler's rules.

The allocator is queried with the facts either unchanged or with one of them replaced. With replaced
facts, :mod:`.shortage` identifies the cause, and :mod:`.remedies` finds a change that helps. The
details of an error in a sentence come from the allocator's message. The device and the pool are
those of the current node, because the query may have been about another node with an equal profile.

An error on a node that the scheduler checks ends the attempt, even if other nodes fit
(:mod:`.pools`), and even if an allocated claim of the pod excludes the node: ``Filter`` of the
DynamicResources plugin searches there as well, in 1.34 to 1.37. For nodes with equal profiles,
there is one query (:mod:`.queries`). The first queries are about nodes on which an error is
possible, the next about nodes with enough devices, until one fits. If none fits, some of the other
nodes are queried, because the counts may not consider a rule of the allocator. When the budget is
used up, the errors that were found are certain. It is certain that a node fits only if no error is
possible on the nodes without a result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from drakit_explain.allocation import MAX_RESULTS, AllocatorError, AskedClaim, Failure
from drakit_explain.availability import Analysis, Availability, needed
from drakit_explain.budget import Budget, BudgetSpentError
from drakit_explain.model import PoolID, Request, exact_of, exact_requests
from drakit_explain.nodes import NodeProblem, Nodes
from drakit_explain.pending_claims import Wanted
from drakit_explain.pools import FEASIBLE_NODES, NodePool, PoolState, Rules, rules_of
from drakit_explain.queries import NO_CHANGES, Changes, Verdicts, claim_name
from drakit_explain.reports import not_registered
from drakit_explain.verdicts import Verdict
from drakit_explain.wording import cut
from drakit_explain.world import World

_STEPS_PER_REQUEST = 10
_STEPS_PER_ANSWER = 10


class Position(NamedTuple):
    """An exact request among the claims of a pod: a request, or one alternative of a request."""

    claim: int
    request: int
    alternative: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A pod's claims that must be allocated, and the nodes to try."""

    world: World
    verdicts: Verdicts
    wanted: Sequence[Wanted]
    nodes: Nodes
    budget: Budget
    analyze: Callable[[Request, Budget], Analysis]
    """Counts the cluster's devices for an exact request."""

    own: frozenset[str] = frozenset()
    """The UIDs of the pod's allocated claims, whose devices the pod also needs."""

    fatal: Sequence[str] = ()
    """The nodes with an error that makes the scheduler give up on the pod, even if other nodes fit.
    Only one node of each profile is included."""

    _analyses: dict[int, Analysis] = field(
        default_factory=dict[int, Analysis], init=False, compare=False
    )
    """The analyses, keyed by the identity of the request, because computing its hash would take
    longer than computing most results."""

    @property
    def rules(self) -> Rules:
        return rules_of(self.world.minor)

    def analysis(self, exact: Request) -> Analysis:
        """Return the analysis of the cluster's devices for an exact request of `wanted`."""
        self.budget.spend()
        found = self._analyses.get(id(exact))
        if found is None:
            self.budget.spend(_STEPS_PER_REQUEST + 5 * len(exact.tolerations))
            found = self._analyses[id(exact)] = self.analyze(exact, self.budget)
        return found

    def found(self, exact: Request) -> Availability:
        """Return the availability of devices on the nodes for an exact request."""
        return self.analysis(exact).for_nodes(self.nodes, self.budget)

    def requests(self) -> Iterator[Request]:
        """Return the requests of all claims."""
        return (request for each in self.wanted for request in each.requests)

    def exact(self) -> Iterator[tuple[Position, str, Request]]:
        """Return each exact request with its position and its name (``request/subrequest``)."""
        for claim, each in enumerate(self.wanted):
            for number, request in enumerate(each.requests):
                for index, (name, exact) in enumerate(exact_requests(request)):
                    alternative = index if request.alternatives else None
                    yield Position(claim, number, alternative), name, exact

    def usable(self) -> Iterator[str]:
        """Yield the names of the nodes that the pod can use."""
        return (name for name, problem in self.nodes.items() if problem is None)

    def is_usable(self, node: str) -> bool:
        return node in self.nodes and self.nodes[node] is None

    def pools(self, node: str) -> Sequence[NodePool]:
        return self.world.pools_of_node(self.world.views()[node])

    def able(self, request: Request) -> set[str]:
        """Return the nodes that have enough free devices for this request by itself."""
        return {
            node for exact in exact_of([request]) for node in self.analysis(exact).able(self.budget)
        }

    def able_for_all(self) -> set[str]:
        """Return the nodes that have enough free devices for each request by itself."""
        able: set[str] | None = None
        for request in self.requests():
            found = self.able(request)
            able = found if able is None else able & found
        return set(self.nodes) if able is None else {name for name in able if name in self.nodes}

    def not_ready(self) -> Iterator[NodePool]:
        """Yield the pools that are not ready and belong to usable nodes. The scheduler does not
        allocate devices from them."""
        return (pool for node, pool in self.world.not_ready() if self.is_usable(node))

    def concerns(self, pool: NodePool) -> bool:
        """Return whether a request could select devices of a pool that is not ready."""
        exact = [each for _, _, each in self.exact()]
        self.budget.spend(len(exact))
        return any(self.world.concerns(each, pool.identity.driver) for each in exact)

    def without_constraint(self, claim: int, constraint: int) -> list[AskedClaim]:
        """Return the claims without one of the constraints."""
        claims: list[AskedClaim] = list(self.wanted)
        kept = claims[claim].constraints
        kept = (*kept[:constraint], *kept[constraint + 1 :])
        claims[claim] = replace(claims[claim], constraints=kept)
        return claims

    def without_constraints(self) -> list[AskedClaim]:
        return [replace(each, constraints=()) for each in self.wanted]

    def with_request(self, at: Position, exact: Request) -> list[AskedClaim]:
        """Return the claims with one exact request replaced."""
        claims: list[AskedClaim] = list(self.wanted)
        requests = list(claims[at.claim].requests)
        if at.alternative is not None:
            alternatives = list(requests[at.request].alternatives)
            alternatives[at.alternative] = exact
            exact = replace(requests[at.request], alternatives=tuple(alternatives))
        requests[at.request] = exact
        claims[at.claim] = replace(claims[at.claim], requests=tuple(requests))
        return claims

    def ask(
        self,
        node: str,
        *,
        claims: Sequence[AskedClaim] | None = None,
        changes: Changes = NO_CHANGES,
    ) -> Verdict | None:
        """Return the allocator's verdict about a node, or None if the query for it is planned.
        `claims` and `changes` replace facts in the query."""
        self.budget.spend(_STEPS_PER_ANSWER)
        asked = self.wanted if claims is None else claims
        return self.verdicts.find(asked, node, self.budget, changes)

    def unnamed(self) -> Trial:
        """Return a copy of the trial in which claims have the same names as in queries, so that
        pods with equal claims share the results."""
        wanted = [
            replace(each, origin=f"claim {claim_name(number)}")
            for number, each in enumerate(self.wanted)
        ]
        return replace(self, wanted=wanted)

    def named(self, text: str) -> str:
        """Return a message with the claims' real names instead of their names in queries."""
        origins = dict(enumerate(each.origin for each in self.wanted))
        return _CLAIM.sub(lambda found: origins.get(int(found[1]), found[0]), text)

    def error(self, node: str, verdict: Verdict) -> AllocatorError:
        """Return the error of a fatal verdict about a node."""
        text, kind = verdict.text, failure_of(verdict.text)
        if kind is Failure.SELECTOR and (failed := self._failed(text, node)):
            return failed
        if kind is Failure.CONSTRAINT:
            what = f"{self._subject(text)} asks for all devices, and a constraint of the claim"
            return AllocatorError(kind=kind, text=f"{what} excludes one of them")
        if kind is Failure.TOO_MANY:
            return AllocatorError(kind=kind, text=self._too_many(text))
        if kind in (Failure.INCOMPLETE_POOL, Failure.INVALID_POOL):
            if of_pool := self._of_pool(kind, text, node):
                return of_pool
        else:
            kind = Failure.OTHER
        what = f"Kubernetes' allocator fails ({self.named(text)})"
        return AllocatorError(kind=kind, text=what)

    def _failed(self, text: str, node: str) -> AllocatorError | None:
        """Return the error about a selector, with the device for which it fails."""
        found = [
            (name, self.wanted[at.claim].origin, error)
            for at, name, exact in self.exact()
            for error in self.analysis(exact).errors
            if node in error.nodes
        ]
        if not found:
            return None
        named = _DEVICE.search(text)
        found.sort(key=lambda each: named is not None and each[2].device.device != named[1])
        name, origin, error = found[0]
        what = f'request "{name}" of {origin}: {error.text}'
        return AllocatorError(kind=Failure.SELECTOR, text=what, device=error.device)

    def _of_pool(self, kind: Failure, text: str, node: str) -> AllocatorError | None:
        """Return the error about a pool that is not ready."""
        invalid = kind is Failure.INVALID_POOL
        state = PoolState.INVALID if invalid else PoolState.INCOMPLETE
        every = _ALL.search(text)
        named = PoolID(every[1], every[2]) if every is not None else None
        pools = [each for each in self.pools(node) if each.state is state or each.elsewhere]
        pools.sort(key=lambda each: (each.identity != named, each.state is not state))
        if not pools:
            return None
        driver, name = pool = pools[0].identity
        what = f"pool {name} of driver {driver} is {state.value}"
        if every is not None:
            what = f"{self._subject(text)} asks for all devices, but {what}"
        elif invalid:
            what = f"{what}: {pools[0].problem}"
        return AllocatorError(kind=kind, text=what, pool=pool)

    def _too_many(self, text: str) -> str:
        found = _LIMIT.search(text)
        number = int(found[1]) + int(found[2]) if found is not None else MAX_RESULTS + 1
        claim = self._claim(text)
        named = _REQUEST.search(text)
        is_last = named is None or named[1] == claim.requests[-1].name
        least = "" if is_last else "at least "
        return (
            f"{claim.origin} asks for {least}{number} devices, but an allocation can list only "
            f"{MAX_RESULTS}"
        )

    def _claim(self, text: str) -> Wanted:
        """Return the claim to which the allocator's message refers."""
        named = _CLAIM.search(text)
        number = int(named[1]) if named is not None else 0
        return self.wanted[min(number, len(self.wanted) - 1)]

    def _subject(self, text: str) -> str:
        named = _REQUEST.search(text)
        return f'request "{named[1] if named is not None else ""}" of {self._claim(text).origin}'


# ---- the allocator's errors (structured/internal in k8s.io/dynamic-resource-allocation)

_CLAIM = re.compile(rf"\bclaim {claim_name(0)[:-1]}(\d{{1,4}})(?![\w./-])")
_REQUEST = re.compile(r"request ([^\s,:]+)")
_DEVICE = re.compile(r" on device \S+/([^\s/]+): CEL")
_ALL = re.compile(r"resource pool ([^\s/]+)/(\S+) is currently")
_LIMIT = re.compile(r"adding (\d+) devices exceeds .*with (\d+) already")

_FAILURES = {
    Failure.SELECTOR: re.compile(r"selector #\d+.*: CEL (?:compile|runtime) error"),
    Failure.INCOMPLETE_POOL: re.compile(r"is currently being updated"),
    Failure.INVALID_POOL: re.compile(r"is currently invalid|pool \S+ is invalid: "),
    Failure.CONSTRAINT: re.compile(r"because a claim constraint would not be satisfied"),
    Failure.TOO_MANY: re.compile(r"exceeds the claim limit"),
}


def failure_of(text: str) -> Failure:
    """Return the kind of an allocator error."""
    return next((kind for kind, of in _FAILURES.items() if of.search(text)), Failure.OTHER)


# ---- all nodes

_NAMED = 3
"""Maximum number of pools to name."""

FIRST_NODES = 4
"""How many nodes with enough devices to query first, because most pods fit on one of them."""

OTHER_NODES = 32
MAX_OTHERS = 4
"""Maximum number of nodes without enough devices to compare by profile, and to query."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The results of the nodes for a pod."""

    answers: Mapping[str, Verdict]
    """The results for the nodes in queries, and for nodes with equal profiles."""

    fits_on: str = ""
    """A node on which the pod fits. If possible, it is one where all drivers of the devices are
    registered."""

    fatal: tuple[str, ...] = ()
    """The nodes with an error that makes the scheduler give up on the pod, in the order of the
    nodes."""

    chance: bool = False
    """Whether the scheduler may find a node before it encounters such an error."""

    distinct: tuple[str, ...] = ()
    """One node for each profile in `fatal`."""

    unjudged: tuple[str, ...] = ()
    """The nodes without a result from the allocator."""

    @property
    def fails(self) -> bool:
        """Whether the scheduler gives up on the pod because of an error that device counts do not
        explain."""
        return any(failure_of(self.answers[name].text) is Failure.OTHER for name in self.fatal)


def judge(trial: Trial, *, reached: Callable[[str], bool]) -> Judged:
    """
    Determine on which nodes a pod fits, and on which an error occurs.

    :param reached: returns whether the scheduler would reach the device check on a node, that is,
        whether the pod passes the earlier checks without preemption.

    Raises :class:`QueriesPendingError`, and :class:`NotEvaluatedError` if a selector has no result.
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
        # How many nodes fit matters only if there is an error.
        most = FEASIBLE_NODES + 1 if failing else 1
        able = (name for name in trial.usable() if name in candidates)
        others = (name for name in trial.usable() if name not in candidates)
        for name, answer in nodes.ask(able, first=FIRST_NODES) if candidates else ():
            if answer.fits:
                some.append(name)
                # Prefer a node with registered drivers, although the scheduler does not know which
                # drivers are registered.
                best = best or (name if nodes.is_registered(name) else "")
                if best and len(some) >= most:
                    break
        for name, answer in nodes.ask(nodes.distinct(others)) if not some else ():
            if answer.fits:
                some.append(name)
    except BudgetSpentError:
        # If queries are planned, end here: when the explanation is repeated, they no longer take
        # steps.
        trial.verdicts.check()
        spent = True
    fatal = [
        name
        for name in trial.nodes
        if name in nodes.answers and nodes.answers[name].fatal and reached(name)
    ]
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
    """Return the nodes on which the allocator could return an error."""
    found: set[str] = set()
    ready = trial.rules.skips_pools
    every = False
    for _, _, exact in trial.exact():
        analysis = trial.analysis(exact)
        for error in analysis.errors:
            found.update(error.nodes)
        trial.budget.spend(1 + len(analysis.errors))
        # The request can fail due to a constraint, too many devices, or a pool that is not ready.
        if exact.every:
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
    """Queries the allocator about the nodes of a trial, once for each profile."""

    trial: Trial
    answers: dict[str, Verdict] = field(default_factory=dict[str, Verdict])

    def profile(self, node: str) -> int:
        return self.trial.verdicts.profile(self.trial.wanted, node, self.trial.budget)

    def ask(self, nodes: Iterable[str], *, first: int = 0) -> Iterator[tuple[str, Verdict]]:
        """
        Yield the known results of nodes. Then, if queries are planned, raise
        :class:`.QueriesPendingError`.

        :param first: how many queries to plan at first. After that, as many are planned as already
            have results.
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

    def is_registered(self, node: str) -> bool:
        """Return whether the drivers of the devices found on a node are registered there. A driver
        is treated as registered unless a report states otherwise."""
        drivers = self.answers[node].drivers
        return not any(not_registered(each, node, self.trial.world) for each in drivers)


# ---- pools that are not used


def not_counted(
    world: World, requests: Iterable[Request], nodes: Collection[str], budget: Budget
) -> str:
    """
    Return a clause with the nodes' incomplete pools that could contain devices for exact requests.

    Empty if there are none.
    """
    wanted = tuple(requests)
    on: dict[PoolID, list[str]] = {}
    missing: dict[PoolID, str] = {}
    for node, pool in world.not_ready():
        budget.spend(len(wanted))
        if node not in nodes or pool.state is not PoolState.INCOMPLETE:
            continue
        if any(world.concerns(each, pool.identity.driver) for each in wanted):
            on.setdefault(pool.identity, []).append(node)
            missing.setdefault(pool.identity, pool.missing)
    found = [
        f"pool {identity.pool} on {_where(on[identity])}, {missing[identity]}"
        for identity in sorted(on)
    ]
    return f"not counted: {cut(found, _NAMED)}" if found else ""


def _where(nodes: Sequence[str]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"{len(nodes)} nodes"
