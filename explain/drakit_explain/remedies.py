"""
Finds single changes that would make a pod fit. The allocator proves each of them with one fact
replaced.

Each kind of change is tried on few nodes: removing a claim, tolerating a taint, dropping a
constraint, selector or request, reducing a count, or allowing one more node. A change is named only
if the allocator succeeds with it. All changes share a budget, so a remedy may be missing, but is
never wrong.

:mod:`.shortage` finds the reason why the pod does not fit. Does not depend on clients or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import nsmallest
from typing import NamedTuple

from drakit_explain.allocation import MAX_RESULTS, AskedClaim, NotEvaluatedError
from drakit_explain.availability import NOTHING, Hardware, Tally, needed, not_tolerated
from drakit_explain.budget import BudgetSpentError
from drakit_explain.devices import DeviceFacts, TaintFacts, bits
from drakit_explain.model import (
    ClaimFacts,
    DeviceID,
    PolicyFacts,
    Request,
    SliceFacts,
    Toleration,
    exact_of,
)
from drakit_explain.nodes import NodeProblem, Unusable, is_condition
from drakit_explain.pools import NodePool
from drakit_explain.queries import NO_CHANGES, Changes, QueriesPendingError, Released
from drakit_explain.reports import HOSTDEV
from drakit_explain.selectors import THE_REQUEST
from drakit_explain.trial import Position, Trial
from drakit_explain.wording import named_holder, shown
from drakit_explain.world import Name, Selection, World

MAX_NODES = 3
"""Maximum number of nodes to try one kind of change on."""

MAX_CHANGES = 8
"""Maximum number of changes of one kind to try on a node, such as removing different holders."""

MAX_REMEDIES = 3

MAX_PLANNED = 4
"""Maximum number of queries to plan at a time. After the first change of a kind that helps, no more
changes of this kind are tried."""

_STEPS_PER_CHANGE = 10
_STEPS_PER_HOLDER = 3
"""How many steps it costs to find the holders of a device, if the devices of a slice must be
checked one by one: they have separate node selections, or claims have shares of devices."""

_OWN_TAINTS = "drakit.dev/"


class _Change(NamedTuple):
    node: str
    clause: str
    """The condition on the node, for a sentence with "if"."""

    claims: Sequence[AskedClaim] | None = None
    """The pod's claims with the change. None if they are unchanged."""

    facts: Changes = NO_CHANGES


def proven_remedies(
    trial: Trial, *, reader: str | None, usable_after: Callable[[str], bool]
) -> str:
    """
    Return a clause with changes, each of which is enough by itself. Empty if no change is proven.

    :param reader: the namespace whose holders may be named. None means that all holders may be
        named.
    :param usable_after: returns whether the pod could use a node if the node's current problem were
        resolved.

    Raises :class:`QueriesPendingError`.
    """
    try:
        search = _Remedies(trial, reader, usable_after)
    except BudgetSpentError:
        return ""
    found: dict[str, list[str]] = {}
    kinds = (
        search.without_failing_selectors,
        search.without_a_holder,
        search.with_a_toleration,
        search.without_a_constraint,
        search.with_a_smaller_count,
        search.on_another_node,
        search.without_a_selector,
        search.without_a_request,
    )
    number = 0
    for kind in kinds:
        try:
            remedy = next(filter(search.fits, kind()), None)
            trial.verdicts.check()
        except (NotEvaluatedError, ValueError):
            continue  # the change involves devices or selectors that cannot be evaluated
        except BudgetSpentError:
            # If queries are planned, end here: when the explanation is repeated, they no longer
            # take steps.
            trial.verdicts.check()
            break
        if remedy is not None:
            found.setdefault(remedy.node, []).append(f"if {remedy.clause}")
            number += 1
        if number == MAX_REMEDIES:
            break
    if not found:
        return ""
    parts = [f"on node {node} {', or '.join(clauses)}" for node, clauses in found.items()]
    return f"the pod would fit {'; or '.join(parts)}"


