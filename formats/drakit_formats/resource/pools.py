"""
A pool's name, in the API and as its driver reports it.

It must not know what is in a pool.
"""

from __future__ import annotations

__all__ = ("is_pool_of", "pool_name", "short_pool")


def pool_name(node: str, pool: str) -> str:
    """Return a pool's name in the API; a pool of a node is named after it, to be unique."""
    return f"{node}/{pool}" if pool else node


def is_pool_of(node: str, name: str) -> bool:
    """Return whether a pool in the API is one of the node; other pools have devices that are not
    part of a node, such as devices on a network."""
    return name == node or name.startswith(f"{node}/")


def short_pool(node: str, name: str) -> str:
    """Return a pool's name as its driver reports it; a name that is not of this node stays as it
    is."""
    if name == node:
        return ""
    return name.removeprefix(f"{node}/")
