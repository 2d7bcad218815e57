"""
Whether the scheduler can allocate a pod's claims on one node: the question, the answer, and the
limits of devices that are allocated together.

:mod:`.search` finds the answer. :mod:`.pools` gives the pools of the node, the caller evaluates
selectors and knows what is allocated.

It follows the allocator of ``k8s.io/dynamic-resource-allocation/structured``, its odd cases
included: a request without an amount takes the policy's default or all of it, the policy rounds
amounts up, and names are compared as they are written. All amounts are integers, in billionths.

It must not know clients, nodes, CEL, the order of the search, or how an answer is worded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from drakit.quantity import quantity_units
from drakit_explain.budget import Budget
from drakit_explain.devices import (
    Amount,
    CapacityFacts,
    CapacityPolicy,
    DeviceFacts,
    ListValue,
    TaintFacts,
)
from drakit_explain.model import (
    Constraint,
    DeviceID,
    PoolID,
    Request,
    Share,
    SliceFacts,
    Toleration,
)
from drakit_explain.pools import Counter, NodePool

# ---------------------------------------------------------------- capacities

Consumed = Mapping[str, int]
"""Billionths of each capacity, by name as in the slice."""

_WHOLE = 10**9
"""Billionths of one."""


def summed(amounts: Iterable[Amount]) -> dict[str, int]:
    """Add up amounts by name, in billionths; raise ValueError if one is not a quantity."""
    sums: dict[str, int] = {}
    for amount in amounts:
        sums[amount.name] = sums.get(amount.name, 0) + quantity_units(amount.quantity)
    return sums


def consumed_of(device: DeviceID, shares: Iterable[Share]) -> Consumed | None:
    """Return what shares take of a device's capacity; None if they take nothing."""
    amounts = [amount for each in shares if each.device == device for amount in each.consumed]
    return summed(amounts) if amounts else None


def consumed_by(capacity: Sequence[CapacityFacts], asked: Sequence[Amount]) -> Consumed:
    """Return what a request takes of each capacity of a device."""
    wanted = summed(asked)
    return {each.name: _taken(each, wanted.get(each.name)) for each in capacity}


def short_capacities(
    capacity: Sequence[CapacityFacts], asked: Sequence[Amount], *, used: Iterable[Consumed]
) -> tuple[str, ...] | None:
    """
    Return the capacities of which less is left than a claim takes; empty if there are none.

    None means that the device cannot give such amounts even if nothing is consumed. Raises
    ValueError if something is no quantity.
    """
    wanted = summed(asked)
    if not wanted.keys() <= {each.name for each in capacity}:
        return None
    shares = tuple(used)
    short: list[str] = []
    for each in capacity:
        need, total = _taken(each, wanted.get(each.name)), quantity_units(each.value)
        if need > total or _violates(need, each.policy):
            return None
        if need + sum(share.get(each.name, 0) for share in shares) > total:
            short.append(each.name)
    return tuple(short)


def _taken(capacity: CapacityFacts, asked: int | None) -> int:
    policy = capacity.policy
    if asked is None:
        default = policy.default if policy is not None else None
        return quantity_units(capacity.value if default is None else default)
    if policy is None:
        return asked
    if policy.min is not None:
        return _rounded_up(asked, quantity_units(policy.min), policy.step)
    values = (quantity_units(value) for value in policy.valid_values)
    return next((value for value in values if asked <= value), asked)


