"""
Watch streams: from chunks of bytes to typed events.

One stream, from its first byte to its end or first error; beginning anew is :mod:`.reflector`'s.

It must not know connections and timeouts: the chunks are handed in.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from drakit.kube.errors import UnavailableError, error_of_status

__all__ = ("WatchEvent", "read_events")

MAX_LINE_BYTES = 32 * 2**20
"""An object has at most 1.5 MiB in etcd, and grows in JSON; more than this is no event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchEvent:
    """One change. Of a bookmark's object only ``metadata.resourceVersion`` means anything."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: dict[str, Any]


async def read_events(chunks: AsyncIterable[bytes], *, path: str) -> AsyncGenerator[WatchEvent]:
    """Give each event; an ERROR event is raised as the error that it carries (410: GoneError)."""
    async for line in _lines(chunks, path=path):
        try:
            event = orjson.loads(line)
            kind, obj = event["type"], event["object"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            why = "the watch sent a line that is not an event"
            raise UnavailableError.no_answer("WATCH", path, why=why) from None
        if kind == "ERROR":
            raise error_of_status(obj, method="WATCH", path=path)
        yield WatchEvent(type=kind, object=obj)


async def _lines(chunks: AsyncIterable[bytes], *, path: str) -> AsyncGenerator[bytes]:
    # Not readline: its limit would have to be as large as the largest object, and it is kept in
    # memory twice. What is left without a newline at the end is a broken line, and is dropped:
    # the next watch begins at the last whole event.
    buffer = bytearray()
    async for chunk in chunks:
        searched = len(buffer)
        buffer += chunk
        while (end := buffer.find(b"\n", searched)) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            searched = 0
            if line.strip():
                yield line
        if len(buffer) > MAX_LINE_BYTES:
            why = f"the watch sent a line of more than {MAX_LINE_BYTES} bytes"
            raise UnavailableError.no_answer("WATCH", path, why=why)
