"""
Limits the size of tables, and keeps their most recently used entries.
"""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def keep(table: dict[Key, Value], key: Key, value: Value, *, limit: int) -> None:
    """Mark an entry as the most recently used, and drop the oldest entry if there are too many."""
    table.pop(key, None)
    table[key] = value
    if len(table) > limit:
        del table[next(iter(table))]
