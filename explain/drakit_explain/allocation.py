"""
Computes the amounts that a request takes from a device, and defines the allocator's results for a
pod's claims.

Amounts follow ``k8s.io/dynamic-resource-allocation/structured``: a request without an amount takes
the policy's default or the whole capacity, the policy rounds amounts up, and names are compared
literally. All amounts are integers, in billionths. Amounts only explain a result. The allocator
determines whether claims fit.

Does not depend on clients, nodes, CEL, or the wording of a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from drakit.quantity import quantity_units
from drakit_explain.devices import Amount, CapacityFacts, CapacityPolicy, DeviceFacts, TaintFacts
from drakit_explain.model import Constraint, DeviceID, PoolID, Request, Share, Toleration
from drakit_explain.pools import Counter

# ---------------------------------------------------------------- capacities

Consumed = Mapping[str, int]
"""The consumed amount of each capacity in billionths, keyed by the capacity's name in the slice."""

_WHOLE = 10**9
"""One, in billionths."""


def summed(amounts: Iterable[Amount]) -> dict[str, int]:
    """Return the sum of the amounts in billionths, keyed by name. Raises ValueError if an amount is
    not a quantity."""
    sums: dict[str, int] = {}
    for amount in amounts:
        sums[amount.name] = sums.get(amount.name, 0) + quantity_units(amount.quantity)
    return sums


def consumed_of(device: DeviceID, shares: Iterable[Share]) -> Consumed | None:
    """Return how much of a device's capacity the shares consume, or None if they consume
    nothing."""
    amounts = [amount for each in shares if each.device == device for amount in each.consumed]
    return summed(amounts) if amounts else None


def consumed_by(capacity: Sequence[CapacityFacts], asked: Sequence[Amount]) -> Consumed:
    """Return how much of each of a device's capacities a request consumes."""
    wanted = summed(asked)
    return {each.name: _taken(each, wanted.get(each.name)) for each in capacity}


def short_capacities(
    capacity: Sequence[CapacityFacts], asked: Sequence[Amount], *, used: Iterable[Consumed]
) -> tuple[str, ...] | None:
    """
    Return the capacities with less left than a claim needs. Empty if enough of each is left.

    None means that the device cannot provide such amounts even if nothing is consumed. Raises
    ValueError if a value is not a quantity.
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


# ---------------------------------------------------------------- queries and results

MAX_RESULTS = 32
"""Maximum number of devices in a claim's allocation (API: ``AllocationResultsMaxSize``)."""


class Failure(Enum):
    """The kind of an allocator error. Each kind has its own messages."""

    SELECTOR = "selector"
    """A selector fails for a device, or does not compile."""

    INCOMPLETE_POOL = "incomplete pool"
    """A request for all devices needs complete pools, but a pool is incomplete."""

    INVALID_POOL = "invalid pool"
    """A request for all devices reaches an invalid pool. Up to Kubernetes 1.34, any request that
    reaches the pool fails."""

    CONSTRAINT = "constraint"
    """A constraint excludes a device from a request for all devices."""

    TOO_MANY = "too many"
    """The claim needs more devices than an allocation can list."""

    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorError:
    """An error that stops the allocation on a node."""

    kind: Failure
    text: str
    """The error as a clause. It names the request, if the error depends on one."""

    device: DeviceID | None = None
    """The device for which a selector fails."""

    pool: PoolID | None = None
    """The pool that causes the error, if any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedClaim:
    """The fields that the allocator reads from a claim, or from a future claim of a template."""

    origin: str = field(default="", compare=False)
    """The origin of the claim: ``claim "name"`` or ``claim template "name"``. The name is not that
    of the claim's entry in the pod."""

    requests: tuple[Request, ...]
    constraints: tuple[Constraint, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """The combined results of a request's selectors for the devices in one slice."""

    matches: int = 0
    """A bitmask of the devices that match all selectors, with one bit per device index."""

    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    """Runtime errors, keyed by the index of the device."""

    rejected: tuple[int, ...] = ()
    """The number of devices that each evaluated selector rejects, in the order of the selectors."""


class NotEvaluatedError(Exception):
    """The result is uncertain, for example because a selector is too long. The message is a clause
    that describes the cause."""


def tolerates(toleration: Toleration, taint: TaintFacts) -> bool:
    """Return whether a toleration applies to a taint, according to the scheduler's rules."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator in ("", "Equal"):
        return toleration.value == taint.value
    return toleration.operator == "Exists"


def counters_of(facts: DeviceFacts) -> Iterator[tuple[Counter, int]]:
    """Return the amounts that a device consumes from its pool's counters, in billionths."""
    for each in facts.consumes:
        for amount in each.counters:
            yield Counter(each.name, amount.name), quantity_units(amount.quantity)
