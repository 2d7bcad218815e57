"""
Kubernetes quantities, compared by value: the API server answers ``1Gi`` where we sent ``1024Mi``.

It must not know what is measured.
"""

from __future__ import annotations

import re
from decimal import Decimal

__all__ = ("parse_quantity",)

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


def parse_quantity(text: str) -> Decimal:
    """Give a quantity's value; raise ValueError with a sentence for anything else."""
    form = _FORM.fullmatch(text)
    if form is None:
        raise ValueError(f"{text!r} is not a Kubernetes quantity (such as 8, 500m or 16Gi)")
    number, suffix = Decimal(form["number"]), form["suffix"]
    if suffix in _SCALE:
        return number * _SCALE[suffix]
    return number * Decimal(10) ** int(suffix[1:])
