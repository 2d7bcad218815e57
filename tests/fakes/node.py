"""A node for drivers in tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticNode:
    """A `drakit.driver.Node` that does not change."""

    name: str
    labels: Mapping[str, str] | None = None
