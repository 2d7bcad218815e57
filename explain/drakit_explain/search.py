"""
The search of :mod:`.allocation`: it follows the scheduler's allocator step by step.

It keeps the order and the odd cases of the allocator of
``k8s.io/dynamic-resource-allocation/structured``, because the order decides which selector error is
reached first. Two things differ. Devices that are alike for all requests are tried once. And the
search ends after a number of steps (:mod:`.budget`), with the answer *undecided*.

:mod:`.release` has the rules that differ between the releases of Kubernetes.

It must not know clients, nodes beyond their pools, CEL, or how an answer is worded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from drakit_explain.allocation import (
    MAX_RESULTS,
    Allocated,
    Answer,
    Consumed,
    Failure,
    NotEvaluatedError,
    Outcome,
    SearchedClaim,
    SearchedConstraint,
    SearchedCounters,
    Selections,
    WithoutErrors,
    consumed_by,
    not_supported,
    short_capacities,
    tolerates,
)
from drakit_explain.budget import Budget, BudgetSpentError
from drakit_explain.devices import DeviceFacts, TaintFacts, bits
from drakit_explain.model import DeviceID, PoolID, Request
from drakit_explain.pools import NodePool, PoolState
from drakit_explain.release import NEWEST, Rules

MAX_DEVICES = 256
"""Devices that the claims of a pod can take together, plus the requests with alternatives: the
depth of the recursion."""

STEPS_PER_PLAN = 2
"""Steps of a request, and of its selectors in a slice."""

STEPS_PER_DEVICE = 3
"""Steps of a device that is compared, or tried. Each constraint that is checked is one more."""

STEPS_PER_CAPACITY = 4
"""Steps of each capacity of a device that is compared."""


def allocate(
    claims: Sequence[SearchedClaim],
    pools: Sequence[NodePool],
    *,
    allocated: Allocated,
    selections: Selections,
    budget: Budget,
    rules: Rules = NEWEST,
) -> Answer:
    """
    Search devices of a node for all claims of a pod that are not allocated yet.

    :param claims: in the order of the pod's ``spec.resourceClaims``.
    :param pools: the node's pools, in the order of :func:`.pools.pools_of_node`.

    Raises :class:`BudgetSpentError` if nothing is left of the budget.
    """
    if budget.left <= 0:
        raise BudgetSpentError
    # Half of what is left, so that one node with a long search does not hide the others.
    half = budget.left // 2
    part = Budget(half)
    try:
        return _allocate(claims, pools, allocated, selections, part, rules)
    except BudgetSpentError:
        return Answer(outcome=Outcome.UNDECIDED)
    except NotEvaluatedError as error:
        return Answer(outcome=Outcome.UNDECIDED, failure=str(error))
    finally:
        budget.left -= half - part.left


def _allocate(
    claims: Sequence[SearchedClaim],
    pools: Sequence[NodePool],
    allocated: Allocated,
    selections: Selections,
    budget: Budget,
    rules: Rules,
    *,
    constraint_fails: bool = True,
) -> Answer:
    search = _Search(claims, pools, allocated, selections, budget, rules, constraint_fails)
    try:
        search.prepare()
        found = search.next_device(_At(), alternative=False, start=0)
    except _FailedError as error:
        is_of_constraint = error.kind is Failure.CONSTRAINT
        if not search.in_any_order or (error.device is None and not is_of_constraint):
            return error.answer()
        # In another order, the allocator may meet a device that is in use before this error, and
        # then tries the next alternative.
        answer = _allocate(
            claims,
            pools,
            allocated,
            selections if is_of_constraint else WithoutErrors(selections),
            budget,
            rules,
            constraint_fails=constraint_fails and not is_of_constraint,
        )
        return error.answer(chance=answer.outcome is Outcome.FITS)
    except _TooManyError:
        found = False
    if found and search.in_any_order and search.errors:
        return search.errors[0].answer(chance=True)
    bad = next((pool for pool in pools if pool.state is PoolState.INVALID), None)
    if bad is not None and not (found and rules.skips_pools):
        kind = Failure.ON_NODE if rules.skips_pools else Failure.INVALID_POOL
        return _invalid(bad, kind).answer(chance=found)
    if found:
        return Answer(outcome=Outcome.FITS, devices=tuple(search.results()))
    return Answer(outcome=Outcome.NO_FIT)


class _FailedError(Exception):
    def __init__(
        self,
        kind: Failure,
        text: str,
        *,
        device: DeviceID | None = None,
        pool: PoolID | None = None,
    ) -> None:
        super().__init__(text)
        self.kind = kind
        self.device = device
        self.pool = pool

    def answer(self, *, chance: bool = False) -> Answer:
        return Answer(
            outcome=Outcome.FAILED,
            failure=str(self),
            kind=self.kind,
            device=self.device,
            pool=self.pool,
            chance=chance,
        )


def _invalid(pool: NodePool, kind: Failure) -> _FailedError:
    driver, name = pool.identity
    return _FailedError(
        kind, f"pool {name} of driver {driver} is invalid: {pool.problem}", pool=pool.identity
    )


class _TooManyError(Exception):
    """More devices than a claim's allocation can list: other alternatives may need fewer."""


