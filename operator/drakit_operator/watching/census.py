"""
Lists that make up for what a watch cannot tell.

Kopf never reports what was deleted in a gap that ends in a new list (a 410, or its own restart),
and it does not say when its first list is complete. So everything is listed before each of its
runs, which makes the store complete; now and then names and UIDs are, which finds what is gone.

It must not know Kopf, queues, or what a deletion means.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from drakit.kube.errors import GoneError
from drakit.kube.paths import resource_path
from drakit.resource.raw import Object, children, text
from drakit_operator.kinds import Fact, Kind, Name, name_of
from drakit_operator.store import Change, Store

__all__ = ("Reader", "relist", "sweep")

logger = logging.getLogger(__name__)

Kept = TypeVar("Kept")

PAGE_SIZE = 100
"""Objects a request: parsed, a page of full slices takes 30 MiB; of 500, half of our memory."""

LIST_SECONDS = 30.0
"""Longest wait for a page; the API server gives up at 60 s."""


class Reader(Protocol):
    """What is needed of a session."""

    async def get(
        self,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        timeout_seconds: float = 10.0,
    ) -> dict[str, Any]: ...


async def relist(reader: Reader, store: Store, kinds: Iterable[Kind]) -> list[Change]:
    """List all and put it into the store, all kinds at once: no half knowledge in between."""
    listed: dict[Kind, list[Fact]] = {}
    for kind in kinds:
        listed[kind] = await _all_facts(reader, kind)
    return [change for kind, facts in listed.items() for change in store.replace(kind, facts)]


async def sweep(reader: Reader, store: Store, kinds: Iterable[Kind]) -> list[Change]:
    """Find what the store holds and the API server does not, and remove it."""
    changes: list[Change] = []
    for kind in kinds:
        before = store.uids(kind)  # what comes in during the list is not judged by it
        if not before:
            continue
        listed = await _all_uids(reader, kind)
        gone = [name for name, uid in before.items() if listed.get(name) != uid]
        removed = [store.remove(kind, name, uid=before[name]) for name in gone]
        changes += [change for change in removed if change is not None]
        if gone:
            logger.info("missed deletions found", extra={"kind": str(kind), "count": len(gone)})
    return changes


async def _all_facts(reader: Reader, kind: Kind) -> list[Fact]:
    return list((await _read(reader, kind, kind.project)).values())


async def _all_uids(reader: Reader, kind: Kind) -> dict[Name, str]:
    return await _read(reader, kind, lambda body: str(body["metadata"]["uid"]))


async def _read(reader: Reader, kind: Kind, keep: Callable[[Object], Kept]) -> dict[Name, Kept]:
    """Read a kind in pages, all of one moment; if they expire on the way, again without pages."""
    try:
        return await _read_pages(reader, kind, keep, {"limit": str(PAGE_SIZE)})
    except GoneError:
        return await _read_pages(reader, kind, keep, {})


async def _read_pages(
    reader: Reader, kind: Kind, keep: Callable[[Object], Kept], paging: Mapping[str, str]
) -> dict[Name, Kept]:
    """Keep a little of each object at once, so that never more than a page is in memory."""
    path = resource_path(kind.group_version, kind.plural)
    params = {**kind.params, **paging}
    kept: dict[Name, Kept] = {}
    while True:
        page = await reader.get(path, params=params, timeout_seconds=LIST_SECONDS)
        for item in children(page, "items"):
            kept[name_of(item)] = keep(item)
        token = text(page, "metadata", "continue")
        if not token:
            return kept
        params = {**params, "continue": token}
