"""
Paged lists, in which an unreadable object affects only itself.

If a page is too large or cannot be parsed, the list fetches smaller pages until the offending
object is alone in its page. It then skips this object, and reports its name. The consumer extracts
its data from each object at once, so that at most one page is in memory.

It must not know connections: one page is fetched by a function that is handed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from drakit_daemon.kube.answer import Answer
from drakit_daemon.kube.errors import GoneError, UnreadableError

__all__ = (
    "MAX_OBJECT_BYTES",
    "MAX_PAGE_BYTES",
    "Fetch",
    "Listing",
    "Skipped",
    "SkippedLog",
    "read_list",
)

logger: logging.Logger = logging.getLogger(__name__)

MAX_PAGE_BYTES = 2 * 2**20
"""Bytes of a page of several objects. A tenant can make one byte of JSON take 25 bytes after
parsing (``[[],[],...]``): this is at most 50 MiB."""

MAX_OBJECT_BYTES = 4 * 2**20
"""Bytes of a single object: it has at most 1.5 MiB in etcd, and grows in JSON."""

ATTEMPTS = 3
"""Restarts of a list whose version has expired, before it fails."""

REMEMBERED = 1000
"""Skipped objects that are remembered, so that each is logged once."""

_SHRINK = 4

Kept = TypeVar("Kept")


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """An object of the collection that cannot be read."""

    metadata: Mapping[str, Any]
    """Its name, namespace and UID, as far as the API server returns them."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing(Generic[Kept]):
    """All objects of a collection, as they were at one resource version."""

    items: list[Kept]
    resource_version: str
    """The version from which a watch must start to miss no change after this list."""

    skipped: tuple[Skipped, ...] = ()


class SkippedLog:
    """Logs each unreadable object once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, metadata: Mapping[str, Any], reason: str, **facts: str) -> None:
        """Log a skipped object, unless it was logged before."""
        uid = str(metadata.get("uid"))
        if uid in self._logged:
            return
        if len(self._logged) >= REMEMBERED:
            self._logged.clear()
        self._logged.add(uid)
        name = f"{metadata.get('namespace') or ''}/{metadata.get('name')}".lstrip("/")
        logger.warning("object skipped", extra={**facts, "object": name, "error": reason})


class Fetch(Protocol):
    """Fetch one page; UnreadableError if it is larger than ``max_bytes`` or cannot be parsed. Only
    pages of one object are requested without the rest of the object."""

    async def __call__(
        self, params: Mapping[str, str], *, max_bytes: int, metadata_only: bool
    ) -> Answer: ...


async def read_list(
    fetch: Fetch,
    keep: Callable[[dict[str, Any]], Kept],
    *,
    params: Mapping[str, str],
    page_size: int,
) -> Listing[Kept]:
    """
    Fetch page after page, all of the same resource version.

    If that version expires meanwhile (410; a slow reader, a compaction), the list starts again,
    and raises GoneError after repeated failures.
    """
    for attempt in range(ATTEMPTS):
        try:
            return await _read(fetch, keep, params=params, page_size=page_size)
        except GoneError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


async def _read(
    fetch: Fetch,
    keep: Callable[[dict[str, Any]], Kept],
    *,
    params: Mapping[str, str],
    page_size: int,
) -> Listing[Kept]:
    items: list[Kept] = []
    skipped: list[Skipped] = []
    limit, token = page_size, ""
    while True:
        query = {**params, "limit": str(limit), **({"continue": token} if token else {})}
        try:
            answer = await fetch(
                query,
                max_bytes=MAX_PAGE_BYTES if limit > 1 else MAX_OBJECT_BYTES,
                metadata_only=False,
            )
            items += [keep(item) for item in answer.body.get("items") or ()]
        except UnreadableError as error:
            if limit > 1:
                limit = max(limit // _SHRINK, 1)
                continue
            # If the metadata is unreadable as well, the object is not the cause: the list fails.
            answer = await fetch(query, max_bytes=MAX_OBJECT_BYTES, metadata_only=True)
            skipped += [
                Skipped(metadata=item.get("metadata") or {}, reason=error.message)
                for item in answer.body.get("items") or ()
            ]
        metadata: Mapping[str, Any] = answer.body.get("metadata") or {}
        token = metadata.get("continue") or ""
        if not token:
            version = metadata.get("resourceVersion", "")
            return Listing(items=items, resource_version=version, skipped=tuple(skipped))
        if answer.size_bytes * 2 <= MAX_PAGE_BYTES:
            limit = min(limit * 2, page_size)
