"""
One pod's claims on the nodes of a world: the requests, what each finds, and the allocator's answer
about a node.

The allocator is asked about the facts as they are, or with one of them replaced: :mod:`.shortage`
names the cause and :mod:`.remedies` the change that helps. What differs between errors in a
sentence is read from the allocator's text; the device and the pool are those of the node at hand,
because the allocator was perhaps asked about another one with an equal profile.

Does not depend on how a result is worded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from drakit_explain.allocation import MAX_RESULTS, Answer, AskedClaim, Failure
from drakit_explain.asking import NO_CHANGES, Changes, Verdicts
from drakit_explain.availability import Analysis
from drakit_explain.bodies import claim_name
from drakit_explain.budget import Budget
from drakit_explain.counting import Availability
from drakit_explain.model import PoolID, Request, exact_of, exact_requests
from drakit_explain.nodes import Nodes
from drakit_explain.pending_claims import Wanted
from drakit_explain.pools import NodePool, PoolState
from drakit_explain.release import Rules, rules_of
from drakit_explain.verdicts import Verdict, VerdictOutcome
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
    """The claims of a pod that must be allocated, and the nodes."""

    world: World
    verdicts: Verdicts
    wanted: Sequence[Wanted]
    nodes: Nodes
    budget: Budget
    analyze: Callable[[Request, Budget], Analysis]
    """Counts the devices of the cluster for an exact request."""

    own: frozenset[str] = frozenset()
    """UIDs of the pod's claims that are allocated: it needs their devices, too."""

    fatal: Sequence[str] = ()
    """Nodes with an error because of which the scheduler gives up the pod on all nodes; one node of
    each profile."""

    claims: tuple[AskedClaim, ...] = field(default=(), init=False, compare=False)

    _analyses: dict[int, Analysis] = field(
        default_factory=dict[int, Analysis], init=False, compare=False
    )
    """By the identity of the request: its hash costs more than most answers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "claims", tuple([each.asked for each in self.wanted]))

    @property
    def rules(self) -> Rules:
        return rules_of(self.world.minor)

    def analysis(self, exact: Request) -> Analysis:
        """Return the devices of the cluster for an exact request of `wanted`."""
        self.budget.spend()
        found = self._analyses.get(id(exact))
        if found is None:
            self.budget.spend(_STEPS_PER_REQUEST + 5 * len(exact.tolerations))
            found = self._analyses[id(exact)] = self.analyze(exact, self.budget)
        return found

    def found(self, exact: Request) -> Availability:
        """Return the devices of an exact request on the nodes."""
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
        """Name the nodes that the pod can use."""
        return (name for name, problem in self.nodes.items() if problem is None)

    def is_usable(self, node: str) -> bool:
        return node in self.nodes and self.nodes[node] is None

    def pools(self, node: str) -> Sequence[NodePool]:
        return self.world.pools_of_node(self.world.views()[node])

    def able(self, request: Request) -> set[str]:
        """Return the nodes with enough free devices for one request alone."""
        return {
            node for exact in exact_of([request]) for node in self.analysis(exact).able(self.budget)
        }

    def able_for_all(self) -> set[str]:
        """Return the nodes with enough free devices for each request alone."""
        able: set[str] | None = None
        for request in self.requests():
            found = self.able(request)
            able = found if able is None else able & found
        return set(self.nodes) if able is None else {name for name in able if name in self.nodes}

    def not_ready(self) -> Iterator[NodePool]:
        """Return the pools of usable nodes from which nothing is allocated."""
        return (pool for node, pool in self.world.not_ready() if self.is_usable(node))

    def concerns(self, pool: NodePool) -> bool:
        """Return whether a request could select devices of a pool that is not ready."""
        exact = [each for _, _, each in self.exact()]
        self.budget.spend(len(exact))
        return any(self.world.concerns(each, pool.identity.driver) for each in exact)

    def with_request(self, at: Position, exact: Request) -> list[AskedClaim]:
        """Return the claims with one exact request replaced."""
        claims = list(self.claims)
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
    ) -> Answer | None:
        """Return the allocator's answer about a node, as it is unless something is replaced; None
        if the question is planned."""
        self.budget.spend(_STEPS_PER_ANSWER)
        verdict = self.verdicts.find(
            self.claims if claims is None else claims, node, self.budget, changes
        )
        return None if verdict is None else self._answer(verdict, node)

    def _answer(self, verdict: Verdict, node: str) -> Answer:
        if verdict.outcome is not VerdictOutcome.FATAL:
            return Answer(outcome=verdict.outcome, failure=verdict.text, results=verdict.results)
        kind = failure_of(verdict.text)
        text = f"Kubernetes' allocator fails ({self._with_origins(verdict.text)})"
        answer = Answer(
            outcome=verdict.outcome, failure=text, kind=Failure.OTHER, varies=verdict.varies
        )
        match kind:
            case Failure.SELECTOR:
                return self._failed(answer, verdict.text, node)
            case Failure.INCOMPLETE_POOL | Failure.INVALID_POOL:
                return self._of_pool(answer, kind, verdict.text, node)
            case Failure.CONSTRAINT:
                what = (
                    f"{self._subject(verdict.text)} asks for all devices, and a constraint of the "
                )
                return replace(answer, kind=kind, failure=f"{what}claim excludes one of them")
            case Failure.TOO_MANY:
                return replace(answer, kind=kind, failure=self._too_many(verdict.text))
            case Failure.OTHER:
                return answer

    def _failed(self, answer: Answer, text: str, node: str) -> Answer:
        """Return an answer about a selector with the device on which it fails."""
        found = [
            (name, self.wanted[at.claim].origin, error)
            for at, name, exact in self.exact()
            for error in self.analysis(exact).errors
            if node in error.nodes
        ]
        if not found:
            return answer
        named = _DEVICE.search(text)
        found.sort(key=lambda each: named is not None and each[2].device.device != named[1])
        name, origin, error = found[0]
        return replace(
            answer,
            kind=Failure.SELECTOR,
            failure=f'request "{name}" of {origin}: {error.text}',
            device=error.device,
        )

    def _of_pool(self, answer: Answer, kind: Failure, text: str, node: str) -> Answer:
        """Return an answer about a pool that is not ready."""
        invalid = kind is Failure.INVALID_POOL
        state = PoolState.INVALID if invalid else PoolState.INCOMPLETE
        every = _ALL.search(text)
        named = PoolID(every[1], every[2]) if every is not None else None
        pools = [each for each in self.pools(node) if each.state is state or each.elsewhere]
        pools.sort(key=lambda each: (each.identity != named, each.state is not state))
        if not pools:
            return replace(answer, kind=kind)
        driver, name = pool = pools[0].identity
        what = f"pool {name} of driver {driver} is {state.value}"
        if every is not None:
            what = f"{self._subject(text)} asks for all devices, but {what}"
        elif invalid:
            what = f"{what}: {pools[0].problem}"
        return replace(answer, kind=kind, failure=what, pool=pool)

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
        """Return the claim that the allocator names."""
        named = _CLAIM.search(text)
        number = int(named[1]) if named is not None else 0
        return self.wanted[min(number, len(self.wanted) - 1)]

    def _subject(self, text: str) -> str:
        named = _REQUEST.search(text)
        return f'request "{named[1] if named is not None else ""}" of {self._claim(text).origin}'

    def _with_origins(self, text: str) -> str:
        for number, each in enumerate(self.wanted):
            text = text.replace(f"claim {claim_name(number)}", each.origin)
        return text


# ---- the allocator's errors (structured/internal in k8s.io/dynamic-resource-allocation)

_CLAIM = re.compile(rf"claim {claim_name(0)[:-1]}(\d+)")
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
    """Return the kind of an error of the allocator."""
    return next((kind for kind, of in _FAILURES.items() if of.search(text)), Failure.OTHER)
