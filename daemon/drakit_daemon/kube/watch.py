"""
Watch streams: from chunks of bytes to typed events.

One stream, from its first byte to its end or first error; :mod:`.reflector` starts a new one. An
object that is too large or nested too deeply affects only its own event, which then contains only
the metadata at the start of its line.

It must not know connections and timeouts: the caller passes the chunks.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import orjson

from drakit_daemon.kube.errors import UnavailableError, error_of_status
from drakit_daemon.kube.listing import MAX_OBJECT_BYTES

__all__ = ("WatchEvent", "read_events")

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]

_HEAD_BYTES = 4096
"""The bytes of an unreadable object in which its name is searched: built-in kinds begin with it."""

_HEAD = re.compile(rb'\{"type":"(ADDED|MODIFIED|DELETED)","object":\{.*?"metadata":\{', re.DOTALL)
_NAMED = re.compile(rb'"(name|namespace|uid|resourceVersion)":"([^"\\]*)"')


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchEvent:
    """One change. A bookmark's object has only a meaningful ``metadata.resourceVersion``."""

    type: EventType
    object: dict[str, Any]
    unreadable: str = ""
    """Why the object cannot be read; the object then holds only partial metadata."""


async def read_events(chunks: AsyncIterable[bytes], *, path: str) -> AsyncGenerator[WatchEvent]:
    """Yield each event; raise an ERROR event as the error that it contains (410: GoneError)."""
    async for line, whole in _lines(chunks):
        try:
            event = orjson.loads(line) if whole else None
            reason = f"it has more than {MAX_OBJECT_BYTES} bytes"
        except orjson.JSONDecodeError as error:
            event, reason = None, f"it cannot be parsed ({error.msg})"
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
    """Return an object's name and version from the start of an event; raise if it is no event."""
    head = _HEAD.match(line, 0, _HEAD_BYTES)
    if head is None:
        raise _no_event(path)
    metadata: dict[str, str] = {}
    for found in _NAMED.finditer(line, head.end(), _HEAD_BYTES):
        metadata[found[1].decode()] = found[2].decode(errors="replace")
        if found[1] == b"resourceVersion":
            break  # the names that follow belong to owners and managers
    if not metadata.keys() >= {"name", "uid", "resourceVersion"}:
        raise _no_event(path)
    kind = cast("EventType", head[1].decode())
    return WatchEvent(type=kind, object={"metadata": metadata}, unreadable=reason)


def _no_event(path: str) -> UnavailableError:
    why = "the watch sent a line that is not an event"
    return UnavailableError.no_answer("WATCH", path, why=why)


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncGenerator[tuple[bytes, bool]]:
    """Yield each line, and whether it is complete: a line that is too long is truncated."""
    # Not readline: its limit would have to be as large as the largest object, and it is kept in
    # memory twice. What is left without a newline at the end is a broken line, and is dropped:
    # the next watch begins at the last whole event.
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
