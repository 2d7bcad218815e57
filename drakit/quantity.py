"""
Kubernetes quantities, compared by value: the API server returns ``1Gi`` for ``1024Mi``.

The value is the one that the API server would store. The server rounds up to billionths, and caps
values with a binary suffix at 2^63-1.
"""

from __future__ import annotations

import re
from decimal import ROUND_UP, Context, Decimal
from functools import lru_cache

__all__ = ("EXACT", "parse_quantity", "quantity_problem", "quantity_units", "same_quantity")

MAX_LENGTH = 64
"""Maximum length of a quantity in characters. Real quantities are shorter, and longer strings take
too long to parse."""

_FORM = re.compile(
    r"(?P<number>[+-]?(\d+(\.\d*)?|\.\d+))(?P<suffix>[KMGTPE]i|[numkMGTPE]?|[eE][+-]?\d{1,3})",
    re.ASCII,
)
_SCALE = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
    "Ei": Decimal(2) ** 60,
}
_NANO = Decimal("1e-9")
_NANO_EXPONENT = -9
_MAX_BINARY = Decimal(2**63 - 1)
EXACT = Context(prec=2 * MAX_LENGTH)
"""A decimal context with enough digits for any quantity of `MAX_LENGTH` characters, with any
suffix."""


# The devices of a node are similar, so the same few strings occur thousands of times.
@lru_cache(maxsize=1024)
def parse_quantity(text: str) -> Decimal:
    """
    Return the value of a Kubernetes quantity: ``1500m`` is 1.5, ``2k`` is 2000, ``1Ki`` is 1024.

    The same quantity can be written in several ways, and the scheduler rewrites amounts: 40G
    becomes ``39062500Ki``. Therefore, compare values instead of strings.

    :raises ValueError: the string is not a quantity.
    """
    form = _FORM.fullmatch(text) if len(text) <= MAX_LENGTH else None
    if form is None:
        shown = repr(text) if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]!r}..."
        raise ValueError(f"{shown} is not a Kubernetes quantity (such as 8, 500m or 16Gi)")
    number, suffix = Decimal(form["number"]), form["suffix"]
    scale = _SCALE[suffix] if suffix in _SCALE else Decimal(f"1e{suffix[1:]}")
    value = EXACT.multiply(number, scale)
    if int(value.as_tuple().exponent) < _NANO_EXPONENT:
        value = value.quantize(_NANO, rounding=ROUND_UP, context=EXACT)
    if suffix.endswith("i"):
        value = max(-_MAX_BINARY, min(value, _MAX_BINARY))
    return value


@lru_cache(maxsize=1024)
def quantity_units(text: str) -> int:
    """
    Return the value of a quantity in billionths, the finest unit that the API server stores.

    The value is an integer of any size, so sums are exact. Raises ValueError like
    :func:`parse_quantity`.
    """
    return int(parse_quantity(text).scaleb(-_NANO_EXPONENT, context=EXACT))


def quantity_problem(given: object) -> str | None:
    """Return the problem if a quantity is invalid or negative, otherwise None."""
    if not isinstance(given, str):
        kind = type(given).__name__
        return f'is of type {kind}, not a quantity as a string (such as "8" or "16Gi")'
    try:
        value = parse_quantity(given)
    except ValueError as error:
        return f"is not a quantity: {error}"
    return f"is negative ({given})" if value < 0 else None


def same_quantity(one: object, other: object) -> bool:
    """Return whether two quantities from API JSON have the same value. An invalid quantity equals
    only itself."""
    if one == other:
        return True
    try:
        return parse_quantity(str(one)) == parse_quantity(str(other))
    except ValueError:
        return False