class _Remedies:
    """Tries changes of each kind in the order in which a user would apply them."""

    def __init__(
        self, trial: Trial, reader: str | None, usable_after: Callable[[str], bool]
    ) -> None:
        self._trial = trial
        self._world = trial.world
        self._reader = reader
        self._usable_after = usable_after
        self._nodes = self._best_nodes()

    def _best_nodes(self) -> list[str]:
        """Return the usable nodes that lack the least: those with the most matching devices first,
        then those with the most free devices."""
        matching: dict[str, float] = {}
        free: dict[str, int] = {}
        for request in self._trial.requests():
            shares: dict[str, float] = {}
            most: dict[str, int] = {}
            for exact in exact_of([request]):
                found = self._trial.analysis(exact)
                self._trial.budget.spend(len(found.on_nodes))
                least = needed(exact)
                for name, number in found.on_nodes.items():
                    shares[name] = max(shares.get(name, 0.0), min(number.total / least, 1.0))
                    most[name] = max(most.get(name, 0), number.free)
            for name, share in shares.items():
                matching[name] = matching.get(name, 0.0) + share
                free[name] = free.get(name, 0) + most[name]
        return nsmallest(
            MAX_NODES,
            filter(self._trial.is_usable, matching),
            key=lambda name: (-matching[name], -free[name], name),
        )

    def _nodes_with(self, enough: Callable[[Tally, Request], bool]) -> list[str]:
        """Return the nodes that have enough devices after a kind of change, according to the
        counts. On the other nodes, the allocator's search would take the longest."""
        requests = [exact_of([each]) for each in self._trial.requests()]
        return [
            name
            for name in self._nodes
            if all(any(enough(self._tally(name, each), each) for each in of) for of in requests)
        ]

    def _tally(self, node: str, exact: Request) -> Tally:
        return self._trial.analysis(exact).on_nodes.get(node, NOTHING)

    def fits(self, change: _Change) -> bool:
        """Return whether, with a change, the claims can be allocated on the node, and the other
        nodes do not cause an error."""
        answers = [
            self._trial.ask(name, claims=change.claims, changes=change.facts)
            for name in dict.fromkeys((change.node, *self._trial.fatal))
        ]
        if self._trial.verdicts.planned >= MAX_PLANNED:
            raise QueriesPendingError
        first = answers[0]
        return first is not None and first.fits and all(each and not each.fatal for each in answers)

    def _request(self, at: Position, name: str) -> str:
        wanted = self._trial.wanted
        of = f" of {wanted[at.claim].origin}" if len(wanted) > 1 else ""
        return f'request "{name}"{of}'

    # ---- kinds of change

    def without_failing_selectors(self) -> Iterator[_Change]:
        failing = dict.fromkeys(
            node
            for _, _, exact in self._trial.exact()
            for error in self._trial.analysis(exact).errors
            for node in error.nodes
        )
        usable = [name for name in failing if self._trial.nodes.get(name) is None]
        for node in usable[:MAX_NODES]:
            yield _Change(node, "no selector failed there", facts=Changes(without_errors=True))

    def without_a_holder(self) -> Iterator[_Change]:
        exact = [each for _, _, each in self._trial.exact() if not each.admin_access]
        selections = [Selection(self._world, each) for each in exact]
        for node in self._nodes_with(Tally.would_do):
            of_node: dict[str, ClaimFacts] = {}
            for pool in self._trial.pools(node):
                for of in (*pool.slices, *pool.elsewhere) if pool.counters else pool.slices:
                    for selection in selections:
                        of_node |= self._holders(of, pool, selection)
            for uid in self._trial.own:
                of_node.pop(uid, None)
            here = list(of_node.values())
            here.sort(key=self._order)
            for claim in here[:MAX_CHANGES]:
                clause = f"{self._named(claim)} released its devices"
                yield _Change(node, clause, facts=self._released(claim.uid))
            if here:
                clause = "other claims released their devices"
                yield _Change(node, clause, facts=self._released())

    def _holders(
        self, of: SliceFacts, pool: NodePool, selection: Selection
    ) -> dict[str, ClaimFacts]:
        """Return the claims that may have to release devices or counters in a slice, keyed by
        UID."""
        world, matches = self._world, selection.of(of).matches
        one_by_one = of.by_device or world.has_shares
        self._trial.budget.spend(1 + _STEPS_PER_HOLDER * (len(of.devices) if one_by_one else 0))
        if of.by_device:
            matches = sum(1 << index for index in bits(matches) if pool.reaches(of, index))
        # With counters, include devices that are not selected, because they also consume counters.
        held = world.allocated_in(of) & (-1 if of.devices.consumes else matches)
        found = dict(world.holders_in(of, held))
        for index in bits(matches) if world.has_shares else ():
            sharers = world.sharers(DeviceID(of.driver, of.pool, of.devices.names[index]))
            found |= {claim.uid: claim for claim in sharers}
        return found

    def _released(self, claim: str | None = None) -> Changes:
        return Changes(released=Released(claim, self._trial.own))

    def _order(self, claim: ClaimFacts) -> tuple[object, ...]:
        """Return a sort key for claims: those that the reader may see first, then those that hold
        the most devices."""
        return (claim.namespace != self._reader, -len(claim.results), claim.namespace, claim.name)

    def _named(self, claim: ClaimFacts) -> str:
        if self._reader in (None, claim.namespace):
            return named_holder(claim)
        return "a claim in another namespace"

    def with_a_toleration(self) -> Iterator[_Change]:
        for node in self._nodes_with(partial(Tally.would_do, untainted=True)):
            for at, name, exact in self._trial.exact():
                taints = self._taints(node, exact)
                together = [taints] if len(taints) > 1 else []
                for some in [*([taint] for taint in taints), *together]:
                    claims = self._trial.with_request(at, _tolerating(exact, some))
                    yield _Change(node, _tolerated(self._request(at, name), some), claims)

    def _taints(self, node: str, exact: Request) -> list[TaintFacts]:
        """Return the taints of the devices that a request selects on a node, except for those that
        the request tolerates."""
        if not self._trial.found(exact).tainted.devices:
            return []
        found: dict[tuple[str, str], TaintFacts] = {}
        for pool in self._trial.pools(node):
            for each in pool.slices:
                matches = self._world.selected(exact, each).matches
                self._trial.budget.spend(_STEPS_PER_CHANGE + 2 * matches.bit_count())
                for index in bits(matches):
                    device = each.devices[index]
                    identity = DeviceID(each.driver, each.pool, device.name)
                    taints = self._world.taints(identity, device)
                    for taint in not_tolerated(taints, exact.tolerations):
                        found[taint.key, taint.effect] = taint
        return [found[key] for key in sorted(found)][:MAX_CHANGES]

    def without_a_constraint(self) -> Iterator[_Change]:
        wanted = self._trial.wanted
        several = sum(len(each.constraints) for each in wanted) > 1
        for node in self._nodes_with(Tally.suffices):
            for number, each in enumerate(wanted):
                for index, constraint in enumerate(each.constraints[:MAX_CHANGES]):
                    what = f"{constraint.kind} {constraint.attribute}"
                    clause = f"{each.origin} did not have the constraint {what}"
                    yield _Change(node, clause, self._trial.without_constraint(number, index))
            if several:
                claims = self._trial.without_constraints()
                yield _Change(node, "there were no constraints", claims)

    def with_a_smaller_count(self) -> Iterator[_Change]:
        for node in self._nodes:
            for at, name, exact in self._trial.exact():
                if most := self._most(node, at, exact):
                    instead = "all devices" if exact.every else str(exact.count)
                    clause = f"{self._request(at, name)} asked for {most} instead of {instead}"
                    claims = self._trial.with_request(at, replace(exact, count=most))
                    yield _Change(node, clause, claims)

    def _most(self, node: str, at: Position, exact: Request) -> int:
        """Return the highest count with which the request would fit, or 0."""
        least, most = 0, (MAX_RESULTS if exact.every else min(exact.count - 1, MAX_RESULTS))
        most = min(most, self._tally(node, exact).free)
        while least < most:
            count = (least + most + 1) // 2
            claims = self._trial.with_request(at, replace(exact, count=count))
            if self.fits(_Change(node, "", claims)):
                least = count
            else:
                self._trial.verdicts.check()  # the next count depends on this one
                most = count - 1
        return least

    def on_another_node(self) -> Iterator[_Change]:
        able = self._trial.able_for_all()
        candidates = (
            (name, problem)
            for name in sorted(able)
            if (problem := self._trial.nodes[name]) is not None
        )
        for number, (name, problem) in enumerate(candidates):
            if number == MAX_CHANGES:
                return
            if self._usable_after(name):
                yield _Change(name, _usable_if(problem))

    def without_a_selector(self) -> Iterator[_Change]:
        for at, name, exact in self._trial.exact():
            analysis = self._trial.analysis(exact)
            failing = bool(analysis.errors)
            for owner, expression, number in analysis.rejected:
                # Don't suggest dropping a class's selector: the class belongs to an admin, and
                # determines which devices its users may get.
                if owner != THE_REQUEST or not (number or failing):
                    continue
                for node in self._most_selected(exact, expression):
                    kept = tuple(each for each in exact.selectors if each != expression)
                    claims = self._trial.with_request(at, replace(exact, selectors=kept))
                    only = sum(each == owner for each, _, _ in analysis.rejected) == 1
                    which = "no selector" if only else f"no selector {shown(expression)}"
                    yield _Change(node, f"{self._request(at, name)} had {which}", claims)

    def _most_selected(self, exact: Request, expression: str) -> list[str]:
        """Return the usable nodes that would have the most devices if an expression were
        dropped."""
        counts: dict[str, int] = {}
        reachable = self._world.reachable()
        self._trial.budget.spend(3 * len(reachable))
        selection = Selection(self._world, exact, without=expression)
        for reach in reachable:
            if number := selection.of(reach.slice).matches.bit_count():
                for node in reach.nodes:
                    if self._trial.nodes.get(node) is None:
                        counts[node] = counts.get(node, 0) + number
        return nsmallest(MAX_NODES, counts, key=lambda name: (-counts[name], name))

    def without_a_request(self) -> Iterator[_Change]:
        if sum(1 for _ in self._trial.requests()) < 2:
            return
        for node in self._nodes:
            for number, each in enumerate(self._trial.wanted):
                for index, request in enumerate(each.requests[:MAX_CHANGES]):
                    claims: list[AskedClaim] = list(self._trial.wanted)
                    rest = (*each.requests[:index], *each.requests[index + 1 :])
                    claims[number] = replace(claims[number], requests=rest)
                    what = self._request(Position(number, index, None), request.name)
                    yield _Change(node, f"the pod did not have {what}", claims)


