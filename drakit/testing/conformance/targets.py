"""
Targets: the kinds of drivers that the kit can test, and how the node plugin is told of each.

It must not know rules, or what is done with the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

__all__ = ("Target",)


class Target(Protocol):
    """A driver to be tested."""

    kind: Literal["python", "backend", "device-plugin"]

    parameters: Mapping[str, Any] | None
    """Opaque parameters for its claims; None if they have none."""

    def config(self, root: Path) -> Mapping[str, Any]:
        """Give the keys of the node plugin's configuration that host it."""
        ...
