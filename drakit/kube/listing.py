"""
Lists in pages: large answers are slow, and the server refuses the largest.

It must not know connections: one page is fetched by a function that is handed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from drakit.kube.errors import GoneError

__all__ = ("Listing", "list_pages")


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """All objects of a collection, as they were at one resource version."""

    items: list[dict[str, Any]]
    resource_version: str
    """Where a watch begins that misses nothing after this list."""


async def list_pages(
    fetch: Callable[[Mapping[str, str]], Awaitable[dict[str, Any]]],
    *,
    params: Mapping[str, str],
    page_size: int,
) -> Listing:
    """
    Fetch page after page, all of the same resource version.

    If that version expires on the way (410; a slow reader, a compaction), the rest cannot be had
    any more: everything is fetched anew, without pages, for which no version has to be kept.
    """
    try:
        return await _list_all(fetch, {**params, "limit": str(page_size)})
    except GoneError:
        return await _list_all(fetch, params)


async def _list_all(
    fetch: Callable[[Mapping[str, str]], Awaitable[dict[str, Any]]], params: Mapping[str, str]
) -> Listing:
    items: list[dict[str, Any]] = []
    page = await fetch(params)
    while True:
        items += page.get("items") or ()
        metadata: dict[str, Any] = page.get("metadata") or {}
        if not metadata.get("continue"):
            return Listing(items=items, resource_version=metadata.get("resourceVersion", ""))
        page = await fetch({**params, "continue": metadata["continue"]})
