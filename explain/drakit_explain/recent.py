"""
Tables of bounded size: what was used last stays.

It must not know what is in them.
"""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def keep(table: dict[Key, Value], key: Key, value: Value, *, limit: int) -> None:
    """Make an entry the one that was used last, and drop the first if there are too many."""
    table.pop(key, None)
    table[key] = value
    if len(table) > limit:
        del table[next(iter(table))]
