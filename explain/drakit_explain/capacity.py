"""
How much of a device's capacities a claim takes, and whether it fits beside what others take.

It follows the allocator of ``k8s.io/dynamic-resource-allocation/structured``: a request without an
amount takes the policy's default or all of it, the policy rounds amounts up, and names are compared
as they are written. All amounts are integers, in billionths.

It must not know clients, claims, or how the answer is phrased.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from drakit.quantity import quantity_units
from drakit_explain.model import Amount, CapacityFacts, CapacityPolicy, DeviceID, Share

__all__ = (
    "Consumed",
    "consumed_by",
    "consumed_of",
    "fits_capacity",
    "requested_names",
    "short_capacities",
    "summed",
)

Consumed = Mapping[str, int]
"""Billionths of each capacity, by name as in the slice."""

_WHOLE = 10**9
"""Billionths of one."""


def requested_names(asked: Iterable[Amount]) -> set[str]:
    return {each.name for each in asked}


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


def fits_capacity(
    capacity: Sequence[CapacityFacts], asked: Sequence[Amount], *, used: Iterable[Consumed]
) -> bool:
    """Return whether a request fits a device beside the shares of others."""
    return short_capacities(capacity, asked, used=used) == ()


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