def _rounded_up(asked: int, least: int, step: str | None) -> int:
    if asked < least:
        return least
    if step is None:
        return asked
    size, start = _whole(quantity_units(step)), _whole(least)
    if size <= 0:
        return asked
    return (start + -(-(_whole(asked) - start) // size) * size) * _WHOLE


def _violates(amount: int, policy: CapacityPolicy | None) -> bool:
    if policy is None or (policy.default and amount == quantity_units(policy.default)):
        return False
    if policy.min is not None or policy.max is not None or policy.step is not None:
        if policy.max is not None and amount > quantity_units(policy.max):
            return True
        if policy.step is None:
            return False
        size = _whole(quantity_units(policy.step))
        least = _whole(quantity_units(policy.min)) if policy.min is not None else 0
        return size > 0 and (_whole(amount) - least) % size != 0
    if policy.valid_values:
        return amount not in [quantity_units(value) for value in policy.valid_values]
    return False


def _whole(amount: int) -> int:
    """Round billionths up to a whole number, as ``Quantity.Value`` does."""
    return -(-amount // _WHOLE)


# ---------------------------------------------------------------- the question and the answer

MAX_RESULTS = 32
"""Devices in the allocation of a claim (API: ``AllocationResultsMaxSize``)."""


class Outcome(Enum):
    """The possible answers."""

    FITS = "fits"
    NO_FIT = "no fit"
    FAILED = "failed"
    """The allocator ends with an error: no other device or alternative is tried."""

    UNDECIDED = "undecided"
    """The search has spent its budget, or a fact cannot be evaluated."""


class Failure(Enum):
    """The error with which a search ends."""

    SELECTOR = "selector"
    """It fails at a device, or does not compile."""

    CLASS = "class"
    INCOMPLETE_POOL = "incomplete pool"
    """A request asks for all devices, so none may be missing."""

    INVALID_POOL = "invalid pool"
    """So it is for an invalid pool, and up to Kubernetes 1.34 for any request that reaches it."""

    CONSTRAINT = "constraint"
    """A request asks for all devices, and a constraint excludes one."""

    TOO_MANY = "too many"
    """More devices than an allocation can list."""

    ON_NODE = "on node"
    """The only error that concerns one node alone (``ErrFailedAllocationOnNode``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The result of a search."""

    outcome: Outcome
    failure: str = ""
    """The reason of a failed search, as a clause that names the request."""

    kind: Failure | None = None
    device: DeviceID | None = None
    """The device at which a search failed, if there is one."""

    pool: PoolID | None = None
    """The pool because of which it failed, if there is one."""

    chance: bool = False
    """Whether the scheduler meets the error before a solution is chance."""

    devices: tuple[tuple[str, str, DeviceID], ...] = ()
    """The result of a successful search: claim, request (``request/subrequest``) and device."""

    @property
    def ended_early(self) -> bool:
        """Whether the search ended because of its budget."""
        return self.outcome is Outcome.UNDECIDED and not self.failure

    @property
    def fatal(self) -> bool:
        """Whether the scheduler gives up the pod on all nodes, as :mod:`.release` describes."""
        return self.outcome is Outcome.FAILED and self.kind is not Failure.ON_NODE


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedClaim:
    """A claim, or what a template would make, with what the search needs of it."""

    name: str
    """For sentences: ``claim "name"`` or ``claim template "name"``."""

    requests: tuple[Request, ...]
    constraints: tuple[Constraint, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """The outcomes of all selectors of a request for the devices of one slice."""

    matches: int = 0
    """A bit for each device, by its index, that fulfils all of them."""

    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    """Runtime errors by a device's index."""

    rejected: tuple[int, ...] = ()
    """For each selector that was evaluated, in order: the number of devices that it rejects."""


class NotEvaluatedError(Exception):
    """No result is certain, as of a long selector; the text is a clause that names the cause."""


class Selections(Protocol):
    """Selectors, evaluated."""

    def selected(self, request: Request, of: SliceFacts) -> Selected:
        """
        Return the outcomes of the selectors of a request's class, then of its own.

        Raises :class:`NotEvaluatedError` where one has no result.
        """
        ...

    def broken(self, request: Request) -> str | None:
        """Return why the allocator cannot use a request at all, or None."""
        ...


class WithoutErrors(Selections):
    """Devices on which a selector fails are not selected, and the search goes on."""

    def __init__(self, selections: Selections) -> None:
        self._selections = selections

    def selected(self, request: Request, of: SliceFacts) -> Selected:
        return Selected(matches=self._selections.selected(request, of).matches)

    def broken(self, request: Request) -> str | None:
        return self._selections.broken(request)


class Allocated(Protocol):
    """The devices and capacities that allocated claims hold."""

    def is_allocated(self, device: DeviceID) -> bool:
        """Return whether a claim has the device for itself."""
        ...

    def is_shared(self, device: DeviceID) -> bool:
        """Return whether a claim has a share of the device."""
        ...

    def consumed(self, device: DeviceID) -> Consumed | None:
        """Return what shares take of the device's capacity; None if they take nothing."""
        ...

    def taints(self, device: DeviceID, facts: DeviceFacts) -> Sequence[TaintFacts]:
        """Return the taints of a device, those of DeviceTaintRules included."""
        ...


def not_supported(request: Request, name: str) -> str:
    """Return the text of the error about a request that has an unsupported part."""
    return f'drakit does not support {request.unsupported} of request "{name}"'


def tolerates(toleration: Toleration, taint: TaintFacts) -> bool:
    """Return whether a toleration applies to a taint, as the scheduler decides it."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator in ("", "Equal"):
        return toleration.value == taint.value
    return toleration.operator == "Exists"


# ---------------------------------------------------------------- constraints and counters

_STEPS_PER_PARTITION = 4
"""Steps of a device whose counters are compared with its holders."""


class SearchedConstraint:
    """One constraint of a claim, with the values of the devices that the search has taken."""

    def __init__(self, facts: Constraint, *, forgets: bool) -> None:
        """`forgets`: of each request, only the last device counts for distinct values."""
        self._forgets = forgets
        self.attribute: str = facts.attribute
        self.distinct: bool = facts.distinct
        self._requests = frozenset(facts.requests)
        self._number = 0
        self._value: object = None
        self._values: dict[object, object] = {}
        """By number, or by request, so that a second device of a request replaces the first."""

    def _applies(self, base: str, sub: str) -> bool:
        requests = self._requests
        return not requests or base in requests or (bool(sub) and f"{base}/{sub}" in requests)

    def add(self, base: str, sub: str, device: DeviceFacts, driver: str) -> bool:
        if not self._applies(base, sub):
            return True
        value = device.attribute(self.attribute, driver)
        if value is None:
            return False
        if self._number == 0:
            self._value = value
            self._values = {self._key(base): value} if self.distinct else {}
        elif isinstance(value, ListValue) or isinstance(self._value, ListValue):
            # Releases of Kubernetes differ in how they compare lists.
            raise NotEvaluatedError(
                f"a constraint compares lists of attribute {self.attribute}, which drakit does not "
                f"support"
            )
        elif self.distinct:
            if any(_same(value, other) for other in self._values.values()):
                return False
            self._values[self._key(base)] = value
        elif not _same(value, self._value):
            return False
        self._number += 1
        return True

    def remove(self, base: str, sub: str) -> None:
        if not self._applies(base, sub):
            return
        self._number -= 1
        self._values.pop(self._key(base), None)

    def _key(self, base: str) -> object:
        return base if self._forgets else self._number


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


class SearchedCounters:
    """The rest of the pools' counters."""

    def __init__(
        self, is_held: Callable[[DeviceID], bool], budget: Budget, *, by_driver: bool
    ) -> None:
        """
        Count the counters that are left.

        :param is_held: whether a claim has a device, or a share of it.
        :param by_driver: pools of two drivers with one name have counters of their own.
        """
        self._is_held = is_held
        self._budget = budget
        self._by_driver = by_driver
        self._available: dict[object, dict[Counter, int]] = {}
        self._consumed: dict[object, dict[Counter, int]] = {}

    def _key(self, pool: NodePool) -> object:
        return pool.identity if self._by_driver else pool.identity.pool

    def take(self, pool: NodePool, facts: DeviceFacts) -> bool:
        key = self._key(pool)
        if key not in self._available:
            self._available[key] = self._left(pool)
        consumed = self._consumed.setdefault(key, {})
        self._budget.spend(len(self._available[key]))
        for counter, amount in counters_of(facts):
            consumed[counter] = consumed.get(counter, 0) + amount
        available = self._available[key]
        if any(left < consumed.get(counter, 0) for counter, left in available.items()):
            self.give_back(pool, facts)
            return False
        return True

    def give_back(self, pool: NodePool, facts: DeviceFacts) -> None:
        consumed = self._consumed[self._key(pool)]
        for counter, amount in counters_of(facts):
            consumed[counter] -= amount

    def _left(self, pool: NodePool) -> dict[Counter, int]:
        left = dict(pool.counters)
        driver, name = pool.identity
        slices = (*pool.slices, *pool.elsewhere)
        self._budget.spend(_STEPS_PER_PARTITION * sum(len(each.devices) for each in slices))
        if any(
            consumed.grouped
            for each in slices
            for device in each.devices
            for consumed in device.consumes
        ):
            raise NotEvaluatedError(
                f"devices of pool {name} of driver {driver} have compatibilityGroups, which "
                f"drakit does not support"
            )
        for each in slices:
            for device in each.devices:
                if not device.consumes:
                    continue
                if self._is_held(DeviceID(driver, name, device.name)):
                    for counter, amount in counters_of(device):
                        if counter in left:
                            left[counter] -= amount
        return left


def counters_of(facts: DeviceFacts) -> Iterator[tuple[Counter, int]]:
    """Return the amounts that a device consumes of its pool's counters, in billionths."""
    for each in facts.consumes:
        for amount in each.counters:
            yield Counter(each.name, amount.name), quantity_units(amount.quantity)
