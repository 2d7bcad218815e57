"""
Checks whether a ResourceClaimTemplate's claims, or requests for a DeviceClass, can ever be
allocated.

All devices are treated as free and untainted, because both states can change independently of the
template. Therefore, a problem is certain until other devices are published: no pod with such a
claim can be scheduled. Kubernetes' allocator is queried (:mod:`.queries`), unless device counts and
selectors are sufficient. A selector that fails is reported even if the claim fits on a node,
because the scheduler gives up on all nodes when it reaches such a device. If a fact cannot be
evaluated, or the budget is used up (:mod:`.budget`), nothing is returned. Incomplete pools are
treated as empty, as in the scheduler (:mod:`.pools`).

:mod:`.pending` finds the reason why a pod is pending. Does not depend on clients, clocks, or
Events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from drakit_explain.allocation import MAX_RESULTS, AskedClaim, Failure, NotEvaluatedError
from drakit_explain.availability import budget_of, needed
from drakit_explain.budget import Budget, BudgetSpentError
from drakit_explain.codes import Code, Finding, Reason
from drakit_explain.model import (
    ClassFacts,
    DeviceID,
    Request,
    TemplateFacts,
    exact_of,
    exact_requests,
)
from drakit_explain.pending_claims import missing_classes, what_to_check
from drakit_explain.pools import PoolState, rules_of
from drakit_explain.queries import ALL_FREE, Verdicts
from drakit_explain.selectors import OWN_SELECTOR, selector_of
from drakit_explain.shortage import advice_on_failure, with_device
from drakit_explain.trial import failure_of, not_counted
from drakit_explain.world import Selection, World

STEPS_PER_SLICE = 2
"""How many steps a request's selectors cost per slice."""

FIRST_NODES = 3
"""How many nodes to query first, because most templates fit on one of them. Each further round
includes as many nodes as already have results."""


def template_problems(template: TemplateFacts, world: World, verdicts: Verdicts) -> list[Reason]:
    """
    Return the reasons why no pod with a claim from this template can be scheduled.

    Raises :class:`.QueriesPendingError`.
    """
    verdicts.take()
    origin = f"ResourceClaimTemplate {template.namespace}/{template.name}"
    if missing := missing_classes(template, world):
        return missing
    try:
        nodes = _Nodes(world, verdicts, budget_of(world))
        claim = AskedClaim(requests=template.requests, constraints=template.constraints)
        found = list(_of_claim(claim, nodes))
        note = _note(exact_of(template.requests), world, nodes.budget) if found else ""
    except (BudgetSpentError, NotEvaluatedError, ValueError):
        verdicts.check()
        return []  # ValueError: an amount is not a quantity
    return [
        replace(each, what=f"{each.what}{note}", transient=each.code).about(
            template.reference, f"{origin}: "
        )
        for each in found
    ]


def never_together(claims: Sequence[AskedClaim], world: World, verdicts: Verdicts) -> list[Finding]:
    """
    Return the reasons why no node can have the devices for all claims together, although some nodes
    have devices for each request. A finding about one claim contains the claim's origin.

    Raises :class:`.QueriesPendingError`.
    """
    try:
        return list(_never_together(claims, _Nodes(world, verdicts, budget_of(world))))
    except (BudgetSpentError, NotEvaluatedError, ValueError):
        verdicts.check()
        return []


def _never_together(claims: Sequence[AskedClaim], nodes: _Nodes) -> Iterator[Finding]:
    apart = True
    for claim in claims:
        found = list(_of_claim(claim, nodes))
        apart = apart and not found
        for each in found:
            if each.code in (Code.CONSTRAINT_NOT_MET, Code.REQUESTS_COMPETE):
                yield replace(each, what=f"{claim.origin}: {each.what}", claims=(claim.origin,))
    requests = [each for claim in claims for each in claim.requests]
    if not apart or len(claims) < 2 or not _is_certain(requests, nodes.world, nodes.budget):
        return
    if nodes.fit(*claims) is False and all(nodes.fit(each) for each in claims):
        yield Finding(
            code=Code.REQUESTS_COMPETE,
            what="even if all devices are free, no node has enough for all of its claims "
            "together, although each claim could be allocated by itself; reduce the requests or "
            "add devices to one node",
        )


