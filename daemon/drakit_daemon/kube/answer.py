"""
The body of a response: read up to a limit, and parsed.

It must not know connections and timeouts: the caller passes the chunks.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import Any, cast

import orjson

from drakit_daemon.kube.errors import UnreadableError

__all__ = ("Answer", "read_answer")

MAX_ANSWER_BYTES = 32 * 2**20
"""Bytes of a response, unless the caller sets another limit."""


_MANAGERS = b',"managedFields":['
"""The last field of an object's metadata (ObjectMeta). Its writers can nest it at will, because the
API server keeps it as it comes. Within a JSON string these quotes would be escaped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A JSON object, and its size in bytes."""

    body: dict[str, Any]
    size_bytes: int = 0


async def read_answer(
    chunks: AsyncIterable[bytes],
    *,
    method: str,
    path: str,
    max_bytes: int | None = None,
    one_metadata: bool = False,
) -> Answer:
    """
    Read a response; UnreadableError if it is too large, or is not a JSON object.

    With `one_metadata`, it is a list with the metadata of at most one object, whose `managedFields`
    are dropped before parsing.
    """
    bound = max_bytes or MAX_ANSWER_BYTES
    answer = bytearray()
    async for chunk in chunks:
        answer += chunk
        if len(answer) > bound:
            why = f"it has more than {bound} bytes"
            raise UnreadableError.no_answer(method, path, why=why)
    if one_metadata and (end := answer.find(_MANAGERS)) >= 0:
        answer[end:] = b"}}]}"  # of the metadata, the object, the items and the list
    try:
        parsed: Any = orjson.loads(answer) if answer else {}
    except orjson.JSONDecodeError as error:
        why = f"it cannot be parsed ({error.msg})"
        raise UnreadableError.no_answer(method, path, why=why) from None
    if not isinstance(parsed, dict):
        why = "it is not a JSON object; is there a proxy in between?"
        raise UnreadableError.no_answer(method, path, why=why)
    return Answer(body=cast("dict[str, Any]", parsed), size_bytes=len(answer))