# ---- a device that is gone


def replaced_device(
    gone: Iterable[DeviceID], requests: Sequence[Request], node: str, world: World
) -> str:
    """
    Return the device that a new pod would get instead of a missing one, and how, as a clause.

    :param gone: devices of the pod that are gone, but still published.
    :param requests: the requests of the new pod.
    :param node: the node where the new pod fits.
    """
    for device in gone:
        for exact in exact_of(requests):
            selection = Selection(world, exact)
            old = _selected_device(device, selection, world)
            if old is not None and (name := _free(device.driver, exact, selection, node, world)):
                then = "delete the pod, and a pod that replaces it gets that device"
                policy = old.attribute("policy", HOSTDEV) if device.driver == HOSTDEV else None
                facts = world.of(PolicyFacts).get(Name("", str(policy)))
                if facts is not None and not facts.evicts:
                    then += (
                        f"; with onVanish: Evict in HostDevicePolicy {policy}, Kubernetes deletes "
                        "such a pod"
                    )
                return f"device {name} on node {node} matches and is free: {then}"
    return ""


def _selected_device(device: DeviceID, selection: Selection, world: World) -> DeviceFacts | None:
    for of in world.slices_of_pool(device.of_pool):
        for index in bits(selection.of(of).matches):
            if of.devices.names[index] == device.device:
                return of.devices[index]
    return None