def class_problems(device_class: ClassFacts, world: World) -> list[Reason]:
    """Return the reasons why no request for this class can be allocated, including a device for
    which the class's selector fails."""
    request = Request(name="", device_class=device_class.name)
    try:
        found = _of_class(request, world, budget_of(world))
    except (BudgetSpentError, NotEvaluatedError):
        return []
    return [replace(each, transient=each.code).about(device_class.reference) for each in found]


def _of_class(request: Request, world: World, budget: Budget) -> list[Finding]:
    matching = _match(request, world, budget)
    if matching.error:
        return [Finding(code=Code.SELECTOR_FAILED, what=matching.error)]
    if matching.by_node or not _is_certain([request], world, budget):
        return []
    return [
        Finding(
            code=Code.NO_DEVICE_PUBLISHED,
            what=f'no published device matches DeviceClass "{request.device_class}"; '
            + what_to_check(request, world, owners="the class")
            + _note([request], world, budget),
        )
    ]


@dataclass(slots=True)
class _Matching:
    """The devices that a request selects, regardless of their holders."""

    by_node: dict[str, int] = field(default_factory=dict[str, int])
    error: str = ""
    """A description of a selector's failure, and the remedy."""


def _match(request: Request, world: World, budget: Budget) -> _Matching:
    found = _Matching(error=_not_compiled(request, world))
    reachable = world.reachable()
    budget.spend(STEPS_PER_SLICE * len(reachable))
    selection = Selection(world, request)
    for reach in reachable:
        of = reach.slice
        selected = selection.of(of)
        for index, text in selected.errors.items() if not found.error else ():
            device = DeviceID(of.driver, of.pool, of.devices.names[index])
            texts = [each for _, each in world.expressions(request)]
            found.error = (
                f"{with_device(text, device)}; the scheduler gives up on all nodes at such a "
                f"device; {advice_on_failure(text, device, texts, world)}"
            )
            break
        for node in reach.nodes if selected.matches else ():
            found.by_node[node] = found.by_node.get(node, 0) + selected.matches.bit_count()
    return found


def _not_compiled(request: Request, world: World) -> str:
    for owner, expression in world.expressions(request):
        try:
            problem = world.selectors.problem(expression) if expression else ""
        except KeyError:
            raise NotEvaluatedError(f"a selector of {owner} is not evaluated yet") from None
        if problem:
            return f"{selector_of(owner)} does not compile: {problem}; correct it"
    return ""


def _is_certain(requests: Sequence[Request], world: World, budget: Budget) -> bool:
    """Return whether all devices that the requests could select are known."""
    if world.unreadable():
        return False
    counts_as_empty = rules_of(world.minor).skips_pools
    exact = exact_of(requests)
    for _, pool in world.not_ready():
        # The pool is treated as empty. An invalid pool is reported separately.
        if counts_as_empty and pool.state is PoolState.INCOMPLETE:
            continue
        budget.spend(len(exact))
        if any(world.concerns(each, pool.identity.driver) for each in exact):
            return False
    return True


def _note(requests: Sequence[Request], world: World, budget: Budget) -> str:
    note = not_counted(world, requests, world.views(), budget)
    return f" ({note})" if note else ""


# ---- a template


