"""
Whether the rest of a device's capacities is enough for a request, as far as that is certain.

The scheduler rounds requests up to an amount that the device offers, and in odd cases (steps with a
fraction) does so differently from version to version. Here an amount is never more than any version
takes: an amount that is reported as too little certainly is.

It must not know clients, claims, or how the answer is phrased.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from drakit.explain.model import Amount, CapacityFacts, CapacityPolicy, DeviceFacts
from drakit.resource.quantity import EXACT, parse_quantity

__all__ = ("billionths", "short_capacities", "summed")

_WHOLE = 10**9
"""Billionths of one."""


@lru_cache(maxsize=1024)
def billionths(quantity: str) -> int:
    """Return a quantity's exact value; raise ValueError if it is invalid."""
    return int(parse_quantity(quantity).scaleb(9, context=EXACT))


def summed(amounts: Iterable[Amount]) -> dict[str, int]:
    """Add up amounts by name, in billionths; raise ValueError if one is not a quantity."""
    sums: dict[str, int] = {}
    for amount in amounts:
        sums[amount.name] = sums.get(amount.name, 0) + billionths(amount.quantity)
    return sums


def short_capacities(
    device: DeviceFacts, *, driver: str, asked: Sequence[Amount], consumed: Mapping[str, int]
) -> tuple[str, ...] | None:
    """
    Return the capacities of which less is left than a claim takes; empty if there are none.

    None means that the device does not have that much even if nothing is consumed, or gives no such
    amounts. Raises ValueError for an invalid quantity.
    """
    if not asked and not consumed:
        return ()  # all of it is left, and its policy's default is never more
    wanted = {
        each.name if "/" in each.name else f"{driver}/{each.name}": billionths(each.quantity)
        for each in asked
    }
    if not wanted.keys() <= {capacity.name for capacity in device.capacity}:
        return None
    short: list[str] = []
    for capacity in device.capacity:
        need, total = _taken(capacity, wanted.get(capacity.name)), billionths(capacity.value)
        if need is None or need > total:
            return None
        if need + consumed.get(capacity.name, 0) > total:
            short.append(capacity.name)
    return tuple(short)


def _taken(capacity: CapacityFacts, asked: int | None) -> int | None:
    """Return the least amount that a claim takes; None if it cannot have such an amount."""
    policy = capacity.policy
    if asked is None:
        default = policy.default if policy is not None else None
        return billionths(capacity.value if default is None else default)
    if policy is None:
        return asked
    if policy.min is not None:
        least = _rounded(max(asked, billionths(policy.min)), policy)
        return None if policy.max is not None and least > billionths(policy.max) else least
    values = [billionths(value) for value in policy.valid_values]
    return min((value for value in values if value >= asked), default=None) if values else asked


def _rounded(asked: int, policy: CapacityPolicy) -> int:
    """Round up to a step if all numbers are whole: for others, versions differ."""
    if policy.min is None or policy.step is None:
        return asked
    least, step = billionths(policy.min), billionths(policy.step)
    if step <= 0 or any(amount % _WHOLE for amount in (asked, least, step)):
        return asked
    return least + -(-(asked - least) // step) * step
