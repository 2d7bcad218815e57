"""
Tables of bounded size, which keep the last used entries.
"""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def keep(table: dict[Key, Value], key: Key, value: Value, *, limit: int) -> None:
    """Mark an entry as the last used, and drop the first if there are too many."""
    table.pop(key, None)
    table[key] = value
    if len(table) > limit:
        del table[next(iter(table))]
