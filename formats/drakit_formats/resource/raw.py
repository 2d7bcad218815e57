"""
Reading raw JSON of the API with types: an absent field, null and an empty one are the same.

It must not know any kind of object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

__all__ = ("Object", "child", "children", "text")

Object = Mapping[str, Any]


def child(body: Object, *path: str) -> Object:
    """Return the object at a path, empty if there is none."""
    for key in path:
        body = cast("Object", body.get(key) or {})
    return body


def children(body: Object, *path: str) -> list[Object]:
    """Return the list of objects at a path, empty if there is none."""
    return cast("list[Object]", child(body, *path[:-1]).get(path[-1]) or [])


def text(body: Object, *path: str) -> str:
    """Return the string at a path, empty if there is none."""
    return str(child(body, *path[:-1]).get(path[-1]) or "")
