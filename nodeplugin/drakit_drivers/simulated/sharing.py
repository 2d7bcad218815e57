"""
Amounts that claims share in whole steps.

It must not know of what they are.
"""

from __future__ import annotations

from drakit import Capacity, CapacityRange

__all__ = ("in_steps",)


def in_steps(amount: int, *, unit: str = "") -> Capacity:
    """Give a capacity of which a claim takes one at least, and one if it asks for none."""
    if amount == 1:
        # The API wants room for a step above the least.
        return Capacity(value=f"1{unit}")
    one = f"1{unit}"
    return Capacity(
        value=f"{amount}{unit}", default=one, valid_range=CapacityRange(min=one, step=one)
    )
