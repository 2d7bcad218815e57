"""
One pod's claims on the nodes of a world: the requests, what each finds, and the search on a node.

The search runs with the facts as they are, or with one of them replaced: :mod:`.shortage` names the
cause and :mod:`.remedies` the change that helps.

It must not know how a result is worded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from drakit_explain.allocation import (
    Allocated,
    Answer,
    Consumed,
    SearchedClaim,
    Selected,
    Selections,
    consumed_of,
)
from drakit_explain.availability import Analysis, needed
from drakit_explain.budget import Budget
from drakit_explain.counting import Availability
from drakit_explain.devices import DeviceFacts, TaintFacts
from drakit_explain.model import ClaimFacts, DeviceID, Request, SliceFacts
from drakit_explain.nodes import Nodes
from drakit_explain.pending_claims import Wanted, exact_requests
from drakit_explain.pools import NodePool
from drakit_explain.profiles import Profiles
from drakit_explain.release import Rules, rules_of
from drakit_explain.search import allocate
from drakit_explain.world import World

_STEPS_PER_REQUEST = 10


class Position(NamedTuple):
    """An exact request among the claims of a pod: a request, or one alternative of a request."""

    claim: int
    request: int
    alternative: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The claims of a pod that must be allocated, and the nodes."""

    world: World
    wanted: Sequence[Wanted]
    nodes: Nodes
    budget: Budget
    analyze: Callable[[Request, Budget], Analysis]
    """Counts the devices of the cluster for an exact request."""

    own: frozenset[str] = frozenset()
    """UIDs of the pod's claims that are allocated: it needs their devices, too."""

    fatal: Sequence[str] = ()
    """Nodes on which the search fails so that the scheduler gives up the pod on all nodes; one of
    those with equal profiles."""

    _analyses: dict[int, Analysis] = field(
        default_factory=dict[int, Analysis], init=False, compare=False
    )
    """By the identity of the request: its hash costs more than most answers."""

    @property
    def rules(self) -> Rules:
        return rules_of(self.world.minor)

    def profiles(self) -> Profiles:
        """Compare nodes for these claims."""
        return Profiles(self.world, self.claims(), self.budget)

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
            node
            for _, exact in exact_requests(request)
            for node in self.analysis(exact).nodes_with(needed(exact), self.budget)
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

    def claims(self) -> list[SearchedClaim]:
        return [each.searched for each in self.wanted]

    def with_request(self, at: Position, exact: Request) -> list[SearchedClaim]:
        """Return the claims with one exact request replaced."""
        claims = self.claims()
        requests = list(claims[at.claim].requests)
        if at.alternative is not None:
            alternatives = list(requests[at.request].alternatives)
            alternatives[at.alternative] = exact
            exact = replace(requests[at.request], alternatives=tuple(alternatives))
        requests[at.request] = exact
        claims[at.claim] = replace(claims[at.claim], requests=tuple(requests))
        return claims

    def allocate(
        self,
        node: str,
        *,
        claims: Sequence[SearchedClaim] | None = None,
        allocated: Allocated | None = None,
        selections: Selections | None = None,
    ) -> Answer:
        """Search devices on a node, as it is unless something is replaced."""
        return allocate(
            self.claims() if claims is None else claims,
            self.pools(node),
            allocated=allocated or self.world,
            selections=selections or self.world,
            budget=self.budget,
            rules=self.rules,
        )


# ---- facts, replaced


class Released(Allocated):
    """The world as it is when claims have released their devices; the devices keep their taints."""

    def __init__(
        self, world: World, claim: ClaimFacts | None = None, *, kept: Collection[str] = ()
    ) -> None:
        """
        :param claim: the only one that has released its devices; None means all.
        :param kept: UIDs of claims that have not.
        """
        self._world = world
        self._claim = claim
        self._kept = kept

    def is_allocated(self, device: DeviceID) -> bool:
        holder = self._world.holder(device)
        return holder is not None and self._holds(holder)

    def is_shared(self, device: DeviceID) -> bool:
        return any(self._holds(each) for each in self._world.sharers(device))

    def consumed(self, device: DeviceID) -> Consumed | None:
        claims = filter(self._holds, self._world.sharers(device))
        return consumed_of(device, (share for claim in claims for share in claim.shares))

    def taints(self, device: DeviceID, facts: DeviceFacts) -> Sequence[TaintFacts]:
        return self._world.taints(device, facts)

    def _holds(self, claim: ClaimFacts) -> bool:
        if claim.uid in self._kept:
            return True
        return self._claim is not None and claim.uid != self._claim.uid


class WithoutSelector(Selections):
    """One selector of one request counts as true."""

    def __init__(self, world: World, request: Request, expression: str) -> None:
        self._world = world
        self._request = request
        self._expression = expression

    def selected(self, request: Request, of: SliceFacts) -> Selected:
        without = self._expression if request == self._request else ""
        return self._world.selected(request, of, without=without)

    def broken(self, request: Request) -> str | None:
        return self._world.broken(request)
