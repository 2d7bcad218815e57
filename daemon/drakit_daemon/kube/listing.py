"""
Paged lists and watch streams, in which an unreadable object affects only itself.

If a page is too large or cannot be parsed, the list fetches smaller pages until the offending
object is the only one in its page. It then skips this object, and reports its name. The consumer
extracts its data from each object immediately, while the API server prepares the next page, so that
at most one page is in memory.

A watch is one stream, from its first byte to its end or first error; :mod:`.reflector` starts a new
one. An object that is too large, or nested too deeply even without its managed fields, affects only
its own event, which then contains only its name, namespace, UID and version.

Does not depend on connections and timeouts: the caller passes a function that fetches a page, and
the chunks of a stream.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import orjson

from drakit_daemon.kube.request import (
    GoneError,
    JsonResponse,
    UnavailableError,
    UnreadableError,
    error_of_status,
    nesting,
    parse,
    parse_without_managers,
)

logger: logging.Logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- lists

MAX_PAGE_BYTES = 2 * 2**20
"""The maximum size of a page with several objects. A tenant can make one byte of JSON take 25 bytes
after parsing (``[[],[],...]``), so a page takes at most 50 MiB."""

MAX_OBJECT_BYTES = 4 * 2**20
"""The maximum size of a single object. An object has at most 1.5 MiB in etcd, but can be larger as
JSON."""

ATTEMPTS = 3
"""The number of times that a list is restarted after its resource version has expired, before it
fails."""

REMEMBERED = 1000
"""The maximum number of remembered skipped objects. Each remembered object is logged only once."""

_SHRINK = 4

Kept = TypeVar("Kept")


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """An object in the collection that cannot be read."""

    metadata: Mapping[str, Any]
    """The name, namespace and UID of the object, if the API server returns them."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing(Generic[Kept]):
    """All objects of a collection, as they were at one resource version."""

    items: list[Kept]
    resource_version: str
    """The version from which a watch must start to receive every change after this list."""

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
    """Fetch one page. Raises UnreadableError if it is larger than ``max_bytes`` or cannot be
    parsed. ``metadata_only`` is used only for pages of one object."""

    def __call__(
        self, params: Mapping[str, str], *, max_bytes: int, metadata_only: bool
    ) -> Coroutine[Any, Any, JsonResponse]: ...


async def read_list(
    fetch: Fetch,
    keep: Callable[[dict[str, Any]], Kept],
    *,
    params: Mapping[str, str],
    page_size: int,
    max_page_bytes: int = MAX_PAGE_BYTES,
) -> Listing[Kept]:
    """
    Fetch all pages, at the same resource version.

    If that version expires during the list (410, because of a slow reader or a compaction), the
    list starts again. It raises GoneError after repeated failures.
    """
    for attempt in range(ATTEMPTS):
        try:
            return await _read(fetch, keep, params, page_size, max_page_bytes)
        except GoneError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


async def _read(
    fetch: Fetch,
    keep: Callable[[dict[str, Any]], Kept],
    params: Mapping[str, str],
    page_size: int,
    max_page_bytes: int,
) -> Listing[Kept]:
    items: list[Kept] = []
    skipped: list[Skipped] = []
    limit, token = page_size, ""

    def ask(*, metadata_only: bool = False) -> asyncio.Task[JsonResponse]:
        query = {**params, "limit": str(limit), **({"continue": token} if token else {})}
        max_bytes = max_page_bytes if limit > 1 else MAX_OBJECT_BYTES
        return asyncio.create_task(fetch(query, max_bytes=max_bytes, metadata_only=metadata_only))

    page = ask()
    try:
        while True:
            reason = ""
            try:
                response = await page
            except UnreadableError as error:
                if limit > 1:
                    limit = max(limit // _SHRINK, 1)
                    page = ask()
                    continue
                # If the metadata cannot be read either, the object is not the cause, and the list
                # fails.
                page = ask(metadata_only=True)
                response, reason = await page, error.message
            bodies: list[dict[str, Any]] = response.body.get("items") or []
            metadata: Mapping[str, Any] = response.body.get("metadata") or {}
            token = metadata.get("continue") or ""
            if token:
                if response.size_bytes * 2 <= max_page_bytes:
                    limit = min(limit * 2, page_size)
                page = ask()
                await asyncio.sleep(0)  # this sends the request
            if reason:
                skipped += [
                    Skipped(metadata=each.get("metadata") or {}, reason=reason) for each in bodies
                ]
            else:
                items += map(keep, bodies)
            if not token:
                version = metadata.get("resourceVersion", "")
                return Listing(items=items, resource_version=version, skipped=tuple(skipped))
            del response, bodies  # free them before the next page is parsed
    finally:
        page.cancel()


# ---------------------------------------------------------------- watches

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]

