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
"""Maximum size of a page with several objects. A tenant can make one byte of JSON take 25 bytes
after parsing (``[[],[],...]``), so a parsed page takes at most 50 MiB."""

MAX_OBJECT_BYTES = 4 * 2**20
"""Maximum size of a single object. An object takes at most 1.5 MiB in etcd, but its JSON can be
larger."""

ATTEMPTS = 3
"""Maximum number of attempts to read a list whose resource version expires."""

REMEMBERED = 1000
"""Maximum number of skipped objects to remember, so that each is logged only once."""

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
    """All objects of a collection at one resource version."""

    items: list[Kept]
    resource_version: str
    """The resource version from which a watch must start to receive all changes after this list."""

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
                # If the metadata cannot be read either, the object is not the cause, so the list
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
                await asyncio.sleep(0)  # yield to the loop, so that it sends the request
            if reason:
                skipped += [
                    Skipped(metadata=each.get("metadata") or {}, reason=reason) for each in bodies
                ]
            else:
                items += map(keep, bodies)
            if not token:
                version = metadata.get("resourceVersion", "")
                return Listing(items=items, resource_version=version, skipped=tuple(skipped))
            del response, bodies  # free the memory before parsing the next page
    finally:
        page.cancel()


# ---------------------------------------------------------------- watches

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]

_HEAD_BYTES = 4096
"""How many bytes to keep from the start of a line that is too long. Objects of built-in kinds begin
with their names. The fields of other kinds are sorted, but their objects are never that long."""

_HEAD = re.compile(rb'\{"type":"(ADDED|MODIFIED|DELETED)",')
_MEMBER = re.compile(
    rb'[{,]"(?:(object|metadata)":(?=\{)|(name|namespace|uid|resourceVersion)":"([^"\\]*)")'
)
"""Matches a field that identifies an object, or opens ``object`` or ``metadata``, at any depth. It
cannot match inside a JSON string, because quotes are escaped there. The API server does not emit
whitespace between tokens."""

_NAMES = {"name", "uid", "resourceVersion"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchEvent:
    """One watch event. In a bookmark's object, only ``metadata.resourceVersion`` is meaningful."""

    type: EventType
    object: dict[str, Any]
    unreadable: str = ""
    """The reason why the object cannot be read. The object then holds only partial metadata."""


async def read_events(chunks: AsyncIterable[bytes], *, path: str) -> AsyncGenerator[WatchEvent]:
    """Yield each event. For an ERROR event, raise the error that it contains (410: GoneError)."""
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
    """Return an event with only an object's name, namespace, UID and version, without parsing the
    object. Raise an error if the line is not an event."""
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

    Any client that can write an object can nest its `managedFields` arbitrarily, and use any names
    in them. In custom resources, `managedFields` come before the name.
    """
    parents: list[bytes] = [b"object", b"metadata"]
    found: dict[str, str] = {}
    depth = counted = 0
    for member in _MEMBER.finditer(line):
        begin = member.start() + 1  # skip the bracket or comma
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
            break  # the namespace comes before the version
    return found


def _no_event(path: str) -> UnavailableError:
    why = "the watch sent a line that is not an event"
    return UnavailableError.no_response("WATCH", path, why=why)


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncGenerator[tuple[bytes, bool]]:
    """Yield each line, and whether it is complete. A line that is too long is truncated."""
    # Don't use readline: its limit would have to be the size of the largest object, and it holds
    # the object in memory twice. Drop an incomplete line at the end of the stream, because the next
    # watch starts from the last complete event.
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