def _free(driver: str, exact: Request, selection: Selection, node: str, world: World) -> str | None:
    """Return a driver's free device that a request selects on a node. Devices that can be shared
    are excluded."""
    hardware = Hardware(world)
    for pool in world.pools_of_node(world.views()[node]):
        for of in pool.slices if pool.identity.driver == driver else ():
            for index in bits(selection.of(of).matches & ~world.allocated_in(of)):
                device = of.devices[index]
                if not pool.reaches(of, index) or hardware.in_the_way(pool, device) is not None:
                    continue
                taints = world.taints(DeviceID(driver, of.pool, device.name), device)
                if not device.kind.shareable and not not_tolerated(taints, exact.tolerations):
                    return device.name
    return None


def _tolerating(exact: Request, taints: Sequence[TaintFacts]) -> Request:
    added = (Toleration(key=each.key, operator="Exists", effect=each.effect) for each in taints)
    return replace(exact, tolerations=(*exact.tolerations, *added))


def _tolerated(request: str, taints: Sequence[TaintFacts]) -> str:
    names = ", ".join(f"{each.key}:{each.effect}" for each in taints)
    plural = "s" if len(taints) > 1 else ""
    if all(each.key.startswith(_OWN_TAINTS) for each in taints):
        return f"the taint{plural} {names} of the devices were removed"
    return f"{request} tolerated the taint{plural} {names}"


def _usable_if(problem: Unusable) -> str:
    match problem.problem:
        case NodeProblem.SELECTOR:
            return "the pod's node selector and affinity allowed that node"
        case NodeProblem.TAINT:
            if is_condition(problem.detail):
                return f"that node lost the taint {problem.detail}"
            return f"the pod tolerated the node's taint {problem.detail}"
        case NodeProblem.CORDONED:
            return "that node were not cordoned"
        case NodeProblem.RESOURCES:
            return f"that node had enough resources left ({problem.detail})"
        case NodeProblem.CLAIM:
            return f"claim {problem.detail} were allocated there"