@dataclass(frozen=True, slots=True)
class _At:
    """The position of the search: one device of one request of one claim."""

    claim: int = 0
    request: int = 0
    alternative: int = 0
    device: int = 0


@dataclass(eq=False, slots=True)
class _Candidate:
    """A device of the node that a request can select; one object a device."""

    identity: DeviceID
    facts: DeviceFacts
    pool: NodePool
    members: int = 0
    """A bit for each plan that selects it."""

    taints: Sequence[TaintFacts] = ()
    alike: int = 0
    """Equal for devices that make no difference to the search."""


@dataclass(slots=True)
class _Plan:
    """A request, or one alternative, with its candidates in the allocator's order."""

    claim: str
    request: Request
    parent: str
    """The name of the request that has this alternative, or the empty string."""

    candidates: list[_Candidate | _FailedError]
    count: int

    @property
    def base(self) -> str:
        return self.parent or self.request.name

    @property
    def name(self) -> str:
        return f"{self.parent}/{self.request.name}" if self.parent else self.request.name


class _Search:
    def __init__(
        self,
        claims: Sequence[SearchedClaim],
        pools: Sequence[NodePool],
        allocated: Allocated,
        selections: Selections,
        budget: Budget,
        rules: Rules,
        constraint_fails: bool,
    ) -> None:
        self._claims = claims
        self._constraint_fails = constraint_fails
        """Whether a constraint that excludes a device of a request for all devices is an error."""
        self._pools = pools
        self._allocated = allocated
        self._selections = selections
        self._spend = budget.spend
        self._rules = rules
        self.errors: list[_FailedError] = []
        """Of devices that the allocator may reach, depending on its order."""

        self._plans: dict[tuple[int, int, int], _Plan] = {}
        self._devices: dict[DeviceID, _Candidate] = {}
        self._failing: dict[DeviceID, int] = {}
        """A bit for each plan in which a selector fails at the device."""
        self._constraints: list[list[SearchedConstraint]] = []
        self._counters = SearchedCounters(
            lambda device: allocated.is_allocated(device) or allocated.is_shared(device),
            budget,
            by_driver=rules.counters_by_driver,
        )
        self._skips_alike = True
        self._in_use: dict[DeviceID, set[int]] = {}
        self._shares: dict[DeviceID, list[Consumed]] = {}
        self._taken: list[list[tuple[str, DeviceID]]] = [[] for _ in claims]

    def results(self) -> Iterator[tuple[str, str, DeviceID]]:
        for claim, taken in zip(self._claims, self._taken, strict=True):
            for request, device in taken:
                yield claim.name, request, device

    @property
    def in_any_order(self) -> bool:
        """Whether the order in which the scheduler tries devices is chance."""
        several = sum(len(pool.slices) for pool in self._pools) > 1
        return several and not self._rules.sorts_pools

    # ---- before the search

    def prepare(self) -> None:
        """Plan each request, in the allocator's order: the first error ends the search."""
        depth = 0
        for number, claim in enumerate(self._claims):
            least = sum(self._plan(number, index) for index in range(len(claim.requests)))
            if least > MAX_RESULTS:
                raise _FailedError(
                    Failure.TOO_MANY,
                    f"{claim.name} asks for {least} devices, but an allocation can "
                    f"list only {MAX_RESULTS}",
                )
            depth += self._depth(number, claim)
            if not all(each.attribute for each in claim.constraints):
                raise NotEvaluatedError(
                    f"a constraint of {claim.name} is of a kind that drakit does not support"
                )
            forgets = self._rules.forgets_values
            self._constraints.append(
                [SearchedConstraint(each, forgets=forgets) for each in claim.constraints]
            )
        if depth > MAX_DEVICES:
            raise NotEvaluatedError(f"the pod's claims ask for more than {MAX_DEVICES} devices")
        self._compare()

    def _depth(self, number: int, claim: SearchedClaim) -> int:
        most = listed = 0
        for index, request in enumerate(claim.requests):
            alternatives = range(len(request.alternatives) or 1)
            most += max(self._plans[number, index, each].count for each in alternatives)
            listed += bool(request.alternatives)
        return min(most, MAX_RESULTS) + listed

    def _plan(self, claim: int, index: int) -> int:
        """Plan a request and its alternatives; return how many devices it takes at least."""
        request = self._claims[claim].requests[index]
        if not request.alternatives:
            return self._plan_exact((claim, index, 0), request, parent="")
        return min(
            self._plan_exact((claim, index, number), each, parent=request.name)
            for number, each in enumerate(request.alternatives)
        )

    def _plan_exact(self, key: tuple[int, int, int], request: Request, *, parent: str) -> int:
        name = f"{parent}/{request.name}" if parent else request.name
        claim = self._claims[key[0]].name
        if request.unsupported:
            raise NotEvaluatedError(not_supported(request, name))
        if (problem := self._selections.broken(request)) is not None:
            raise _FailedError(Failure.CLASS, f'request "{name}" of {claim}: {problem}')
        plan = _Plan(claim=claim, request=request, parent=parent, candidates=[], count=0)
        self._plans[key] = plan
        self._spend(STEPS_PER_PLAN)
        bit = 1 << (len(self._plans) - 1)
        for pool in self._pools:
            # Up to Kubernetes 1.34, the slices of other nodes count as missing.
            partial = bool(pool.elsewhere) and not self._rules.skips_pools
            if pool.state is PoolState.READY and not (request.every and partial):
                self._find_candidates(plan, pool, bit)
            elif request.every:
                invalid = pool.state is PoolState.INVALID
                state = "invalid" if invalid else "incomplete"
                raise _FailedError(
                    Failure.INVALID_POOL if invalid else Failure.INCOMPLETE_POOL,
                    f'request "{name}" of {claim} asks for all devices, but pool '
                    f"{pool.identity.pool} of driver {pool.identity.driver} is {state}",
                    pool=pool.identity,
                )
        plan.count = len(plan.candidates) if request.every else request.count
        return plan.count

    def _find_candidates(self, plan: _Plan, pool: NodePool, bit: int) -> None:
        request = plan.request
        for each in pool.slices:
            self._spend(STEPS_PER_PLAN)
            selected = self._selections.selected(request, each)
            self._spend(STEPS_PER_DEVICE * (selected.matches.bit_count() + len(selected.errors)))
            for index in bits(selected.matches | _mask(selected.errors)):
                facts = each.devices[index]
                identity = DeviceID(pool.identity.driver, pool.identity.pool, facts.name)
                if (
                    not request.every
                    and not request.admin_access
                    and self._allocated.is_allocated(identity)
                ):
                    continue  # checked before selectors, so their errors are not reached
                if index in selected.errors:
                    error = _FailedError(
                        Failure.SELECTOR,
                        f'request "{plan.name}" of {plan.claim}: {selected.errors[index]}',
                        device=identity,
                    )
                    if request.every:
                        raise error
                    self._failing[identity] = self._failing.get(identity, 0) | bit
                    self.errors.append(error)
                    plan.candidates.append(error)
                    continue
                if not pool.reaches(each, index):
                    continue
                # Else the search ends at a device of which others have taken too much.
                free = request.every and not self._rules.leaves_out_used_up
                if not self._has_capacity(identity, facts, request, free=free):
                    continue
                candidate = self._devices.get(identity)
                if candidate is None:
                    candidate = _Candidate(identity, facts, pool)
                    self._devices[identity] = candidate
                candidate.members |= bit
                plan.candidates.append(candidate)

    def _compare(self) -> None:
        """Mark the devices that make no difference to the search."""
        constraints = [each for claim in self._constraints for each in claim]
        # The allocator forgets values of such a constraint when it takes a device back: what it
        # accepts depends on each device that it tried before.
        # With a request for all, a constraint ends the search with an error, unless an earlier
        # device of the request is in use: then it matters which of alike devices others have.
        every = any(each.request.every for each in self._plans.values())
        self._skips_alike = not any(each.distinct or every for each in constraints)
        names = sorted({each.attribute for each in constraints})
        self._spend(len(self._devices) * (STEPS_PER_DEVICE + len(names)))
        numbers: dict[object, int] = {}
        for each in self._devices.values():
            facts = each.facts
            each.taints = tuple(self._allocated.taints(each.identity, facts))
            alike = (
                each.members,
                self._failing.get(each.identity, 0),
                each.pool.identity,
                facts.consumes,
                facts.kind.capacity,
                facts.kind.shareable,
                each.taints,
                self._allocated.is_allocated(each.identity),
                tuple(
                    (type(value), value)
                    for name in names
                    for value in [facts.attribute(name, each.identity.driver)]
                ),
                self._is_shared(each.identity) and each.identity,
            )
            each.alike = numbers.setdefault(alike, len(numbers))

    # ---- the search

    def next_device(self, at: _At, *, alternative: bool, start: int) -> bool:
        """Find the device at a position, and all after it; True with the results in place."""
        self._spend()
        if at.claim >= len(self._claims):
            return True
        claim = self._claims[at.claim]
        if at.request >= len(claim.requests):
            try:
                return self.next_device(_At(at.claim + 1), alternative=False, start=0)
            except _TooManyError:
                return False
        if not alternative and claim.requests[at.request].alternatives:
            return self._alternatives(at)
        plan = self._plans[at.claim, at.request, at.alternative]
        if plan.request.every and not plan.candidates:
            return False
        if at.device >= plan.count:
            return self.next_device(_At(at.claim, at.request + 1), alternative=False, start=0)
        if len(self._taken[at.claim]) + plan.count - at.device > MAX_RESULTS:
            raise _TooManyError
        if plan.request.every:
            return self._take_next_of_all(at, plan, alternative=alternative)
        return self._take_any(at, plan, start, alternative=alternative)

    def _alternatives(self, at: _At) -> bool:
        exceeded = True
        for number in range(len(self._claims[at.claim].requests[at.request].alternatives)):
            try:
                if self.next_device(_At(at.claim, at.request, number), alternative=True, start=0):
                    return True
            except _TooManyError:
                continue
            exceeded = False
        if exceeded:
            raise _TooManyError
        return False

    def _take_next_of_all(self, at: _At, plan: _Plan, *, alternative: bool) -> bool:
        candidate = plan.candidates[at.device]
        assert isinstance(candidate, _Candidate)
        undo = self._take(at, plan, candidate, must=True)
        if undo is None:
            if self.in_any_order:
                self._record_excluded(at, plan)
            return False
        found = False
        try:
            following = _At(at.claim, at.request, at.alternative, at.device + 1)
            found = self.next_device(following, alternative=alternative, start=0)
        finally:
            if not found:
                undo()
        return found

    def _record_excluded(self, at: _At, plan: _Plan) -> None:
        """Record the error that the allocator meets if it tries the remaining devices first."""
        if any(each.distinct for each in self._constraints[at.claim]):
            return  # a rejection changes which values it compares
        steps: list[Callable[[], None]] = []
        try:
            for candidate in plan.candidates[at.device + 1 :]:
                assert isinstance(candidate, _Candidate)
                if (undo := self._take(at, plan, candidate, must=True)) is not None:
                    steps.append(undo)
        except _FailedError as error:
            self.errors.append(error)
        finally:
            for undo in reversed(steps):
                undo()

    def _take_any(self, at: _At, plan: _Plan, start: int, *, alternative: bool) -> bool:
        tried: set[int] = set()
        for index in range(start, len(plan.candidates)):
            self._spend()
            candidate = plan.candidates[index]
            if isinstance(candidate, _FailedError):
                if candidate.device is not None and self._occupied(at, plan, candidate.device):
                    continue
                raise candidate
            if self._occupied(at, plan, candidate.identity):
                continue
            if self._skips_alike and candidate.identity not in self._shares:
                if candidate.alike in tried:
                    continue
                tried.add(candidate.alike)
            # Before the constraints: those for distinct values forget one at each rejection.
            if candidate.identity in self._shares and not self._has_capacity(
                candidate.identity, candidate.facts, plan.request
            ):
                continue
            undo = self._take(at, plan, candidate, must=False)
            if undo is None:
                continue
            found = False
            try:
                following = _At(at.claim, at.request, at.alternative, at.device + 1)
                found = self.next_device(following, alternative=alternative, start=index + 1)
            finally:
                if not found:
                    undo()
            if found:
                return True
        return False

    def _occupied(self, at: _At, plan: _Plan, device: DeviceID) -> bool:
        """Return whether this search has already assigned the device."""
        users = self._in_use.get(device)
        return bool(users) and (not plan.request.admin_access or at.claim in users)

    def _take(
        self, at: _At, plan: _Plan, candidate: _Candidate, *, must: bool
    ) -> Callable[[], None] | None:
        """Reserve a device in this search. Return the undo function; None if it is unavailable."""
        request, identity, facts = plan.request, candidate.identity, candidate.facts
        constraints = self._constraints[at.claim]
        self._spend(
            STEPS_PER_DEVICE + len(constraints) + len(candidate.taints) * len(request.tolerations)
        )
        shareable = facts.kind.shareable
        if self._occupied(at, plan, identity) and not (shareable and request.admin_access):
            return None
        if not request.admin_access and self._allocated.is_allocated(identity):
            return None
        # A device that is already shared consumes its counters already.
        counted = bool(facts.consumes) and not (shareable and self._is_shared(identity))
        if counted and not self._counters.take(candidate.pool, facts):
            return None
        undone: list[Callable[[], None]] = []
        if counted:
            undone.append(lambda: self._counters.give_back(candidate.pool, facts))

        def undo() -> None:
            for step in reversed(undone):
                step()

        if any(
            not any(tolerates(toleration, taint) for toleration in request.tolerations)
            for taint in candidate.taints
        ):
            undo()
            return None
        sub = request.name if plan.parent else ""
        for constraint in constraints:
            if not constraint.add(plan.base, sub, facts, identity.driver):
                undo()
                if must and self._constraint_fails:
                    raise _FailedError(
                        Failure.CONSTRAINT,
                        f'request "{plan.name}" of {plan.claim} asks for all devices, and '
                        f"a constraint of the claim excludes one of them",
                    )
                return None
            undone.append(lambda each=constraint: each.remove(plan.base, sub))
        if not shareable:
            users = self._in_use.setdefault(identity, set())
            users.add(at.claim)
            undone.append(lambda: users.discard(at.claim))
        if not self._has_capacity(identity, facts, request):
            undo()
            return None
        if shareable:
            shares = self._shares.setdefault(identity, [])
            shares.append(consumed_by(facts.kind.capacity, request.capacity))

            def give_share_back() -> None:
                shares.pop()
                if not shares:
                    del self._shares[identity]

            undone.append(give_share_back)
        taken = self._taken[at.claim]
        taken.append((plan.name, identity))
        undone.append(lambda: taken.pop() and None)
        return undo

    def _is_shared(self, device: DeviceID) -> bool:
        if device in self._shares or self._allocated.consumed(device) is not None:
            return True
        return not self._rules.recharges_shares and self._allocated.is_shared(device)

    def _has_capacity(
        self, device: DeviceID, facts: DeviceFacts, request: Request, *, free: bool = False
    ) -> bool:
        """`free`: the shares of others do not count."""
        capacity = facts.kind.capacity
        if not capacity:
            return not request.capacity
        used = [] if free else [self._allocated.consumed(device) or {}]
        used += self._shares.get(device, ())
        self._spend(len(capacity) * (STEPS_PER_CAPACITY + len(used)))
        if not {each.name for each in request.capacity} <= {each.name for each in capacity}:
            return False
        return short_capacities(capacity, request.capacity, used=used) == ()


def _mask(indexes: Mapping[int, str]) -> int:
    mask = 0
    for index in indexes:
        mask |= 1 << index
    return mask