_HEAD_BYTES = 4096
"""The first bytes of a line that are kept if the line is too long. Objects of built-in kinds begin
with their names. Objects of other kinds, whose fields are sorted, are never that long."""

_HEAD = re.compile(rb'\{"type":"(ADDED|MODIFIED|DELETED)",')
_MEMBER = re.compile(
    rb'[{,]"(?:(object|metadata)":(?=\{)|(name|namespace|uid|resourceVersion)":"([^"\\]*)")'
)
"""A field that identifies an object, at any depth. Within a string, the quotes would be escaped.
The API server does not send white space between tokens."""

_NAMES = {"name", "uid", "resourceVersion"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchEvent:
    """One change. In the object of a bookmark, only ``metadata.resourceVersion`` is meaningful."""

    type: EventType
    object: dict[str, Any]
    unreadable: str = ""
    """The reason why the object cannot be read. The object then holds only partial metadata."""


async def read_events(chunks: AsyncIterable[bytes], *, path: str) -> AsyncGenerator[WatchEvent]:
    """Yield each event. Raise an ERROR event as the error that it contains (410: GoneError)."""
    async for line, whole in _lines(chunks):
        try:
            event = parse(line) if whole else None
            reason = f"it has more than {MAX_OBJECT_BYTES} bytes"
        except orjson.JSONDecodeError as error:
            event, reason = parse_without_managers(line), f"it cannot be parsed ({error.msg})"
        if event is None:
            yield _unreadable(line, path=path, reason=reason)
            continue
        try:
            kind, obj = event["type"], event["object"]
        except (KeyError, TypeError):
            raise _no_event(path) from None
        if kind == "ERROR":
            raise error_of_status(obj, method="WATCH", path=path)
        yield WatchEvent(type=kind, object=obj)


def _unreadable(line: bytes, *, path: str, reason: str) -> WatchEvent:
    """Return an object's name and version without parsing it. Raise if the line is not an event."""
    head = _HEAD.match(line)
    metadata = _names(line)
    if head is None or not metadata.keys() >= _NAMES:
        raise _no_event(path)
    kind = cast("EventType", head[1].decode())
    return WatchEvent(type=kind, object={"metadata": metadata}, unreadable=reason)


def _names(line: bytes) -> dict[str, str]:
    """
    Return the fields directly in ``object.metadata`` that identify an object, without nested
    fields.

    Any writer of an object can nest its `managedFields` arbitrarily, with any names in them. In
    custom resources, they come before the names.
    """
    parents: list[bytes] = [b"object", b"metadata"]
    found: dict[str, str] = {}
    depth = counted = 0
    for member in _MEMBER.finditer(line):
        begin = member.start() + 1  # the position after the bracket or comma
        depth += nesting(line[counted:begin])
        counted = member.end()
        if depth > 3:
            continue
        parent, name, value = member.groups()
        if parents:
            if parent == parents[0] and depth == 3 - len(parents):
                del parents[0]
        elif depth == 3 and name is not None:
            found[name.decode()] = value.decode(errors="replace")
        if found.keys() >= _NAMES:
            break  # the namespace precedes the version
    return found


def _no_event(path: str) -> UnavailableError:
    why = "the watch sent a line that is not an event"
    return UnavailableError.no_response("WATCH", path, why=why)


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncGenerator[tuple[bytes, bool]]:
    """Yield each line, and whether it is complete. A line that is too long is truncated."""
    # readline is not used: its limit would have to be the size of the largest object, and it holds
    # the object in memory twice. An incomplete line at the end of the stream is dropped, because
    # the next watch starts from the last complete event.
    buffer = bytearray()
    whole = True
    async for chunk in chunks:
        searched = len(buffer)
        buffer += chunk
        while (end := buffer.find(b"\n", searched)) >= 0:
            whole = whole and end <= MAX_OBJECT_BYTES
            line = bytes(buffer[: end if whole else min(end, _HEAD_BYTES)])
            del buffer[: end + 1]
            searched = 0
            if line.strip():
                yield line, whole
            whole = True
        if len(buffer) > MAX_OBJECT_BYTES:
            del buffer[_HEAD_BYTES:]
            whole = False