def _of_claim(claim: AskedClaim, nodes: _Nodes) -> Iterator[Finding]:
    least = sum(min(needed(exact) for exact in exact_of([each])) for each in claim.requests)
    if least > MAX_RESULTS:
        yield Finding(
            code=Code.REQUESTS_COMPETE,
            what=f"it asks for {least} devices, but an allocation can list only {MAX_RESULTS}; "
            f"reduce the requests",
        )
        return
    failing = False
    for name, exact in (named for each in claim.requests for named in exact_requests(each)):
        error = nodes.match(exact).error
        failing = failing or bool(error)
        # Skip an error in a class's selector, because it is reported for the class.
        if error.startswith(OWN_SELECTOR):
            yield Finding(code=Code.SELECTOR_FAILED, what=f'request "{name}": {error}')
    if failing or not _is_certain(claim.requests, nodes.world, nodes.budget):
        return
    if nodes.fit(claim) is not False:
        return
    alone = {each: nodes.fit(AskedClaim(requests=(each,))) for each in claim.requests}
    for request in (each for each, fits in alone.items() if fits is False):
        nodes.budget.spend(len(nodes.world.slices()))
        yield from (_too_few(name, exact, nodes) for name, exact in exact_requests(request))
    if all(alone.values()):
        yield from _together(claim, nodes)


def _too_few(name: str, request: Request, nodes: _Nodes) -> Finding:
    found = nodes.match(request)
    devices = f'devices of DeviceClass "{request.device_class}"'
    if not found.by_node:
        what = (
            f'no published device of DeviceClass "{request.device_class}" matches request '
            f'"{name}"; {what_to_check(request, nodes.world)}'
        )
    elif (most := max(found.by_node.values())) < request.count:
        what = (
            f'request "{name}" asks for {request.count} {devices} on one node, and no node '
            f"publishes more than {most} that match; lower count or add devices to one node"
        )
    else:
        what = (
            f'request "{name}" selects {devices}, but no node has enough capacity or counters for '
            f"it, even if all devices are free; lower count or capacity.requests"
        )
    return Finding(code=Code.NO_DEVICE_PUBLISHED, what=what)


def _together(claim: AskedClaim, nodes: _Nodes) -> Iterator[Finding]:
    without = nodes.fit(replace(claim, constraints=())) if claim.constraints else False
    if without is None:
        return
    if without:
        attributes = ", ".join(dict.fromkeys(each.attribute for each in claim.constraints))
        yield Finding(
            code=Code.CONSTRAINT_NOT_MET,
            what=f"no node publishes devices that satisfy its constraints on {attributes}, even if "
            f"all devices are free; relax the constraints or add devices",
        )
        return
    yield Finding(
        code=Code.REQUESTS_COMPETE,
        what="even if all devices are free, no node has enough for all of its requests together, "
        "although each request could be allocated by itself; reduce the requests or add devices to "
        "one node",
    )


_PASSING = (Failure.INCOMPLETE_POOL, Failure.INVALID_POOL)
"""Errors about pools, which do not depend on the template."""


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Queries the allocator about all nodes."""

    world: World
    verdicts: Verdicts
    budget: Budget
    matching: dict[Request, _Matching] = field(default_factory=dict[Request, _Matching])

    def match(self, exact: Request) -> _Matching:
        found = self.matching.get(exact)
        if found is None:
            found = self.matching[exact] = _match(exact, self.world, self.budget)
        return found

    def fit(self, *claims: AskedClaim) -> bool | None:
        """Return whether a node has devices for claims. None if that is undecided."""
        undecided, answered = False, 0
        known: set[int] = set()
        requests = [each for claim in claims for each in claim.requests]
        for name in self.world.views():
            self.budget.spend(len(requests))
            if not all(self._may(each, name) for each in requests):
                continue
            profile = self.verdicts.profile(claims, name, self.budget, ALL_FREE)
            if profile in known:
                continue
            known.add(profile)
            verdict = self.verdicts.find(claims, name, self.budget, ALL_FREE)
            if verdict is None:
                if self.verdicts.planned >= max(FIRST_NODES, answered):
                    break
                continue
            if verdict.fits:
                return True
            answered += 1
            undecided = undecided or verdict.undecided or failure_of(verdict.text) in _PASSING
        self.verdicts.check()
        return None if undecided else False

    def _may(self, request: Request, node: str) -> bool:
        return any(
            self.match(exact).by_node.get(node, 0) >= needed(exact) for exact in exact_of([request])
        )
